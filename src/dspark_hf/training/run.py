"""Training from end to end: data in, drafter out. The command line and the example script call `train_drafter`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from ..conversion.formats import DSPARK, detect_format, find_file, read_json
from ..conversion.loading import check_location, load_language_model, load_tokenizer
from ..data import DataReport, frequent_tokens, generation_prompt, prepare_dataset
from ..hub.card import write_card
from ..models import DRAFTER_CLASSES, Drafter, DSparkConfig, DSparkDrafter, without_adapters
from .arguments import DSparkTrainingArguments
from .losses import world_size
from .sharding import shard_layers
from .state_cache import SHARD_SIZE, StateCache, fill_state_cache
from .state_manifest import Manifest
from .target_states import place_target
from .trainer import DSparkTrainer

logger = logging.getLogger(__name__)

SUMMARY_FILE = "training_summary.json"

Data: TypeAlias = str | os.PathLike[str] | Dataset


def load_target(
    name_or_path: str | os.PathLike[str], device_map: str | torch.device | dict[str, Any] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A target in the dtype that it was saved in, and its tokenizer if it has one.

    Args:
        name_or_path: a folder or a repository of the Hub.
        device_map: where its weights go: a device, or `auto` and the like (see `from_pretrained`) for those of this
            process, which must then be the only one; `fsdp` spreads its layers over all processes. Unset, they are
            loaded on the CPU and training moves them to the device of the process.

    Raises:
        OSError: if there is none, or its weights are damaged.
        ValueError: if it is a drafter, or another model that is no causal language model, or `device_map` cannot be
            used with this number of processes.
    """
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential") and world_size() > 1:
        raise ValueError(
            f"`target_device_map` is {device_map!r} in {world_size()} processes, each of which would use the devices "
            "of all; start one process, or use 'fsdp'."
        )
    is_sharded = isinstance(device_map, str) and device_map == "fsdp"
    target = load_language_model(name_or_path, dtype="auto", device_map=None if is_sharded else device_map)
    if is_sharded:
        shard_layers(target)
    try:
        return target, load_tokenizer(name_or_path)
    except OSError:
        logger.warning("The target %r has no tokenizer; rows must hold `input_ids`.", str(name_or_path))
        return target, None


def choose_draft_tokens(
    target: PreTrainedModel,
    train_data: Data,
    draft_vocab_size: int,
    training_args: DSparkTrainingArguments,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    split_long: bool = False,
    num_proc: int | None = None,
) -> list[int]:
    """The `draft_vocab_size` tokens that occur most often in what `train_data` trains on, and the ends of a sequence.

    They are for `get_drafter(target, DSparkConfig(draft_vocab_size=...), draft_tokens=...)`: a drafter that predicts
    these tokens only is smaller and faster, and at every other token its proposal ends.

    Args:
        target: the model to draft for.
        train_data: see `train_drafter`, as are the other arguments.
        draft_vocab_size: how many.
        training_args: how to read the data.
        tokenizer: the target's.
        split_long: see above.
        num_proc: see above.

    Raises:
        OSError: if the data is not where it should be.
        ValueError: if no row of the data can be used, or the target's vocabulary has not so many tokens.
    """
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    with training_args.main_process_first(desc="counting tokens"):
        dataset, _ = _prepare(train_data, target, training_args, tokenizer, split_long, num_proc)
        return frequent_tokens(dataset, draft_vocab_size, vocab_size, always=_end_tokens(target, tokenizer))


