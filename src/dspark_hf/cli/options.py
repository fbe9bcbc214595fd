"""Options that several commands have, and what is asked of their values."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class Method(str, enum.Enum):
    """Kinds of drafters, as `training.recipe.METHODS` names them."""

    dspark = "dspark"
    dflash = "dflash"
    eagle3 = "eagle3"
    mtp = "mtp"


Thinking = Annotated[
    bool | None,
    typer.Option(help="Thinking mode of the chat template. (default: the template's)"),
]
Device = Annotated[
    str | None,
    typer.Option(help="Where to run. (default: a GPU if there is one)"),
]
TargetLayers = Annotated[
    str | None,
    typer.Option(help="Target layers to read, separated by commas; -1 is the embedding output. (default: spread)"),
]
MaxLength = Annotated[int, typer.Option(help="Longest training sequence, in tokens.")]
SplitLong = Annotated[
    bool, typer.Option("--split-long", help="Cut long rows into several sequences instead of dropping their ends.")
]


def check_file(option: str, path: str) -> None:
    """Raises `ValueError` for no file or an empty one; asked before the target is loaded, which may take minutes."""
    if Path(path).is_dir():
        raise ValueError(f"{option} is {path!r}, which is a folder; give a JSON Lines file.")
    if not Path(path).is_file():
        raise ValueError(f"{option} is {path!r}, and there is no such file.")
    with open(path, "rb") as file:
        if not any(line.strip() for line in file):
            raise ValueError(f"{option} is {path!r}, which has no rows: the file is empty.")


def parse_layers(text: str | None) -> list[int] | None:
    """`--target-layers` as numbers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--target-layers is {text!r}; give numbers separated by commas, such as 1,9,17.") from error


__all__ = ["Device", "MaxLength", "Method", "SplitLong", "TargetLayers", "Thinking", "check_file", "parse_layers"]
