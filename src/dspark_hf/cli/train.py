"""`dspark train`: trains a drafter for a target."""

from __future__ import annotations

import enum
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import user_errors
from .options import MaxLength, Method, SplitLong, TargetLayers, Thinking, check_file, parse_layers

if TYPE_CHECKING:
    from ..models import Drafter
    from ..training.recipe import Arguments, DrafterArguments, RecipeParser

FLAGS = {
    "block_size": "--block-size",
    "ce_weight": "--ce-weight",
    "data_file": "--data",
    "draft_vocab_size": "--draft-vocab-size",
    "enable_confidence_head": "--confidence/--no-confidence",
    "enable_thinking": "--thinking/--no-thinking",
    "eval_file": "--eval-data",
    "gradient_accumulation_steps": "--gradient-accumulation",
    "learning_rate": "--learning-rate",
    "logging_steps": "--logging-steps",
    "markov_head_type": "--markov-head",
    "markov_rank": "--markov-rank",
    "mask_token_id": "--mask-token-id",
    "max_length": "--max-length",
    "max_steps": "--max-steps",
    "method": "--method",
    "num_anchors": "--num-anchors",
    "num_hidden_layers": "--drafter-layers",
    "num_train_epochs": "--epochs",
    "output_dir": "--output",
    "per_device_train_batch_size": "--batch-size",
    "resume": "--resume",
    "save_steps": "--save-steps",
    "seed": "--seed",
    "split_long": "--split-long",
    "states_cache": "--states-cache",
    "states_storage": "--states-storage",
    "target": "--target",
    "target_device_map": "--target-device-map",
    "target_layer_ids": "--target-layers",
    "tv_weight": "--tv-weight",
    "warm_start": "--warm-start",
}
"""Flags by the library's names for them."""

OPTIONS = {flag.split("/")[0].removeprefix("--").replace("-", "_"): name for name, flag in FLAGS.items()}
"""The library's names by this command's; all others are the same."""

PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of the command: options that it does not know are looked up among the library's."""


class MarkovHead(str, enum.Enum):
    """Kinds of sequential head."""

    vanilla = "vanilla"
    gated = "gated"
    rnn = "rnn"