def cache_target_states(
    target: str | os.PathLike[str] | PreTrainedModel,
    train_data: Data,
    target_layer_ids: Sequence[int],
    training_args: DSparkTrainingArguments,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    split_long: bool = False,
    num_proc: int | None = None,
    normalisers: bool | None = None,
    shard_size: float = SHARD_SIZE,
    announce: Callable[[str], None] = logger.info,
) -> StateCache:
    """Computes the states of `target` over `train_data` into `training_args.states_cache`, as far as they are missing.

    `train_drafter` with the same arguments does so itself, then reads them; this is for doing it ahead, or elsewhere.
    States are computed in the target's own dtype, whatever `training_args.bf16` says, and do not depend on the
    drafter but for the layers that it reads.

    A run that was broken off, even killed, goes on with the same call. States of another target, other layers or
    other data are refused: see `Source` for what is compared. The size is known before anything is computed, and
    refused if the disk has not room for it.

    Args:
        target: the model to draft for, or its name or path.
        train_data: see `train_drafter`, as are the other arguments.
        target_layer_ids: layers to capture, a drafter's `config.target_layer_ids`.
        training_args: where to (`states_cache`), what as (`states_storage`), how to read the data, and how many
            sequences the target reads at once (`per_device_train_batch_size`).
        tokenizer: the target's; loaded with the target if that is given by name.
        split_long: see above.
        num_proc: see above.
        normalisers: whether to compute what drafters with a reduced vocabulary need beside the states, so that the
            target's LM head does not run for its whole vocabulary in training (`Normaliser`); unset for what the
            folder has, none in a fresh one.
        shard_size: most MiB of a file, unless one sequence needs more; a folder to go on with keeps its own.
        announce: called with the predicted size, in words, before anything is computed.

    Raises:
        OSError: if the target or the data is not where it should be, or the disk has not room enough.
        ValueError: if no row of the data can be used, no folder is given, or the folder has something else in it.
    """
    if training_args.states_cache is None:
        raise ValueError("`states_cache` is unset; give the folder for the target's states.")
    if isinstance(target, (str, os.PathLike)):
        target, loaded = load_target(target)
        tokenizer = tokenizer or loaded
    with training_args.main_process_first(desc="tokenising"):
        dataset, _ = _prepare(train_data, target, training_args, tokenizer, split_long, num_proc)
    return _fill_cache(target, dataset, target_layer_ids, training_args, normalisers, shard_size, announce)


def _fill_cache(
    target: PreTrainedModel,
    dataset: Dataset,
    target_layer_ids: Sequence[int],
    training_args: DSparkTrainingArguments,
    normalisers: bool | None,
    shard_size: float = SHARD_SIZE,
    announce: Callable[[str], None] = logger.info,
) -> StateCache:
    """`fill_state_cache` as the arguments of a training say. Any process may be the one that does it."""
    place_target(target, training_args.device)
    return fill_state_cache(
        target,
        dataset,
        target_layer_ids,
        training_args.states_cache or "",
        storage=training_args.states_storage,
        normalisers=normalisers,
        shard_size=shard_size,
        batch_size=training_args.per_device_train_batch_size,
        announce=announce,
        show_progress=not training_args.disable_tqdm,
    )


def _prepare(
    data: Data,
    target: PreTrainedModel,
    training_args: DSparkTrainingArguments,
    tokenizer: PreTrainedTokenizerBase | None,
    split_long: bool,
    num_proc: int | None,
) -> tuple[Dataset, DataReport]:
    """`prepare_dataset` as the arguments of a training say, with no row longer than the target can read."""
    config = target.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None) or training_args.max_length
    return prepare_dataset(
        data,
        tokenizer,
        max_length=min(training_args.max_length, context),
        vocab_size=config.vocab_size,
        split_long=split_long,
        enable_thinking=training_args.enable_thinking,
        num_proc=num_proc,
    )


