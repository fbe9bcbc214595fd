"""The table of traps in `tests/README.md` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def named_tests() -> list[tuple[str, str]]:
    """(file, function) of every test that the table names; `::test` alone is in the file named before it."""
    names, file = [], ""
    for path, function in re.findall(r"`([\w/]*?(?:\.py)?)::(\w+)`", (TESTS / "README.md").read_text("utf-8")):
        file = path or file
        names.append((file, function))
    return names


def test_there_are_traps():
    assert len(named_tests()) > 30


@pytest.mark.parametrize(("file", "function"), named_tests())
def test_trap_has_its_test(file, function):
    assert re.search(rf"^def {function}\(", (TESTS / file).read_text("utf-8"), flags=re.MULTILINE), (file, function)
