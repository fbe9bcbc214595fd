"""Trains a drafter for a target from a JSON Lines file.

    python examples/train_drafter.py --target Qwen/Qwen3-0.6B --data_file train.jsonl --output_dir drafter \
        --per_device_train_batch_size 8 --num_train_epochs 1 --bf16

A row of the file has `messages`, `prompt` and `response`, `text`, or `input_ids`. Best are answers that the target
itself gave: the drafter learns to guess what this target says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import HfArgumentParser, set_seed

from dspark_hf import AutoDrafter, DSparkConfig, DSparkTrainingArguments, get_drafter, train_drafter
from dspark_hf.training import choose_draft_tokens, load_target


@dataclass
class ModelArguments:
    """Which target, and what drafter for it."""

    target: str = field(metadata={"help": "Model to draft for: a Hub repository or a local folder."})
    warm_start: str | None = field(default=None, metadata={"help": "Trained drafter to go on from."})
    drafter_layers: int = field(default=2, metadata={"help": "Layers of the drafter."})
    block_size: int = field(default=7, metadata={"help": "Tokens drafted in one round."})
    markov_rank: int = field(default=256, metadata={"help": "Rank of the sequential head; 0 for none."})
    markov_head_type: str = field(default="vanilla", metadata={"help": "`vanilla`, `gated` or `rnn`."})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Predict only so many tokens, the most frequent of the data; all if unset."}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Token for undecided slots; chosen from the tokenizer if unset."}
    )


@dataclass
class DataArguments:
    """Which data."""

    data_file: str = field(metadata={"help": "JSON Lines file with rows to train on."})
    eval_file: str | None = field(default=None, metadata={"help": "JSON Lines file with rows held out."})
    split_long: bool = field(default=False, metadata={"help": "Cut long rows into several sequences."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, DSparkTrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    target, tokenizer = load_target(model_args.target)
    if model_args.warm_start is not None:
        drafter = AutoDrafter.from_pretrained(model_args.warm_start)
    else:
        config = DSparkConfig(
            num_hidden_layers=model_args.drafter_layers,
            block_size=model_args.block_size,
            markov_rank=model_args.markov_rank,
            markov_head_type=model_args.markov_head_type,
            draft_vocab_size=model_args.draft_vocab_size,
            mask_token_id=model_args.mask_token_id,
        )
        draft_tokens = None
        if config.draft_vocab_size is not None:
            draft_tokens = choose_draft_tokens(
                target,
                data_args.data_file,
                config.draft_vocab_size,
                training_args,
                tokenizer=tokenizer,
                split_long=data_args.split_long,
            )
        drafter = get_drafter(target, config, tokenizer=tokenizer, draft_tokens=draft_tokens)
    train_drafter(
        target,
        data_args.data_file,
        drafter,
        training_args,
        tokenizer=tokenizer,
        eval_data=data_args.eval_file,
        split_long=data_args.split_long,
    )


if __name__ == "__main__":
    main()
