"""Trains the target model of the embedded pair: a small Qwen3 language model with its own tokenizer.

Reads what `prepare_text.py` wrote, trains a byte-level BPE tokenizer, packs the text, trains with
[`~transformers.Trainer`], and saves the finished model to `<work_dir>/target`: weights in bfloat16, loaded in float32
by default, with generation config, tokenizer and `training_summary.json`. A run that was interrupted resumes from its
last checkpoint.

    python examples/embedded_pair/train_target.py --work_dir build/embedded_pair --max_steps 1500
"""

import json
import logging
import math
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from datasets import Dataset, interleave_datasets, load_dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)

KINDS = ("code", "prose", "structured")
EOS_TOKEN = "<|endoftext|>"
MASK_TOKEN = "<|mask|>"


@dataclass
class TargetArguments:
    """What is trained and on what."""

    work_dir: str = field(
        default="build/embedded_pair",
        metadata={"help": "Folder that prepare_text.py wrote; the model goes there too."},
    )
    vocab_size: int = field(default=2048, metadata={"help": "Tokens in all, the two special ones included."})
    sequence_length: int = field(default=384, metadata={"help": "Tokens in a packed training sequence."})
    max_position_embeddings: int = field(default=1024, metadata={"help": "Longest sequence that the model declares."})
    hidden_size: int = field(default=192, metadata={"help": "Width of the model."})
    intermediate_size: int = field(default=512, metadata={"help": "Width of the feed-forward layers."})
    num_hidden_layers: int = field(default=10, metadata={"help": "Number of layers."})
    num_attention_heads: int = field(default=6, metadata={"help": "Number of query heads."})
    num_key_value_heads: int = field(default=2, metadata={"help": "Number of key and value heads."})
    head_dim: int = field(default=32, metadata={"help": "Width of a head."})

    def __post_init__(self) -> None:
        if self.vocab_size < 258:
            raise ValueError(f"vocab_size is {self.vocab_size}; choose at least 258: 256 bytes and 2 special tokens.")
        if not 2 <= self.sequence_length <= self.max_position_embeddings:
            raise ValueError(
                f"sequence_length is {self.sequence_length}; choose a value from 2 to max_position_embeddings "
                f"({self.max_position_embeddings})."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; choose a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )


