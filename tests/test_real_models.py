"""The stages of `examples/real_models/fit.py` on a tiny random target, with a break in the middle."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.embedded import TARGET

from .tiny import tiny_target

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = ("sampled", "heldout")
SIZES = {
    "minutes": 0.02,
    "prompts": 8,
    "heldout_prompts": 2,
    "new_tokens": 12,
    "max_batch": 4,
    "num_hidden_layers": 1,
    "markov_rank": 8,
    "draft_vocab_size": 64,
    "batch_size": 4,
    "num_anchors": 4,
    "repeats": 1,
}


@pytest.fixture
def fit(monkeypatch):
    """Runs the stages with these sizes and others."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "real_models"))
    script = importlib.import_module("fit")

    def run(**options):
        script.Fit(script.FitArguments(**{**SIZES, **options})).run()

    return run


@pytest.fixture
def target(tmp_path):
    """The folder of a random model, whose tokenizer has a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = CHAT_TEMPLATE
    folder = tmp_path / "tiny"
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny_target("llama", vocab_size=len(tokenizer), **ends).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_stages(fit, target, tmp_path):
    work_dir = tmp_path / "work"
    options = {"target": target, "work_dir": str(work_dir)}
    fit(**options)
    report = json.loads((work_dir / "report.json").read_text(encoding="utf-8"))
    ways = [(row["decoding"], row["scheduler"]) for row in report["rows"]]
    assert ways == list(itertools.product(("greedy", "temperature 1"), ("none", "hardware")))
    assert [row["identical_to_plain"] for row in report["rows"]] == [1, 1, None, None]
    assert all(1 <= row["accepted_length"] <= 8 for row in report["rows"])
    assert set(report["limits"]["verify_ms"]) == {"1", "2", "4", "8"}
    config = DSparkDrafter.from_pretrained(work_dir / "drafter").config
    assert config.draft_vocab_size == 64 and len(config.confidence_temperatures) == config.block_size
    train, heldout = ({row["id"] for row in read_rows(work_dir / f"{name}_prompts.jsonl")} for name in PARTS)
    assert train and heldout and not train & heldout
    answers = read_rows(work_dir / "sampled.jsonl")

    # As if the run had been killed while it trained, in the middle of saving its last checkpoint.
    progress = json.loads((work_dir / "progress.json").read_text(encoding="utf-8"))
    for stage in ("train", "measure"):
        progress["stages"][stage]["done"] = False
    (work_dir / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
    checkpoints = sorted((work_dir / "drafter").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    (checkpoints[-1] / "trainer_state.json").write_text('{"cut', encoding="utf-8")
    (work_dir / "report.json").unlink()
    fit(**options)
    assert (work_dir / "report.json").is_file()
    assert read_rows(work_dir / "sampled.jsonl") == answers

    with pytest.raises(ValueError, match="`new_tokens` was 12 and is 13"):
        fit(**options, new_tokens=13)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "smollm3"}, "`target` is 'smollm3'; choose one of smollm2"),
        ({"heldout_prompts": 1}, "`heldout_prompts` is 1; give at least 2"),
        ({"minutes": 0}, "`minutes` is 0; give a positive number"),
        ({"draft_vocab_size": -1}, "`draft_vocab_size` is -1"),
    ],
)
def test_bad_options_are_named(fit, options, message):
    with pytest.raises(ValueError, match=message):
        fit(**options)
