"""Commands that fill a drafter's model card."""

from __future__ import annotations

import json
import shutil

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from dspark_hf.cli import app
from dspark_hf.embedded import DRAFTER, TARGET


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return f"{result.exit_code}: {' '.join(result.output.split())}"


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "drafter"
    shutil.copytree(DRAFTER, copy)
    for name in ("evaluation.json", "capacity.json", "calibration.json"):
        (copy / name).unlink(missing_ok=True)
    return copy


@pytest.mark.slow
def test_evaluation_and_profile(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    pair = ("--target", TARGET, "--drafter", folder)
    settings = ("--tasks", "embedded", "--limit", 1, "--max-new-tokens", 8, "--temperatures", 1)
    assert invoke("eval", *pair, *settings, "--output", tmp_path / "report.json", "--card").startswith("0:")
    kept = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert {row["drafter"] for row in kept["rows"]} == {"drafter"}
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| embedded-code | 1 | 1 | 8 |" in card and "Embedded drafter" in card  # what the recipe said stays
    assert {entry.metric_type for entry in ModelCard(card).data.eval_results} == {"accepted_length", "speedup"}
    assert invoke("profile", *pair, "--max-rows", 1, "--repeats", 1, "--card").startswith("0:")
    assert "`capacity.json` holds the times" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_training_and_calibration(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"def f{n}(x):\n    return x\n" * 9}) + "\n" for n in range(4)))
    options = ("--max-steps", 1, "--num-anchors", 4, "--markov-rank", 8, "--batch-size", 2)
    out = tmp_path / "new"
    assert invoke("train", "--target", TARGET, "--data", data, "--output", out, *options).startswith("0:")
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "| `num_anchors` | 4 |" in card and "Not calibrated" in card
    pair = ("--target", TARGET, "--drafter", out, "--output", out)
    assert invoke("calibrate", *pair, "--prompts", data, "--max-new-tokens", 8).startswith("0:")
    assert "One temperature per drafted position" in (out / "README.md").read_text(encoding="utf-8")


def test_cards_need_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ("--target", TARGET, "--card")
    report = ("--tasks", "embedded", "--output", "report.json")
    assert "--card is for drafters in local folders, and --drafter 'org/drafter' is none" in invoke(
        "eval", *common, "--drafter", "org/drafter", *report
    )
    assert "--card needs --drafter" in invoke("profile", *common)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["DFlashDraftModel"]}', encoding="utf-8")
    assert "convert it with `dspark convert --to dspark`" in invoke("profile", *common, "--drafter", foreign)