def _end_tokens(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Tokens that end the target's text."""
    text_config = target.config.get_text_config(decoder=True)
    ends: set[int] = set()
    for source in (target.generation_config, target.config, text_config, tokenizer):
        token = getattr(source, "eos_token_id", None)
        ends.update(token if isinstance(token, (list, tuple)) else [] if token is None else [token])
    return ends


def train_drafter(
    target: str | os.PathLike[str] | PreTrainedModel,
    train_data: Data,
    drafter: str | os.PathLike[str] | Drafter,
    training_args: DSparkTrainingArguments,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    eval_data: Data | None = None,
    split_long: bool = False,
    resume: bool | str = False,
    num_proc: int | None = None,
    callbacks: list[TrainerCallback] | None = None,
) -> Drafter:
    """Trains `drafter` for `target`; saves it, with tokenizer, summary and card, in `training_args.output_dir`.

    Drafters of all kinds are trained, each with the loss of its method (see `DSparkTrainer`). Weights are trained and
    saved in float32; with `training_args.bf16` the arithmetic is bfloat16. With `training_args.states_cache` the
    target's states over the training data come from that folder, which is filled first where it is not complete (by
    one of several processes, while the others wait).

    Args:
        target: the model to draft for, or its name or path.
        train_data: a JSON Lines file or a `Dataset`; see `dspark_hf.data.prepare_dataset` for the rows.
        drafter: a drafter from `get_drafter`, the path of a trained one to go on from, or a `peft.PeftModel` around
            a drafter: then its adapter is trained and saved.
        training_args: how to train, and where to save.
        tokenizer: the target's; loaded with the target if that is given by name.
        eval_data: evaluated as `training_args.eval_strategy` says, and at the end.
        split_long: cut long rows into several sequences instead of dropping their ends.
        resume: `True` for the last checkpoint in the output folder, or the path of one.
        num_proc: processes to tokenise with.
        callbacks: more callbacks for the trainer.

    Returns:
        The trained `drafter`, bound to the target and in evaluation mode. It keeps no reference to the target: hold on
        to that yourself, or bind the drafter again.

    Raises:
        OSError: if the target, the drafter or the data is not where it should be, or the target's states do not fit
            on the disk or are damaged there.
        ValueError: if the drafter does not fit the target, no row of the data can be used, there is no checkpoint to
            resume from, there are checkpoints or a drafter in the output folder and `resume` is not set, or
            `states_cache` was made from something else.

    Example:
        ```python
        drafter = get_drafter(target, tokenizer=tokenizer)
        args = DSparkTrainingArguments(output_dir="drafter", num_train_epochs=1)
        train_drafter(target, "train.jsonl", drafter, args, tokenizer=tokenizer)
        ```
    """
    _check_output(training_args.output_dir)
    checkpoint = find_checkpoint(training_args.output_dir, resume) if isinstance(resume, bool) else resume
    if isinstance(target, (str, os.PathLike)):
        target, loaded = load_target(target)
        tokenizer = tokenizer or loaded
    model: Any = drafter
    if not isinstance(without_adapters(drafter), Drafter):
        model = _load_drafter(drafter)
    model.check_target(target)
    if isinstance(model.config, DSparkConfig):
        model.config.confidence_temperatures = None  # those of other weights say nothing about the weights to come

    def prepare(data: Data) -> tuple[Dataset, DataReport]:
        return _prepare(data, target, training_args, tokenizer, split_long, num_proc)

    with training_args.main_process_first(desc="tokenising"):
        train_dataset, report = prepare(train_data)
        eval_dataset = prepare(eval_data)[0] if eval_data is not None else None
    if report.chats and tokenizer is not None:
        model.config.generation_prompt_ids = generation_prompt(tokenizer, training_args.enable_thinking) or None
        model.config.enable_thinking = training_args.enable_thinking
    if training_args.states_cache is not None:
        is_new = Manifest.load(Path(training_args.states_cache)) is None
        normalisers = True if is_new and without_adapters(model).d2t is not None else None
        _fill_cache(target, train_dataset, model.config.target_layer_ids, training_args, normalisers)
    trainer = DSparkTrainer(
        model=model.float(),
        target=target,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    metrics = dict(result.metrics)
    if eval_dataset is not None:
        metrics.update(trainer.evaluate())
    trainer.save_state()
    if trainer.is_world_process_zero():
        _write_summary(trainer, report, metrics)
        if isinstance(model, Drafter):  # an adapter has no card of a drafter
            write_card(training_args.output_dir)
    return model.eval()


def _load_drafter(path: Any) -> Drafter:
    """A trained drafter in this package's format, of any kind."""
    check_location(path, "`drafter`")
    config = read_json(find_file(path, "config.json", {}))
    drafter: Drafter = DRAFTER_CLASSES.get(config.get("model_type", ""), DSparkDrafter).from_pretrained(path)
    return drafter


def _check_output(output_dir: str) -> None:
    """Raises `ValueError` where saving would overwrite another model, such as the target."""
    config = Path(output_dir) / "config.json"
    if config.is_file() and detect_format(read_json(config)) != DSPARK:
        raise ValueError(f"`output_dir` is {output_dir!r}, which holds another model; give a fresh folder.")


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


def find_checkpoint(output_dir: str, resume: bool = True) -> str | None:
    """The last whole checkpoint in a run's output folder, `None` for a run that is not resumed.

    Raises:
        ValueError: if there is none to resume from, there are some that a new run would mix with its own, or the
            folder has a trained drafter that it would overwrite.
    """
    checkpoint = last_checkpoint(output_dir)
    if resume and checkpoint is None:
        raise ValueError(
            f"There is no checkpoint to resume from in {output_dir!r}: leave out `resume` to start anew, or give the "
            "output folder of the run that was broken off."
        )
    if not resume and checkpoint is not None:
        raise ValueError(
            f"{output_dir!r} has checkpoints of an earlier run, up to {os.path.basename(checkpoint)}: set `resume` to "
            "go on from the last one, or give a fresh folder as `output_dir`."
        )
    trained = [name for name in _WEIGHTS if (Path(output_dir) / name).is_file()]
    if not resume and trained:
        raise ValueError(
            f"`output_dir` is {output_dir!r}, which has a drafter ({trained[0]}) that would be overwritten; give a "
            "fresh folder, or remove that one."
        )
    return checkpoint


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The last whole checkpoint in a run's output folder, if there is one.

    A run that was killed may have left a part of one: the trainer's state, which is written last, is missing or cut.
    """
    found = {
        int(number): path.parent
        for path in Path(output_dir).glob("checkpoint-*/trainer_state.json")
        if (number := path.parent.name.rpartition("-")[2]).isdecimal() and _is_json(path)
    }
    return str(found[max(found)]) if found else None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _write_summary(trainer: DSparkTrainer, report: DataReport, metrics: dict[str, float]) -> None:
    """What was trained, on how much, how well; read by model cards."""
    args, drafter = trainer.args, trainer.model
    decisive = RECIPE | {*trainer.objective.arguments}
    names = [field.name for field in dataclasses.fields(DSparkTrainingArguments) if field.name in decisive]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    summary: dict[str, Any] = {
        "target": trainer.target.config.name_or_path,
        "drafter": drafter.config.model_type,
        "parameters": sum(p.numel() for p in drafter.parameters() if p.requires_grad),
        "data": dataclasses.asdict(report),
        "arguments": {name: _plain(getattr(args, name)) for name in names},
        "steps": trainer.state.global_step,
        "states": "online" if trainer.state_cache is None else trainer.state_cache.storage,
        "last_log": logs[-1] if logs else {},
        "metrics": metrics,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    path = Path(args.output_dir) / SUMMARY_FILE
    path.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Arguments that decide what comes out, of the many that `TrainingArguments` has, beside those of the objective.
RECIPE = {
    "bf16",
    "fp16",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_length",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "seed",
    "warmup_steps",
    "weight_decay",
}


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


__all__ = [
    "SUMMARY_FILE",
    "cache_target_states",
    "choose_draft_tokens",
    "find_checkpoint",
    "last_checkpoint",
    "load_target",
    "train_drafter",
]
