"""The example scripts run, as a user would start them, on budgets that fit a test."""

from __future__ import annotations

import json

import pytest

from dspark_hf import DSparkDrafter
from dspark_hf.embedded import TARGET

from .scripts import ROOT, run_script

pytestmark = pytest.mark.slow


def test_train_drafter(tmp_path):
    run_script(
        "examples/train_drafter.py",
        *("--recipe", str(ROOT / "examples" / "recipes" / "gemma3_270m.yaml")),
        *("--target", str(TARGET), "--draft_vocab_size", "64", "--bf16=false", "--gradient_accumulation_steps", "1"),
        *("--data_file", str(ROOT / "examples" / "data" / "sample.jsonl")),
        *("--output_dir", str(tmp_path / "drafter")),
        *("--max_steps", "2", "--num_anchors", "8", "--markov_rank", "16", "--per_device_train_batch_size", "2"),
    )
    config = DSparkDrafter.from_pretrained(tmp_path / "drafter").config
    assert (config.markov_rank, config.draft_vocab_size, config.num_hidden_layers) == (16, 64, 2)


def test_stages_of_the_embedded_drafter(tmp_path):
    """The target writes text, in two runs of which the second goes on; a drafter is trained on it."""
    (tmp_path / "target").symlink_to(TARGET)
    rows = [{"kind": "code", "source": "a.py", "text": "def f(x):\n    return x + 1\n" * 40}] * 3
    for part in ("train", "heldout"):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sizes = ("--batch_size", "2", "--sequence_length", "40", "--longest_prompt", "16", "--eval_batches", "1")
    generate = ("examples/embedded_pair/generate_text.py", "--work_dir", str(tmp_path), *sizes)
    run_script(*generate, "--train_batches", "1")
    text = tmp_path / "drafter_train.jsonl"
    first = text.read_text(encoding="utf-8")
    # As if the run had been broken off in the middle of its second batch.
    text.write_text(first + first.splitlines()[0] + "\n", encoding="utf-8")
    run_script(*generate, "--train_batches", "2")
    lines = text.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4
    assert text.read_text(encoding="utf-8").startswith(first)
    assert all(len(json.loads(line)["input_ids"]) == 40 for line in lines)
    run_script(
        "examples/embedded_pair/train_drafter.py",
        *("--work_dir", str(tmp_path), "--output_dir", str(tmp_path / "drafter")),
        *("--max_steps", "2", "--num_anchors", "4", "--per_device_train_batch_size", "2", "--num_hidden_layers", "1"),
    )
    assert (tmp_path / "drafter" / "model.safetensors").is_file()


def test_missing_stage_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"run prepare_text\.py first"):
        run_script("examples/embedded_pair/train_target.py", "--work_dir", str(tmp_path))