@dataclass
class TargetTrainingArguments(TrainingArguments):
    """[`~transformers.TrainingArguments`] with the defaults of this run; every one can be set on the command line."""

    output_dir: str | None = field(
        default="build/embedded_pair/target_checkpoints", metadata={"help": "Folder for the checkpoints."}
    )
    max_steps: int = field(default=1500, metadata={"help": "Number of optimizer steps."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Sequences in a step."})
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "Sequences in an evaluation step."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Shape of the learning rate's decay."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up steps; below 1, a share of all steps."})
    weight_decay: float = field(default=0.1, metadata={"help": "Weight decay of the matrices; norms have none."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Second-moment decay of AdamW."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Largest gradient norm."})
    logging_steps: float = field(default=20, metadata={"help": "Steps between two log lines."})
    save_steps: float = field(default=120, metadata={"help": "Steps between two checkpoints."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Number of checkpoints kept."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Whether to pin the batches' memory."})
    disable_tqdm: bool | None = field(default=True, metadata={"help": "Whether to log lines instead of a bar."})
    seed: int = field(default=42, metadata={"help": "Seed of the weights and of the order of the data."})


def load_text(work_dir: Path) -> dict[str, Dataset]:
    """Loads the two parts of the prepared text."""
    files = {part: work_dir / f"{part}.jsonl" for part in ("train", "heldout")}
    for path in files.values():
        if not path.is_file():
            raise ValueError(f"work_dir is {str(work_dir)!r}, which has no {path.name}; run prepare_text.py first.")
    loaded = load_dataset(
        "json",
        data_files={part: str(path) for part, path in files.items()},
        cache_dir=str(work_dir / "datasets_cache"),
    )
    return {part: loaded[part] for part in files}


def train_tokenizer(text: Dataset, args: TargetArguments, folder: Path) -> PreTrainedTokenizerBase:
    """Trains and saves the byte-level BPE tokenizer, or loads the one saved before."""
    if not (folder / "tokenizer.json").is_file():

        def batches() -> Iterator[list[str]]:
            for batch in text.iter(batch_size=64):
                yield batch["text"]

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=args.vocab_size,
            special_tokens=[EOS_TOKEN, MASK_TOKEN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(batches(), trainer=trainer)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=EOS_TOKEN,
            eos_token=EOS_TOKEN,
            pad_token=EOS_TOKEN,
            mask_token=MASK_TOKEN,
            padding_side="left",
            model_max_length=args.max_position_embeddings,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    if len(loaded) != args.vocab_size:
        raise ValueError(
            f"vocab_size is {args.vocab_size}, but the tokenizer in {folder} has {len(loaded)} tokens; delete that "
            f"folder, or give the text more variety."
        )
    return loaded


def pack(text: Dataset, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Dataset:
    """Joins documents, each preceded by the end-of-text token, and cuts the stream into equal sequences.

    Returns:
        A dataset of `input_ids` and `labels`, both of shape `(sequence_length,)`; the last, incomplete sequence of
        every batch of documents is dropped.
    """

    def tokenize_and_cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        stream: list[int] = []
        for ids in tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]:
            stream.extend([tokenizer.eos_token_id, *ids])
        end = len(stream) - len(stream) % sequence_length
        sequences = [stream[start : start + sequence_length] for start in range(0, end, sequence_length)]
        return {"input_ids": sequences, "labels": sequences}

    return text.map(tokenize_and_cut, batched=True, batch_size=1000, remove_columns=text.column_names)


def pack_by_kind(text: Dataset, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> dict[str, Dataset]:
    """Packs the documents of each kind on their own."""
    packed: dict[str, Dataset] = {}
    for kind in KINDS:
        rows = [row for row, row_kind in enumerate(text["kind"]) if row_kind == kind]
        documents = text.select(rows)
        packed[kind] = pack(documents, tokenizer, sequence_length)
        if len(packed[kind]) == 0:
            raise ValueError(f"The text has too little of the kind {kind!r}; run prepare_text.py with more of it.")
    return packed


def build_model(args: TargetArguments, tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """Builds the model with fresh weights."""
    config = Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_key_value_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def save_target(model: Qwen3ForCausalLM, tokenizer_dir: Path, folder: Path) -> None:
    """Saves the weights in bfloat16 with a config that loads them in float32, and checks that it does."""
    model = model.to(torch.bfloat16)
    config = model.config
    config.use_cache = True
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    shutil.copytree(tokenizer_dir, folder, dirs_exist_ok=True)

    config_path = folder / "config.json"
    values = json.loads(config_path.read_text(encoding="utf-8"))
    values["dtype"] = "float32"
    config_path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    stored = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
    loaded = AutoModelForCausalLM.from_pretrained(folder).dtype
    if stored != {torch.bfloat16} or loaded != torch.float32:
        raise RuntimeError(f"The model in {folder} is stored as {stored} and loads as {loaded}.")


def evaluate_target(folder: Path, heldout: dict[str, Dataset], args: TrainingArguments) -> dict[str, dict[str, float]]:
    """Measures the saved model: mean held-out loss per token, in nats, and perplexity, for each kind."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = Trainer(model=model, args=args, data_collator=default_data_collator)
    results: dict[str, dict[str, float]] = {}
    for kind, dataset in heldout.items():
        loss = trainer.evaluate(dataset, metric_key_prefix=f"eval_{kind}")[f"eval_{kind}_loss"]
        results[kind] = {"loss": round(loss, 4), "perplexity": round(math.exp(loss), 3), "sequences": len(dataset)}
    return results


class MinutesCallback(TrainerCallback):
    """Notes the minutes spent so far at every checkpoint, so that a resumed run knows them."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.before = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        path = Path(args.output_dir) / "minutes.json"
        if state.global_step and path.is_file():
            self.before = json.loads(path.read_text(encoding="utf-8"))
        self.started = time.monotonic()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        (Path(args.output_dir) / "minutes.json").write_text(json.dumps(self.minutes), encoding="utf-8")

    @property
    def minutes(self) -> float:
        """Minutes of training, those of the interrupted runs before this one included."""
        return self.before + (time.monotonic() - self.started) / 60


def main(args: TargetArguments, training_args: TargetTrainingArguments) -> None:
    """Trains, saves, evaluates and describes the target."""
    set_seed(training_args.seed)
    work_dir = Path(args.work_dir)
    text = load_text(work_dir)
    tokenizer_dir = work_dir / "tokenizer"
    tokenizer = train_tokenizer(text["train"], args, tokenizer_dir)
    train = pack_by_kind(text["train"], tokenizer, args.sequence_length)
    heldout = pack_by_kind(text["heldout"], tokenizer, args.sequence_length)
    # Even shares: the smaller kinds come round again until each has given as many sequences as the largest.
    mixed = interleave_datasets([train[kind] for kind in KINDS], stopping_strategy="all_exhausted")
    model = build_model(args, tokenizer)
    logger.info("%d parameters; sequences: %s", model.num_parameters(), {kind: len(train[kind]) for kind in KINDS})

    clock = MinutesCallback()
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=mixed,
        data_collator=default_data_collator,
        callbacks=[clock],
    )
    output_dir = Path(training_args.output_dir)
    checkpoint = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
    trainer.train(resume_from_checkpoint=checkpoint)
    logged_losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    target_dir = work_dir / "target"
    save_target(trainer.model, tokenizer_dir, target_dir)
    sources_path = work_dir / "sources.json"
    tokens_per_step = training_args.train_batch_size * training_args.gradient_accumulation_steps * args.sequence_length
    summary: dict[str, Any] = {
        "parameters": model.num_parameters(),
        "steps": trainer.state.global_step,
        "tokens_seen": trainer.state.global_step * tokens_per_step,
        "epochs": round(trainer.state.epoch or 0.0, 3),
        "minutes": round(clock.minutes, 1),
        "learning_rate": training_args.learning_rate,
        "sequences_per_step": tokens_per_step // args.sequence_length,
        "sequence_length": args.sequence_length,
        "seed": training_args.seed,
        "last_train_loss": logged_losses[-1] if logged_losses else None,
        "heldout": evaluate_target(target_dir, heldout, training_args),
        "train_tokens": {kind: len(train[kind]) * args.sequence_length for kind in KINDS},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "datasets": datasets.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "sources": json.loads(sources_path.read_text(encoding="utf-8")) if sources_path.is_file() else None,
    }
    (target_dir / "training_summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    logger.info("Saved the target to %s: %s", target_dir, summary["heldout"])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    target_arguments, target_training_arguments = HfArgumentParser(
        (TargetArguments, TargetTrainingArguments)
    ).parse_args_into_dataclasses()
    main(target_arguments, target_training_arguments)
