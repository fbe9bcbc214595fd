"""`dspark cache`: what it writes and prints, that training reads it, and how it fails."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple

import pytest

from dspark_hf import DSparkDrafter, DSparkTrainingArguments, train_drafter
from dspark_hf.training import load_target

from .test_commands import make_target, make_tokenizer, run, save_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a drafter for it, and rows to train on."""
    root = tmp_path_factory.mktemp("target")
    save_pair(root)
    make_target(seed=1).save_pretrained(root / "other_target")
    make_tokenizer().save_pretrained(root / "other_target")
    rows = [{"text": " ".join(f"w{5 + (index + place) % 90}" for place in range(20))} for index in range(8)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "other_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    return root


def cache(folder, output, *flags):
    given = ["--target", folder / "target", "--data", folder / "rows.jsonl", "--output", output]
    return run("cache", *given, *flags)


def test_cache_and_train(folder, tmp_path):
    output = tmp_path / "states"
    result = cache(folder, output, "--shard-size", 0.012, "--batch-size", 3)
    assert result.exit_code == 0, result.output
    assert "Target states of 8 examples with 160 tokens in bf16: 40.7 KiB to be written, " in result.output
    assert "8 sequences, 160 tokens, layers 0: 40.6 KiB in bf16." in result.output
    assert f"The states are in {output}." in result.output
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    assert len(before) == 4 + 2, "a shard for every two rows, the manifest and the lock"
    result = cache(folder, output)
    assert result.exit_code == 0 and "to be written" not in result.output
    sorted(output.glob("*.safetensors"))[1].unlink()
    result = cache(folder, output, "--batch-size", 3)
    assert result.exit_code == 0 and "to be written" in result.output
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    target, tokenizer = load_target(folder / "target")
    args = DSparkTrainingArguments(
        output_dir=str(tmp_path / "drafter"), states_cache=str(output), max_steps=2, num_anchors=4, use_cpu=True
    )
    drafter = DSparkDrafter.from_pretrained(folder / "drafter")
    train_drafter(target, folder / "rows.jsonl", drafter, args, tokenizer=tokenizer)
    summary = json.loads((tmp_path / "drafter" / "training_summary.json").read_text())
    assert summary["states"] == "bf16" and summary["steps"] == 2


def test_normalisers(folder, tmp_path):
    output = tmp_path / "states"
    result = cache(folder, output, "--normalisers")
    assert result.exit_code == 0, result.output
    assert json.loads((output / "manifest.json").read_text())["normalisers"] is True
    assert cache(folder, output).exit_code == 0, "a folder keeps what it has"
    assert cache(folder, tmp_path / "without").exit_code == 0
    result = cache(folder, tmp_path / "without", "--normalisers")
    assert result.exit_code == 1 and "made otherwise: without --normalisers." in result.output


def test_layers_of_other_methods(folder, tmp_path):
    """As training chooses them: of the target's two layers EAGLE-3 reads one, and MTP the last one's."""
    for method, layers in (("eagle3", "0"), ("mtp", "1")):
        result = cache(folder, tmp_path / method, "--method", method)
        assert result.exit_code == 0 and f"8 sequences, 160 tokens, layers {layers}: " in result.output, result.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--storage", "int8"], "in --storage 'bf16', not 'int8'. Use what they were made with, or give another"),
        (["--target-layers", "-1,0"], "of the layers [0], not [-1, 0]"),
        (["--data", "{folder}/other_rows.jsonl"], "(8 examples with 160 tokens, not 7 with 140: other rows, another"),
        (["--max-length", 10], "another --max-length, --thinking/--no-thinking or --split-long"),
        (["--target", "{folder}/other_target"], "from a target with other weights"),
        (["--storage", "int4"], "--storage is 'int4'; choose one of bf16, float32, int8"),
        (["--shard-size", 0], "--shard-size is 0.0; it must be a positive number"),
        (["--batch-size", 0], "--batch-size is 0; it must be at least 1"),
        (["--target-layers", "0;1"], "--target-layers is '0;1'; give numbers separated by commas"),
        (["--target-layers", "0,2"], "--target-layers is [0, 2], out of range"),
        (["--data", "nowhere.jsonl"], "--data is 'nowhere.jsonl', and there is no such file"),
        (["--target", "./nope"], "There is no folder './nope'; --target takes"),
        (["--output", ""], "--output is empty; give a folder"),
        (["--output", "{folder}"], "which holds 'drafter' but no manifest.json of a cache; give a fresh folder"),
        (["--output", "{folder}/rows.jsonl"], "is a file; give a folder"),
        (["--thinking"], "--thinking/--no-thinking is for a chat template, and the tokenizer has none"),
    ],
    ids=str,
)
def test_user_errors_are_one_line(folder, tmp_path, flags, says):
    assert cache(folder, tmp_path / "states").exit_code == 0
    result = cache(folder, tmp_path / "states", *(str(flag).format(folder=folder) for flag in flags))
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert says in line and "Traceback" not in result.output


def test_full_disk(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    result = cache(folder, tmp_path / "states")
    assert result.exit_code == 1
    assert "need 40.7 KiB there in bf16, and 1000 bytes are free. Make room" in result.stderr
    assert "or set --storage to int8 (" in result.stderr
