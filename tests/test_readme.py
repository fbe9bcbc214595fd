"""Every command and every snippet of the README runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark_hf.cli import app
from dspark_hf.embedded import DRAFTER, TARGET

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Repositories that the README names, and what stands in for them here.
STAND_INS = {"Qwen/Qwen3-8B": str(TARGET), "deepseek-ai/dspark_qwen3_8b_block7": str(DRAFTER)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def shell_commands() -> list[list[str]]:
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if shlex.split(line, comments=True)]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that looks like the checkout; what is built goes to its own `build`."""
    for name in ("src", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_there_are_commands_and_snippets():
    assert len(blocks("python")) >= 3
    assert {command[0] for command in shell_commands()} == {"make", "dspark"}


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in shell_commands() if c[0] == "dspark"], ids=lambda c: c[1])
def test_dspark_command(command, checkout):
    result = CliRunner().invoke(app, command[1:])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [c for c in shell_commands() if c[0] == "make"], ids=lambda c: c[1])
def test_make_command_exists_and_ci_runs_it(command):
    assert re.search(rf"^{command[1]}\b.*:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.search(rf"\b{command[1]}\b", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_snippets_run_in_order(checkout):
    names = {}
    for number, snippet in enumerate(blocks("python")):
        for name, stand_in in STAND_INS.items():
            snippet = snippet.replace(f'"{name}"', repr(stand_in))
        exec(compile(snippet, f"README.md, snippet {number}", "exec"), names)
