"""Runs the scripts of the repository in the tests' own process: starting Python anew would take most of the time."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def as_it_was() -> Iterator[None]:
    """Puts back what scripts set for a whole process."""
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)


def run_script(path: str, *arguments: str) -> None:
    """As `python path arguments...` in the root of the repository."""
    script = ROOT / path
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, as_it_was():
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.syspath_prepend(script.parent)
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            # Scripts of different folders may have modules of the same name beside them.
            for name in set(sys.modules).difference(before):
                if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == script.parent:
                    del sys.modules[name]
