"""Reference values recorded from DeepSpec: see `tests/fixtures/deepspec/README.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from dspark_hf import AutoDrafter

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "deepspec"
"""Folder with one sub-folder per case."""

CASES = ("qwen3-dspark-vanilla", "qwen3-dspark-rnn", "qwen3-dflash", "gemma4-dspark-vanilla")
"""Cases with two recorded blocks, a training step and whole decoding runs."""

SAMPLING_CASE = "qwen3-dspark-vanilla-sampling"
"""Case with a vocabulary of 11, whose distributions are recorded exhaustively."""

EAGLE3_CASE = "qwen3-eagle3"
"""Case of an EAGLE-3 drafter."""

LR_SCHEDULE = FIXTURES / "lr_schedule" / "expected.json"


def load_json(case: str) -> dict[str, Any]:
    """What a case expects, apart from tensors."""
    return json.loads((FIXTURES / case / "expected.json").read_text(encoding="utf-8"))


def load_tensors(case: str) -> dict[str, torch.Tensor]:
    """Tensors that a case expects."""
    return load_file(FIXTURES / case / "expected.safetensors")


def load_target(case: str) -> PreTrainedModel:
    """The target of a case, float32, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(FIXTURES / case / "target", dtype=torch.float32).eval()


def load_drafter(case: str) -> Any:
    """The drafter of a case, converted from DeepSpec's format."""
    return AutoDrafter.from_pretrained(FIXTURES / case / "drafter", dtype=torch.float32)
