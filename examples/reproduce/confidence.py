"""How well confidences say what survives, before and after Sequential Temperature Scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rounds import SAMPLED
from transformers import PreTrainedModel

from dspark_hf.evaluation.calibration import (
    Observations,
    collect_observations,
    fit_temperatures,
    mean_over_positions,
    report,
)
from dspark_hf.models import DSparkDrafter

DRAWS = 200


def observe_prompts(
    target: PreTrainedModel, drafter: DSparkDrafter, prompts: Sequence[torch.Tensor], new_tokens: int, seed: int
) -> list[Observations]:
    """What the confidence head said and what survived at temperature 1, prompt by prompt, `(1, length)` each."""
    torch.manual_seed(seed)
    options = {"max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0, **SAMPLED}
    return [
        collect_observations(target, drafter, [prompt], attention_mask=torch.ones_like(prompt), **options)
        for prompt in prompts
    ]


def judge(fitted: Sequence[Observations], judged: Sequence[Observations]) -> dict[str, Any]:
    """Temperatures from one set of prompts, and scores on another without and with them.

    ECE is that of the survival of prefixes, which a scheduler goes by, AUROC that of the tokens themselves, both means
    over the positions. Intervals come from drawing prompts; `chance_ece` is what right confidences would show.
    """
    temperatures = fit_temperatures(Observations.join(fitted))
    scores = _scores(judged, temperatures)
    draws = np.random.default_rng(0).integers(len(judged), size=(DRAWS, len(judged)))
    drawn = [_scores([judged[index] for index in draw], temperatures) for draw in draws]
    return {
        "temperatures": temperatures,
        "fitted_prompts": len(fitted),
        "judged_prompts": len(judged),
        "judged_rounds": len(Observations.join(judged).logits),
        **scores,
        **{f"{name}_interval": _ends([each[name] for each in drawn]) for name in scores},
    }


def _scores(parts: Sequence[Observations], temperatures: Sequence[float]) -> dict[str, float | None]:
    joined = Observations.join(parts)
    before, after = report(joined), report(joined, temperatures)
    areas = [entry.token.auroc for entry in before if entry.token is not None and entry.token.auroc is not None]
    return {
        "ece_before": mean_over_positions(before),
        "ece_after": mean_over_positions(after),
        "chance_ece": mean_over_positions(after, score="chance_ece"),
        "auroc": float(np.mean(areas)) if areas else None,
    }


def _ends(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return np.quantile(known, [0.025, 0.975]).tolist() if len(known) > 1 else None


def to_lists(parts: Sequence[Observations]) -> dict[str, Any]:
    joined = Observations.join(parts)
    return {name: getattr(joined, name).tolist() for name in ("logits", "verified", "survived")}


def from_lists(lists: dict[str, Any]) -> Observations:
    return Observations(**{name: np.asarray(values) for name, values in lists.items()})