def train(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Option(help="Model to draft for: a Hub repository or a local folder. (needed)")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Training rows, a JSON Lines file. Each row has `messages`, `prompt` and `response`, `text`, or "
            "`input_ids` with an optional `loss_mask`. (needed)"
        ),
    ] = None,
    output: Annotated[str | None, typer.Option(help="Folder for the drafter and its checkpoints. (needed)")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="YAML file with options by the library's names; those given here go first."),
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Held-out rows of the same form, evaluated after each epoch.")
    ] = None,
    target_device_map: Annotated[
        str | None,
        typer.Option(
            help="Where the target's weights go: `fsdp` spreads its layers over all processes, `auto` over the "
            "devices of one process. (default: whole on the device of each process)"
        ),
    ] = None,
    method: Annotated[
        Method,
        typer.Option(
            help="Kind of drafter: blocks with a sequential and a confidence head, blocks without, EAGLE-3, or one "
            "module of multi-token prediction."
        ),
    ] = Method.dspark,
    drafter_layers: Annotated[
        int | None, typer.Option(help="Layers of the drafter. (default: 2; 1 for eagle3 and mtp)")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens drafted in one round. (default: 7; 1 for mtp)")
    ] = None,
    markov_rank: Annotated[
        int | None, typer.Option(help="Rank of the sequential head of dspark; 0 for none. (default: 256)")
    ] = None,
    markov_head: Annotated[MarkovHead | None, typer.Option(help="Kind of sequential head. (default: vanilla)")] = None,
    confidence: Annotated[
        bool | None,
        typer.Option(
            "--confidence/--no-confidence",
            help="Whether the drafter predicts if its tokens survive. (default: dspark does)",
        ),
    ] = None,
    target_layers: TargetLayers = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Predict only so many tokens, the most frequent of the data. (default: all)")
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Token for undecided slots, one that text never contains. (default: found)")
    ] = None,
    num_anchors: Annotated[
        int, typer.Option(help="Blocks drafted in each training sequence; eagle3 and mtp draft from every position.")
    ] = 512,
    max_length: MaxLength = 4096,
    split_long: SplitLong = False,
    thinking: Thinking = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per device and step.")] = 8,
    gradient_accumulation: Annotated[int, typer.Option(help="Batches that make one optimiser step.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-4,
    ce_weight: Annotated[
        float, typer.Option(help="Weight of the cross entropy in the loss of dspark; dflash has 1.")
    ] = 0.1,
    tv_weight: Annotated[
        float, typer.Option(help="Weight of the distance between the distributions; dflash has 0.")
    ] = 0.9,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 3.0,
    max_steps: Annotated[int, typer.Option(help="Optimiser steps, in place of --epochs; -1 for none.")] = -1,
    states_cache: Annotated[
        str | None,
        typer.Option(help="Folder for the target's states, as `dspark cache` fills it. (default: none on disk)"),
    ] = None,
    states_storage: Annotated[
        str | None,
        typer.Option(
            help="What states are stored as: `bf16`, `float32` or `int8`. (default: bf16, or what the folder has)"
        ),
    ] = None,
    warm_start: Annotated[
        str | None, typer.Option(help="Trained drafter to go on from; its shape replaces the options for it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")] = False,
    save_steps: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    logging_steps: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and anchors.")] = 42,
    bf16: Annotated[bool, typer.Option(help="Compute in bfloat16; weights stay float32.")] = False,
) -> None:
    """Train a drafter for a target.

    The target stays frozen, and its states are computed on the way unless --states-cache names a folder for them
    (`dspark cache`), so nothing but text is needed. The drafter, the tokenizer and training_summary.json are written
    to --output. Every other option of `DSparkTrainingArguments` is given by its name, here (`--weight-decay 0.1`) or
    in the recipe (`weight_decay: 0.1`). On several GPUs start it with
    `accelerate launch --no_python dspark train ...`.
    """
    # Here and not above: other commands start faster without the trainer.
    from ..training.recipe import RecipeParser

    parser = RecipeParser()
    with user_errors():
        in_recipe = {} if recipe is None else parser.read(recipe)
    with user_errors(**FLAGS):
        _train(_arguments(context, parser, in_recipe))


def _arguments(context: typer.Context, parser: RecipeParser, in_recipe: dict[str, Any]) -> Arguments:
    """The options of the command line, before those of the recipe, before this command's defaults."""
    given = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name != "recipe" and source is not None and source.name == "COMMANDLINE":
            given[OPTIONS.get(name, name)] = value
    if "target_layer_ids" in given:
        given["target_layer_ids"] = parse_layers(given["target_layer_ids"])
    for name in {"markov_head_type", "method"} & given.keys():
        # Older versions of Typer give the string, newer ones the member.
        given[name] = getattr(given[name], "value", given[name])
    defaults: dict[str, Any] = {"logging_steps": 10, "save_total_limit": 2}
    if "per_device_train_batch_size" in given:
        defaults["per_device_eval_batch_size"] = given["per_device_train_batch_size"]
    if "eval_file" in {**in_recipe, **given}:
        defaults["eval_strategy"] = "epoch"
    return parser.parse_values({**defaults, **in_recipe, **given}, context.args, flags=OPTIONS)


def _train(arguments: Arguments) -> None:
    """Trains as the options say."""
    from transformers import set_seed

    from ..training import find_checkpoint, load_target, train_drafter

    drafter_args, data_args, training_args = arguments
    check_file("--data", data_args.data_file)
    if data_args.eval_file is not None:
        check_file("--eval-data", data_args.eval_file)
    checkpoint = training_args.resume_from_checkpoint or find_checkpoint(training_args.output_dir, drafter_args.resume)
    drafter_args.drafter_config()  # what is wrong with it is said before the target is loaded
    trained = _trained_drafter(checkpoint, drafter_args.warm_start)
    target, tokenizer = load_target(
        drafter_args.target, device_map=drafter_args.target_device_map or training_args.device
    )
    if trained is not None:
        _check_fit(trained, target, checkpoint, drafter_args.warm_start)
        if training_args.should_log:
            _say_what_stays(drafter_args, trained)
    set_seed(training_args.seed)
    train_drafter(
        target,
        data_args.data_file,
        trained or _new_drafter(target, tokenizer, arguments),
        training_args,
        tokenizer=tokenizer,
        eval_data=data_args.eval_file,
        split_long=data_args.split_long,
        resume=checkpoint or False,
        num_proc=data_args.num_proc,
    )
    if training_args.should_save:
        typer.echo(f"The drafter is in {os.fspath(Path(training_args.output_dir))}.")


def _trained_drafter(checkpoint: str | None, warm_start: str | None) -> Drafter | None:
    """The drafter to go on from, if there is one."""
    from ..factory import AutoDrafter

    start = checkpoint or warm_start
    with user_errors(pretrained_model_name_or_path="--resume" if checkpoint else "--warm-start"):
        return None if start is None else AutoDrafter.from_pretrained(start)


def _check_fit(drafter: Drafter, target: Any, checkpoint: str | None, warm_start: str | None) -> None:
    """Raises `ValueError` where the drafter to go on from is another target's, and says where it came from."""
    try:
        drafter.check_target(target)
    except ValueError as error:
        option, value = ("--resume", checkpoint) if checkpoint else ("--warm-start", warm_start)
        message = re.sub("`([a-z_]+)`", r"\1", str(error))  # they are no options of this command
        raise ValueError(f"{option} is {value!r}, whose drafter does not fit the target. {message}") from error


def _say_what_stays(asked: DrafterArguments, drafter: Drafter) -> None:
    """Names each option for the drafter's shape that the one to go on from does not follow."""
    for name in type(drafter.config).drafter_fields():
        value, has = getattr(asked, name, None), getattr(drafter.config, name)
        if value not in (None, has):
            typer.echo(f"! {FLAGS.get(name, name)} is {value!r}; the drafter to go on from has {has!r}, which stays.")


def _new_drafter(target: Any, tokenizer: Any, arguments: Arguments) -> Drafter:
    """A new drafter as the options describe it."""
    from ..factory import get_drafter
    from ..training import choose_draft_tokens

    drafter_args, data_args, training_args = arguments
    draft_tokens = None
    if drafter_args.draft_vocab_size is not None:
        draft_tokens = choose_draft_tokens(
            target,
            data_args.data_file,
            drafter_args.draft_vocab_size,
            training_args,
            tokenizer=tokenizer,
            split_long=data_args.split_long,
            num_proc=data_args.num_proc,
        )
    return get_drafter(target, drafter_args.drafter_config(), tokenizer=tokenizer, draft_tokens=draft_tokens)


__all__ = ["PASSES_ON", "train"]
