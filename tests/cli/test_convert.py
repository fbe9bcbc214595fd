"""`dspark convert`, as it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dspark_hf import AutoDrafter, DSparkConfig
from dspark_hf.cli import app

from ..conversion.test_export import SHAPE, make


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter, in files."""
    folder = tmp_path_factory.mktemp("convert")
    target, drafter = make(DSparkConfig(**SHAPE, enable_thinking=True))
    target.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    return folder / "target", folder / "drafter"


def convert(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def equal(first: Path, second: Path) -> bool:
    ours, theirs = (AutoDrafter.from_pretrained(folder) for folder in (first, second))
    pairs = zip(sorted(ours.state_dict().items()), sorted(theirs.state_dict().items()), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("to", ["deepspec", "speculators", "vllm", "sglang"])
def test_there_and_back(to: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = folders
    code, output = convert(drafter, tmp_path / "out", "--to", to, "--target", target)
    assert code == 0 and f"as {to} reads it" in output
    assert (tmp_path / "out" / "config.json").is_file()
    code, output = convert(tmp_path / "out", tmp_path / "back", "--to", "dspark")
    assert code == 0, output
    assert AutoDrafter.from_pretrained(tmp_path / "back").config.enable_thinking is True
    if to == "deepspec":  # its files hold copies of the target's weights
        assert AutoDrafter.from_pretrained(tmp_path / "back").config.share_target_embeddings is False
    else:
        assert equal(drafter, tmp_path / "back")


def test_dtype(folders: tuple[Path, Path], tmp_path: Path) -> None:
    code, _ = convert(folders[1], tmp_path / "out", "--to", "sglang", "--dtype", "bfloat16")
    assert code == 0
    assert AutoDrafter.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{drafter}", "{out}", "--to", "zlab"], "z-lab"),
        (["{drafter}", "{out}", "--to", "deepspec"], "--target"),
        (["{drafter}", "{out}", "--to", "onnx"], "'onnx' is not one of"),
        (["{drafter}", "{out}", "--to", "vllm", "--dtype", "int8"], "int8"),
        (["{drafter}", "{drafter}", "--to", "vllm"], "DST"),
        (["{out}/none", "{out}", "--to", "vllm"], "SRC"),
        (["{target}", "{out}", "--to", "vllm"], "drafter"),
        (["{drafter}", "{out}", "--to", "deepspec", "--target", "{drafter}"], "--target"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    places = {"target": folders[0], "drafter": folders[1], "out": tmp_path / "out"}
    code, output = convert(*(argument.format(**places) for argument in arguments))
    assert code != 0 and message in output, output
    assert "Traceback" not in output
    assert not list((tmp_path).rglob("*.safetensors")), "nothing is left of what failed"
    assert json.loads((folders[1] / "config.json").read_text(encoding="utf-8"))["block_size"] == SHAPE["block_size"]
