"""`dspark cache`: a target's states over training data, computed once and kept on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .errors import user_errors
from .options import MaxLength, Method, SplitLong, TargetLayers, Thinking, check_file, parse_layers

FLAGS = {
    "enable_thinking": "--thinking/--no-thinking",
    "max_length": "--max-length",
    "method": "--method",
    "normalisers": "--normalisers",
    "per_device_train_batch_size": "--batch-size",
    "shard_size": "--shard-size",
    "split_long": "--split-long",
    "states_cache": "--output",
    "states_storage": "--storage",
    "target": "--target",
    "target_layer_ids": "--target-layers",
}
"""Flags by the library's names for them."""


def cache(
    target: Annotated[str, typer.Option(help="Model to draft for: a Hub repository or a local folder.")],
    data: Annotated[str, typer.Option(help="Training rows, a JSON Lines file, as for `dspark train`.")],
    output: Annotated[str, typer.Option(help="Folder for the states; a broken run goes on.")],
    storage: Annotated[
        str | None,
        typer.Option(
            help="What states are stored as: `bf16`, `float32` or `int8`. (default: bf16, or what --output has)"
        ),
    ] = None,
    normalisers: Annotated[
        bool,
        typer.Option(
            "--normalisers",
            help="Also store what drafters with a reduced vocabulary need of the target's LM head, so that training "
            "spares it. (default: as --output has it)",
        ),
    ] = False,
    method: Annotated[
        Method, typer.Option(help="Kind of drafters to be trained, which decides on layers that are not given.")
    ] = Method.dspark,
    target_layers: TargetLayers = None,
    max_length: MaxLength = 4096,
    split_long: SplitLong = False,
    thinking: Thinking = None,
    batch_size: Annotated[int, typer.Option(help="Sequences that the target reads at once.")] = 8,
    shard_size: Annotated[
        float, typer.Option(help="Most MiB of a file, unless one sequence needs more; a broken run keeps its own.")
    ] = 256.0,
) -> None:
    """Compute a target's states over training data, once, for any number of trainings.

    Train with --states-cache and the same target, data, layers, --max-length, --split-long and --thinking: the states
    are then read in place of running the target. Run the same command again to go on after a break.
    """
    from ..factory import complete_config
    from ..models import DSparkConfig
    from ..training import DSparkTrainingArguments, cache_target_states, load_target
    from ..training.recipe import DrafterArguments
    from ..training.state_cache import human_size

    with user_errors(**FLAGS):
        check_file("--data", data)
        args = DSparkTrainingArguments(
            max_length=max_length,
            enable_thinking=thinking,
            per_device_train_batch_size=batch_size,
            states_cache=output,
            states_storage=storage,
        )
        layers = parse_layers(target_layers)
        model, tokenizer = load_target(target)
        # As `dspark train` chooses and checks layers; the mask token has no say in it.
        config = DrafterArguments(target, method=method.value, target_layer_ids=layers).drafter_config()
        if isinstance(config, DSparkConfig):
            config.mask_token_id = 0
        states = cache_target_states(
            model,
            data,
            complete_config(model, config).target_layer_ids,
            args,
            tokenizer=tokenizer,
            split_long=split_long,
            normalisers=normalisers or None,
            shard_size=shard_size,
            announce=typer.echo,
        )
    source = states.manifest.source
    typer.echo(
        f"{source.examples} sequences, {source.tokens} tokens, layers {','.join(map(str, source.target_layer_ids))}: "
        f"{human_size(states.bytes)} in {states.storage}."
    )
    typer.echo(f"The states are in {os.fspath(Path(output))}.")


__all__ = ["cache"]
