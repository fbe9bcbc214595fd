"""The `dspark` command, one module per sub-command."""

from __future__ import annotations

from typing import Annotated

import typer

from .cache import cache
from .calibrate import calibrate
from .convert import convert
from .demo import demo
from .evaluate import ListsCommand, evaluate
from .generate import generate
from .plan import plan
from .prepare import prepare
from .profile import profile
from .push import push
from .train import PASSES_ON, train

app = typer.Typer(
    name="dspark",
    help="DSpark speculative decoding for Transformers: generate with drafters, prepare data, plan, train, "
    "calibrate, profile, compare, convert and push them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("cache")(cache)
app.command("calibrate")(calibrate)
app.command("convert")(convert)
app.command("demo")(demo)
app.command("eval", cls=ListsCommand)(evaluate)
app.command("generate")(generate)
app.command("plan")(plan)
app.command("prepare")(prepare)
app.command("profile")(profile)
app.command("push")(push)
app.command("train", context_settings=PASSES_ON)(train)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from .. import __version__

        typer.echo(f"dspark-hf {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `dspark` command."""
    app()


__all__ = ["app", "main"]
