"""Calibrating the confidence head: what it said in real decoding beside what survived, and temperatures that mend it.

Sequential Temperature Scaling of the DSpark paper divides the confidence logit of each drafted position by a
temperature of its own, so that products of confidences are the probabilities with which prefixes survive. Shape
symbols: `n` rounds, γ the block size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..models import DSparkDrafter
from .acceptance import Fates
from .scores import BINS, auroc, brier_score, chance_calibration_error, expected_calibration_error

GRID = np.geomspace(0.1, 10.0, 401)
"""Temperatures that are tried; 1 is among them."""


@dataclass(frozen=True)
class Observations(Fates):
    """Rounds of drafting and verification, each of one row.

    Attributes:
        logits: `(n, γ)`, raw confidence logits.
        verified: `(n,)`, drafted tokens that were verified; fewer than γ near an end of the text.
        survived: `(n,)`, how many of them verification accepted, from the first on.
    """

    logits: np.ndarray
    verified: np.ndarray
    survived: np.ndarray

    @staticmethod
    def join(parts: Sequence[Observations]) -> Observations:
        """All rounds of several observations of one drafter, at least one."""
        return Observations(
            np.concatenate([part.logits for part in parts]),
            np.concatenate([part.verified for part in parts]),
            np.concatenate([part.survived for part in parts]),
        )

    @property
    def block_size(self) -> int:
        """γ."""
        return int(self.logits.shape[1])

    def confidences(self, temperatures: Sequence[float] | None = None) -> np.ndarray:
        """`c_1..c_γ` (equation 7), `(n, γ)`, with one temperature per position or uncalibrated."""
        return _sigmoid(self.logits / np.asarray(1.0 if temperatures is None else temperatures))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    # Written with tanh, which does not overflow.
    return 0.5 * (1 + np.tanh(0.5 * logits))


# --- collecting ----------------------------------------------------------------------------------------------------


def collect_observations(
    target: PreTrainedModel, drafter: DSparkDrafter, prompts: Iterable[torch.Tensor], **options: Any
) -> Observations:
    """Generates from each prompt and keeps what the confidence head said and what survived.

    Whole blocks are drafted and verified, whatever the confidences: with a cut only survivors would be seen.

    Args:
        target: the target.
        drafter: its drafter, with a confidence head.
        prompts: `(1, length)` each; texts that neither model was trained on.
        options: options of `generate`: decode as the drafter will be used, at the same temperature above all.

    Raises:
        ValueError: if the drafter has no confidence head, or no drafted token was verified.
    """
    check_confidence_head(drafter)
    parts = [part for prompt_ids in prompts for part in observe(target, drafter, prompt_ids, **options)]
    if not any(part.verified.any() for part in parts):
        raise ValueError(
            "No drafted token was verified: give at least one prompt, and `max_new_tokens` of 3 or more, best of 64 "
            "or more."
        )
    return Observations.join(parts)


def observe(
    target: PreTrainedModel, drafter: DSparkDrafter, prompt_ids: torch.Tensor, **options: Any
) -> list[Observations]:
    """Observations of one `generate` call, whose arguments are those of `collect_observations`.

    Args:
        target: the target.
        drafter: its drafter, with a confidence head.
        prompt_ids: `(batch, length)`; padding, on the left, goes with an `attention_mask` among the options.
        options: options of `generate`.
    """
    options |= {
        "dspark_num_draft_tokens": drafter.config.block_size,
        "dspark_confidence_threshold": 0.0,
        "dspark_scheduler": "none",
    }
    with _recording(drafter):
        target.generate(input_ids=prompt_ids, assistant_model=drafter, **options)
    return _observed(drafter.last_stats)


def check_confidence_head(drafter: DSparkDrafter) -> None:
    """Raises `ValueError` for a drafter without a confidence head."""
    if drafter.confidence_head is None:
        raise ValueError(
            "The drafter has no confidence head (`enable_confidence_head` is false in its config), so there is "
            "nothing to calibrate; train one with `enable_confidence_head=True`."
        )


@contextlib.contextmanager
def _recording(drafter: DSparkDrafter) -> Iterator[None]:
    before, drafter.record_confidence = drafter.record_confidence, True
    try:
        yield
    finally:
        drafter.record_confidence = before


def _observed(stats: Any) -> list[Observations]:
    """Observations of one `generate` call, an entry for each round in which something was drafted."""
    return [
        Observations(
            np.asarray(entry.confidence_logits, dtype=float),
            np.asarray(entry.verified_by_row),
            np.asarray(entry.survived_by_row),
        )
        for entry in stats.rounds
        if entry.confidence_logits is not None
    ]


# --- fitting -------------------------------------------------------------------------------------------------------


def fit_temperatures(observations: Observations, bins: int = BINS) -> list[float]:
    """Sequential Temperature Scaling: one temperature per position, from left to right.

    Each is found on a grid, with those before it fixed, as the one for which the product of confidences up to its
    position has the least expected calibration error against the survival of that prefix; the one nearest to 1 among
    equals. The order of confidences within a position stays as it is.

    Args:
        observations: rounds of decoding on texts that are not used to judge the result.
        bins: bins of the calibration error.

    Returns:
        γ temperatures; 1 for a position that was never verified.
    """
    temperatures: list[float] = []
    product = np.ones(len(observations.logits))
    for position in range(observations.block_size):
        seen = observations.was_verified(position)
        logits = observations.logits[:, position]
        best = _best_temperature(product[seen], logits[seen], observations.survives(position)[seen], bins)
        product = product * _sigmoid(logits / best)
        temperatures.append(best)
    return temperatures


def _best_temperature(product: np.ndarray, logits: np.ndarray, survives: np.ndarray, bins: int) -> float:
    """The temperature of `GRID` for `logits (n,)` that are multiplied on `product (n,)`."""
    if not len(logits):
        return 1.0

    def badness(temperature: float) -> tuple[float, float]:
        error = expected_calibration_error(product * _sigmoid(logits / temperature), survives, bins)
        return error, abs(float(np.log(temperature)))

    return float(min(GRID.tolist(), key=badness))


# --- judging -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """How well probabilities fit what happened.

    Attributes:
        cases: number of predictions.
        share: share of them that came true.
        ece: expected calibration error.
        chance_ece: the error that right predictions would show by chance, in as many cases.
        brier: Brier score.
        auroc: area under the ROC curve; `None` where all or none came true.
    """

    cases: int
    share: float
    ece: float
    chance_ece: float
    brier: float
    auroc: float | None


@dataclass(frozen=True)
class PositionReport:
    """Scores of one drafted position, each `None` where nothing was observed.

    Attributes:
        position: counted from 1.
        token: scores of its confidence, over the rounds in which all tokens before it survived.
        prefix: scores of the product of confidences up to it, against survival of the whole prefix.
    """

    position: int
    token: Scores | None
    prefix: Scores | None


def report(
    observations: Observations, temperatures: Sequence[float] | None = None, bins: int = BINS
) -> list[PositionReport]:
    """Judges confidences position by position; `temperatures` of `None` judges them uncalibrated."""
    confidences = observations.confidences(temperatures)
    products = np.cumprod(confidences, axis=1)
    reports = []
    for position in range(observations.block_size):
        survives = observations.survives(position)
        reached, verified = observations.reached(position), observations.was_verified(position)
        reports.append(
            PositionReport(
                position + 1,
                token=_scores(confidences[reached, position], survives[reached], bins),
                prefix=_scores(products[verified, position], survives[verified], bins),
            )
        )
    return reports


def _scores(probs: np.ndarray, labels: np.ndarray, bins: int) -> Scores | None:
    if not len(probs):
        return None
    area = auroc(probs, labels)
    return Scores(
        cases=len(probs),
        share=float(labels.mean()),
        ece=expected_calibration_error(probs, labels, bins),
        chance_ece=chance_calibration_error(probs, bins),
        brier=brier_score(probs, labels),
        auroc=None if np.isnan(area) else area,
    )


def mean_over_positions(reports: Sequence[PositionReport], part: str = "prefix", score: str = "ece") -> float:
    """Mean of one of the `Scores` over the positions that were observed; `part` is `token` or `prefix`."""
    parts = [getattr(entry, part) for entry in reports]
    return float(np.mean([getattr(scores, score) for scores in parts if scores is not None]))


__all__ = [
    "GRID",
    "Observations",
    "PositionReport",
    "Scores",
    "check_confidence_head",
    "collect_observations",
    "fit_temperatures",
    "mean_over_positions",
    "observe",
    "report",
]
