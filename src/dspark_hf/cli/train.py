"""`dspark train`: trains a drafter for a target."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import user_errors

FLAGS = {
    "block_size": "--block-size",
    "ce_weight": "--ce-weight",
    "draft_vocab_size": "--draft-vocab-size",
    "enable_thinking": "--thinking/--no-thinking",
    "gradient_accumulation_steps": "--gradient-accumulation",
    "learning_rate": "--learning-rate",
    "logging_steps": "--logging-steps",
    "markov_rank": "--markov-rank",
    "mask_token_id": "--mask-token-id",
    "max_length": "--max-length",
    "max_steps": "--max-steps",
    "num_anchors": "--num-anchors",
    "num_hidden_layers": "--drafter-layers",
    "num_train_epochs": "--epochs",
    "output_dir": "--output",
    "per_device_train_batch_size": "--batch-size",
    "resume": "--resume",
    "save_steps": "--save-steps",
    "seed": "--seed",
    "target": "--target",
    "target_layer_ids": "--target-layers",
    "tv_weight": "--tv-weight",
}
"""Flags by the library's names for them."""


class MarkovHead(str, enum.Enum):
    """Kinds of sequential head."""

    vanilla = "vanilla"
    gated = "gated"
    rnn = "rnn"


def train(
    target: Annotated[str, typer.Option(help="Model to draft for: a Hub repository or a local folder.")],
    data: Annotated[
        str,
        typer.Option(
            help="Training rows, a JSON Lines file. Each row has `messages`, `prompt` and `response`, `text`, or "
            "`input_ids` with an optional `loss_mask`."
        ),
    ],
    output: Annotated[str, typer.Option(help="Folder for the drafter and its checkpoints.")],
    eval_data: Annotated[
        str | None, typer.Option(help="Held-out rows of the same form, evaluated after each epoch.")
    ] = None,
    drafter_layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 2,
    block_size: Annotated[int, typer.Option(help="Tokens drafted in one round.")] = 7,
    markov_rank: Annotated[int, typer.Option(help="Rank of the sequential head; 0 for none (DFlash).")] = 256,
    markov_head: Annotated[MarkovHead, typer.Option(help="Kind of sequential head.")] = MarkovHead.vanilla,
    confidence: Annotated[bool, typer.Option(help="Whether the drafter predicts if its tokens survive.")] = True,
    target_layers: Annotated[
        str | None,
        typer.Option(help="Target layers to read, separated by commas; -1 is the embedding output. [default: spread]"),
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Predict only so many tokens, the most frequent of the data. [default: all]")
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Token for undecided slots, one that text never contains. [default: found]")
    ] = None,
    num_anchors: Annotated[int, typer.Option(help="Blocks drafted in each training sequence.")] = 512,
    max_length: Annotated[int, typer.Option(help="Longest training sequence, in tokens.")] = 4096,
    split_long: Annotated[
        bool, typer.Option("--split-long", help="Cut long rows into several sequences instead of dropping their ends.")
    ] = False,
    thinking: Annotated[
        bool | None, typer.Option(help="Thinking mode of the chat template. [default: the template's]")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per device and step.")] = 8,
    gradient_accumulation: Annotated[int, typer.Option(help="Batches that make one optimiser step.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-4,
    ce_weight: Annotated[float, typer.Option(help="Weight of the cross entropy in the loss.")] = 0.1,
    tv_weight: Annotated[float, typer.Option(help="Weight of the distance between the distributions.")] = 0.9,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 3.0,
    max_steps: Annotated[int, typer.Option(help="Optimiser steps, in place of --epochs; -1 for none.")] = -1,
    warm_start: Annotated[
        str | None, typer.Option(help="Trained drafter to go on from; its shape replaces the options for it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")] = False,
    save_steps: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    logging_steps: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and anchors.")] = 42,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16; weights stay float32.")] = False,
) -> None:
    """Train a drafter for a target.

    The target stays frozen and its states are computed on the way, so nothing but text is needed. The drafter, the
    tokenizer and training_summary.json are written to --output. On several GPUs start it with
    `torchrun --nproc-per-node N --no-python dspark train ...`.
    """
    # Here and not above: other commands start faster without the trainer.
    from transformers import set_seed

    from ..factory import AutoDrafter, get_drafter
    from ..models import DSparkConfig
    from ..training import (
        DSparkTrainingArguments,
        choose_draft_tokens,
        find_checkpoint,
        load_target,
        train_drafter,
    )

    with user_errors(**FLAGS):
        _check_file("--data", data)
        if eval_data is not None:
            _check_file("--eval-data", eval_data)
        args = DSparkTrainingArguments(
            output_dir=output,
            num_anchors=num_anchors,
            max_length=max_length,
            enable_thinking=thinking,
            ce_weight=ce_weight,
            tv_weight=tv_weight,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            gradient_accumulation_steps=gradient_accumulation,
            learning_rate=learning_rate,
            num_train_epochs=epochs,
            max_steps=max_steps,
            eval_strategy="no" if eval_data is None else "epoch",
            save_steps=save_steps,
            save_total_limit=2,
            logging_steps=logging_steps,
            seed=seed,
            bf16=bf16,
        )
        checkpoint = find_checkpoint(output, resume)
        config = DSparkConfig(
            num_hidden_layers=drafter_layers,
            block_size=block_size,
            markov_rank=markov_rank,
            markov_head_type=markov_head.value,
            enable_confidence_head=confidence,
            target_layer_ids=_layers(target_layers),
            mask_token_id=mask_token_id,
            draft_vocab_size=draft_vocab_size,
        )
    start = checkpoint or warm_start
    with user_errors(pretrained_model_name_or_path="--resume" if checkpoint else "--warm-start"):
        drafter: Any = None if start is None else AutoDrafter.from_pretrained(start)
    with user_errors(**FLAGS):
        model, tokenizer = load_target(target)
        if drafter is None:
            draft_tokens = None
            if draft_vocab_size is not None:
                draft_tokens = choose_draft_tokens(
                    model, data, draft_vocab_size, args, tokenizer=tokenizer, split_long=split_long
                )
            set_seed(seed)
            drafter = get_drafter(model, config, tokenizer=tokenizer, draft_tokens=draft_tokens)
    with user_errors(**FLAGS):
        train_drafter(
            model,
            data,
            drafter,
            args,
            tokenizer=tokenizer,
            eval_data=eval_data,
            split_long=split_long,
            resume=checkpoint or False,
        )
    typer.echo(f"The drafter is in {os.fspath(Path(output))}.")


def _check_file(option: str, path: str) -> None:
    """Said before the target is loaded, which may take minutes."""
    if Path(path).is_dir():
        raise ValueError(f"{option} is {path!r}, which is a folder; give a JSON Lines file.")
    if not Path(path).is_file():
        raise ValueError(f"{option} is {path!r}, and there is no such file.")


def _layers(text: str | None) -> list[int] | None:
    """`--target-layers` as numbers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--target-layers is {text!r}; give numbers separated by commas, such as 1,9,17.") from error


__all__ = ["train"]
