"""How commands report what a user can mend."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def user_errors(**flags: str) -> Iterator[None]:
    """Prints a `ValueError`, `TypeError` or `OSError` as one line and ends the command with status 1.

    Args:
        flags: the command's flags by the library's names for them; the line says the flag instead of the name.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        message = re.sub(r"`(\w+)`", lambda match: flags.get(match[1], match[0]), " ".join(str(error).split()))
        typer.echo(f"Error: {message}", err=True)
        raise typer.Exit(1) from error


__all__ = ["user_errors"]
