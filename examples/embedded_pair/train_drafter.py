"""Trains the drafter of the embedded pair on the text that the target wrote.

python examples/embedded_pair/train_drafter.py --work_dir build/embedded_pair
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser, set_seed

from dspark_hf import DSparkConfig, DSparkDrafter, DSparkTrainingArguments, get_drafter, train_drafter
from dspark_hf.training import last_checkpoint, load_target


@dataclass
class DrafterArguments:
    """Shape of the drafter."""

    work_dir: str = field(
        default="build/embedded_pair", metadata={"help": "Folder of the trained target and of the text it wrote."}
    )
    num_hidden_layers: int = field(default=2, metadata={"help": "Layers of the drafter."})
    block_size: int = field(default=7, metadata={"help": "Tokens drafted in one round."})
    intermediate_size: int = field(default=704, metadata={"help": "Width of the drafter's MLPs."})
    markov_rank: int = field(default=64, metadata={"help": "Rank of the sequential head."})
    markov_head_type: str = field(default="rnn", metadata={"help": "`vanilla`, `gated` or `rnn`."})
    warm_start: str | None = field(
        default=None,
        metadata={"help": "Trained drafter to go on from; of the fields above only the block size counts then."},
    )


@dataclass
class DrafterTrainingArguments(DSparkTrainingArguments):
    """`DSparkTrainingArguments` with the defaults of this run; every one can be set on the command line."""

    output_dir: str | None = field(
        default="build/embedded_pair/drafter", metadata={"help": "Folder for the drafter and its checkpoints."}
    )
    num_anchors: int = field(default=48, metadata={"help": "Blocks drafted in each sequence."})
    max_length: int = field(default=288, metadata={"help": "Longest sequence."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Sequences in a step."})
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "Sequences in an evaluation step."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate."})
    max_steps: int = field(default=3000, metadata={"help": "Number of optimizer steps."})
    logging_steps: float = field(default=20, metadata={"help": "Steps between two log lines."})
    save_steps: float = field(default=200, metadata={"help": "Steps between two checkpoints."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Number of checkpoints kept."})
    disable_tqdm: bool | None = field(default=True, metadata={"help": "Whether to log lines instead of a bar."})


def main() -> None:
    drafter_args, training_args = HfArgumentParser(
        (DrafterArguments, DrafterTrainingArguments)
    ).parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    work_dir = Path(drafter_args.work_dir)
    target, tokenizer = load_target(str(work_dir / "target"))
    checkpoint = last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)
    config = DSparkConfig(
        num_hidden_layers=drafter_args.num_hidden_layers,
        block_size=drafter_args.block_size,
        intermediate_size=drafter_args.intermediate_size,
        markov_rank=drafter_args.markov_rank,
        markov_head_type=drafter_args.markov_head_type,
    )
    start = checkpoint or drafter_args.warm_start
    train_drafter(
        target,
        str(work_dir / "drafter_train.jsonl"),
        DSparkDrafter.from_pretrained(start, block_size=drafter_args.block_size)
        if start
        else get_drafter(target, config, tokenizer=tokenizer),
        training_args,
        tokenizer=tokenizer,
        eval_data=str(work_dir / "drafter_eval.jsonl"),
        resume=checkpoint or False,
    )


if __name__ == "__main__":
    main()
