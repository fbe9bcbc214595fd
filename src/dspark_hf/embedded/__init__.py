"""The pair of small models that comes with the package: a target and the drafter fitted to it.

They are real, trained on real text, and small enough to run anywhere; the model cards beside them say what they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from ..models import DSparkDrafter

FOLDER = Path(__file__).resolve().parent
TARGET, DRAFTER = FOLDER / "target", FOLDER / "drafter"
PROMPTS = FOLDER / "heldout_prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """A prompt cut from a file that neither model was trained on.

    Attributes:
        id: name of the prompt.
        kind: `code`, `prose` or `structured`.
        source: the file it was cut from.
        text: the prompt.
    """

    id: str
    kind: str
    source: str
    text: str


def load_embedded_pair() -> tuple[Any, Any, DSparkDrafter]:
    """Loads the embedded target, its tokenizer and its drafter, from the package, in float32 on the CPU.

    Raises:
        OSError: if the package was installed without its data.
    """
    if not TARGET.is_dir() or not DRAFTER.is_dir():
        raise OSError(f"The embedded pair is missing from {FOLDER}: install dspark-hf again, with its package data.")
    target = AutoModelForCausalLM.from_pretrained(TARGET).eval()
    return target, AutoTokenizer.from_pretrained(TARGET), DSparkDrafter.from_pretrained(DRAFTER)


def load_prompts() -> list[Prompt]:
    """The held-out prompts of the embedded pair, in a fixed order."""
    return [Prompt(**json.loads(line)) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


__all__ = ["DRAFTER", "FOLDER", "PROMPTS", "TARGET", "Prompt", "load_embedded_pair", "load_prompts"]
