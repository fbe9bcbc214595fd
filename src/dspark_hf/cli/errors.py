"""How commands report what a user can mend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Prints a `ValueError`, `TypeError` or `OSError` as one line and ends the command with status 1."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
