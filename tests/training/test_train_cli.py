from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import typer
from datasets import Dataset
from typer.testing import CliRunner

from dspark_hf import DSparkDrafter
from dspark_hf.cli.train import PASSES_ON, train

app = typer.Typer()
app.command(context_settings=PASSES_ON)(train)


@pytest.fixture
def data(dataset: Dataset, tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    dataset.to_json(path)
    return path


def run(*options: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(option) for option in options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_train_and_resume(target_folder: Path, data: Path, dataset: Dataset, tmp_path: Path) -> None:
    output = tmp_path / "drafter"
    options = ["--target", target_folder, "--data", data, "--output", output, "--num-anchors", 4, "--batch-size", 4]
    shape = ["--drafter-layers", 1, "--block-size", 3, "--markov-rank", 4, "--markov-head", "gated"]
    shape += ["--draft-vocab-size", 20]
    code, text = run(
        *options, *shape, "--no-confidence", "--target-layers", "0,2", "--max-steps", 2, "--save-steps", 2
    )
    assert code == 0, text
    drafter = DSparkDrafter.from_pretrained(output)
    config = drafter.config
    assert (config.num_hidden_layers, config.block_size, config.markov_rank) == (1, 3, 4)
    assert (config.markov_head_type, config.target_layer_ids) == ("gated", [0, 2])
    assert drafter.confidence_head is None
    tokens = Counter(token for row in dataset for token, is_trained in zip(*row.values()) if is_trained)
    chosen = drafter.draft_ids.tolist()
    assert len(chosen) == 20 and 2 in chosen, "the end of a sequence, too"
    assert min(tokens[token] for token in chosen if token != 2) >= max(
        tokens[token] for token in {*tokens} - {*chosen}
    )

    code, text = run(*options, "--max-steps", 3)
    assert code == 1
    assert "up to checkpoint-2: set --resume to go on from the last one, or give a fresh folder as --output" in text

    # A resumed run takes the drafter's shape from the checkpoint.
    code, text = run(*options, "--max-steps", 3, "--eval-data", data, "--resume")
    assert code == 0, text
    summary = json.loads((output / "training_summary.json").read_text())
    assert summary["steps"] == 3 and "eval_tau" in summary["metrics"]
    assert DSparkDrafter.from_pretrained(output).draft_ids.tolist() == chosen


@pytest.mark.parametrize(
    "options, message",
    [
        (["--data", "nowhere.jsonl"], "--data is 'nowhere.jsonl', and there is no such file"),
        (["--target-layers", "1;2"], "--target-layers is '1;2'"),
        (["--resume"], "no checkpoint to resume from"),
        (["--num-anchors", 0], "--num-anchors is 0; it must be at least 1"),
        (["--batch-size", 0], "--batch-size is 0; it must be at least 1"),
        (["--learning-rate", -1], "--learning-rate is -1.0; it must be a positive number"),
        (["--seed", -1], "--seed is -1; it must be from 0"),
        (["--logging-steps", 0], "--logging-steps is 0.0; it must be a positive number"),
        (["--drafter-layers", 0], "--drafter-layers is 0; it must be at least 1"),
        (["--target-layers", 9], "--target-layers is [9], out of range"),
        (["--data", "."], "--data is '.', which is a folder; give a JSON Lines file"),
        (["--output", __file__], "is a file; give a folder"),
        (["--output", ""], "--output is empty; give a folder"),
        (["--output", f"{__file__}/drafter"], f"and '{__file__}' is a file; give a folder"),
        (["--no-thinking"], "--thinking/--no-thinking is for a chat template, and the tokenizer has none"),
        (["--draft-vocab-size", 200], "--draft-vocab-size is 200; it must be from 1 (the ends of a sequence) to 101"),
        (["--target", "./nope"], "There is no folder './nope'; --target takes"),
        (["--warm-start", "./nope"], "There is no folder './nope'; --warm-start takes"),
    ],
)
def test_user_errors_are_one_line(
    target_folder: Path, data: Path, tmp_path: Path, options: list[object], message: str
) -> None:
    code, text = run("--target", target_folder, "--data", data, "--output", tmp_path / "drafter", *options)
    assert code == 1
    assert message in " ".join(text.split()) and "Traceback" not in text
