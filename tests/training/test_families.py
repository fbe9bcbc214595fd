"""`dspark train` on a tiny random target of every family: the loss falls, and the drafter changes no text."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dspark_hf.training
from dspark_hf import DSparkDrafter
from dspark_hf.cli import app
from dspark_hf.factory import TARGET_FAMILIES

from ..targets import is_missing, make_target
from ..tiny import tiny_prompt

pytestmark = pytest.mark.slow

# Layers of theirs stand between the last hidden state and the LM head; drafters for them are used, not trained.
NOT_TRAINED = {"gemma3n_text": "does not make its logits from its last hidden state"}

ROWS = [{"input_ids": row} for row in tiny_prompt(length=16, batch=4).tolist()]
OPTIONS = ["--drafter-layers", 1, "--block-size", 3, "--markov-rank", 4, "--num-anchors", 8, "--batch-size", 4]
OPTIONS += ["--max-steps", 4, "--learning-rate", 1e-2, "--logging-steps", 1, "--save-strategy", "no", "--use-cpu"]
OPTIONS += ["--disable-tqdm", "true", "--mask-token-id", 319]


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> Iterator[None]:
    """Each training collects garbage: what the imports have left need not be looked through a hundred times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("family", sorted(TARGET_FAMILIES))
def test_train_and_generate(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_missing(family):
        pytest.skip("not in this version of Transformers")
    target = make_target(family)
    monkeypatch.setattr(dspark_hf.training, "load_target", lambda name, device_map=None: (target, None))
    data, output = tmp_path / "rows.jsonl", tmp_path / "drafter"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options: list[Any] = ["--target", family, "--data", data, "--output", output, *OPTIONS]
    result = CliRunner().invoke(app, ["train", *map(str, options)])
    if family in NOT_TRAINED:
        assert result.exit_code == 1 and NOT_TRAINED[family] in result.output
        return
    assert result.exit_code == 0, result.output
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0]
    drafter = DSparkDrafter.from_pretrained(output)
    generation = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    prompt = torch.tensor([ROWS[0]["input_ids"]])
    plain = target.generate(prompt, **generation)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **generation), plain)
