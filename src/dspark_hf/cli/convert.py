"""`dspark convert`: drafters from and to the formats of other projects and engines."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from .errors import user_errors


class Format(str, enum.Enum):
    """Formats that are written: this package's, and `conversion.EXPORT_FORMATS`."""

    dspark = "dspark"
    deepspec = "deepspec"
    speculators = "speculators"
    vllm = "vllm"
    sglang = "sglang"
    zlab = "zlab"


def convert(
    source: Annotated[str, typer.Argument(help="The drafter, in any format: a Hub repository or a local folder.")],
    output: Annotated[str, typer.Argument(help="New folder for the result.")],
    to: Annotated[Format, typer.Option(help="Format of the result.")],
    target: Annotated[
        str | None,
        typer.Option(help="Its target, for formats with copies of the target's embeddings or LM head."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="`auto` for that of the drafter, or `float32`, `bfloat16` or `float16`.")
    ] = "auto",
) -> None:
    """Convert a drafter.

    Weights are those of the drafter bit for bit, unless --dtype asks for others. What the format has no place for is
    printed.
    """
    from ..conversion.export import check_empty, export_drafter
    from ..conversion.loading import check_output, load_language_model
    from ..factory import AutoDrafter
    from .pair import check_dtype

    with user_errors(pretrained_model_name_or_path="SRC", drafter="SRC", target="--target", to="--to", folder="DST"):
        check_dtype(dtype)
        check_output(output, "DST")
        check_empty(output, "DST")
        drafter = AutoDrafter.from_pretrained(source, dtype=dtype)
        model = None if target is None else load_language_model(target, dtype=drafter.dtype)
        if to is Format.dspark:
            drafter.save_pretrained(output)
            notes = []
        else:
            notes = export_drafter(drafter, output, to.value, model)
    for note in notes:
        typer.echo(f"! {note}")
    typer.echo(f"The drafter is in {output}, as {to.value} reads it.")


__all__ = ["Format", "convert"]
