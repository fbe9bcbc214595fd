"""How well predicted probabilities of yes-or-no events fit what happened.

Predictions are numbers of shape `(n,)`, references 0 or 1 (or booleans) of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

BINS = 20
"""Bins of the DSpark paper."""


@dataclass(frozen=True)
class Reliability:
    """What a reliability diagram shows: predictions sorted into bins of equal width over 0 to 1.

    Attributes:
        counts: `(bins,)`, predictions in each bin.
        predicted: `(bins,)`, their mean, NaN in an empty bin.
        observed: `(bins,)`, the share of events that happened, NaN in an empty bin.
    """

    counts: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray


def reliability(predictions: ArrayLike, references: ArrayLike, bins: int = BINS) -> Reliability:
    """Sorts predictions into `bins`; 1 belongs to the last.

    Raises:
        ValueError: if the arguments are no probabilities and labels of one shape, or there are none.
    """
    probs, happened = _checked(predictions, references)
    _check_probabilities(probs)
    if bins < 1:
        raise ValueError(f"`bins` is {bins}; it must be at least 1.")
    index = np.minimum((probs * bins).astype(int), bins - 1)
    counts = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        predicted = np.bincount(index, weights=probs, minlength=bins) / counts
        observed = np.bincount(index, weights=happened, minlength=bins) / counts
    return Reliability(counts, predicted, observed)


def expected_calibration_error(predictions: ArrayLike, references: ArrayLike, bins: int = BINS) -> float:
    """Mean distance between predicted and observed probability over bins of equal width, weighted by their counts.

    Raises:
        ValueError: as `reliability`.
    """
    curve = reliability(predictions, references, bins)
    distance = np.nan_to_num(np.abs(curve.predicted - curve.observed))
    return float(curve.counts @ distance / curve.counts.sum())


def chance_calibration_error(predictions: ArrayLike, bins: int = BINS, draws: int = 100, seed: int = 0) -> float:
    """The calibration error that right predictions show by chance, since a bin holds only so many cases.

    Args:
        predictions: `(n,)` probabilities, taken to be exactly right.
        bins: bins of equal width.
        draws: outcomes that are drawn for all predictions, whose mean error is returned.
        seed: seed of the draws.

    Raises:
        ValueError: as `reliability`.
    """
    probs = np.asarray(predictions, dtype=float)
    outcomes = np.random.default_rng(seed).random((draws, *probs.shape)) < probs
    return float(np.mean([expected_calibration_error(probs, outcome, bins) for outcome in outcomes]))


def brier_score(predictions: ArrayLike, references: ArrayLike) -> float:
    """Mean squared distance between probability and label: 0 is perfect, always saying 1/2 gives 1/4.

    Raises:
        ValueError: if the arguments are no probabilities and labels of one shape, or there are none.
    """
    probs, happened = _checked(predictions, references)
    _check_probabilities(probs)
    return float(np.mean((probs - happened) ** 2))


def auroc(predictions: ArrayLike, references: ArrayLike) -> float:
    """Area under the ROC curve: the probability that an event that happened was rated above one that did not.

    Ties count one half. Predictions may be any finite scores, only their order matters.

    Returns:
        From 0 to 1; NaN where all labels are the same, since there is no pair to compare.

    Raises:
        ValueError: if the arguments are no finite scores and labels of one shape, or there are none.
    """
    scores, happened = _checked(predictions, references)
    positives = int(happened.sum())
    negatives = len(happened) - positives
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    wins = ranks[happened == 1].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def _checked(predictions: ArrayLike, references: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both as floating-point arrays `(n,)`."""
    scores, happened = np.asarray(predictions, dtype=float), np.asarray(references, dtype=float)
    if scores.ndim != 1 or scores.shape != happened.shape:
        raise ValueError(
            f"`predictions` has the shape {scores.shape} and `references` {happened.shape}; both must be one list "
            "of the same length."
        )
    if not len(scores):
        raise ValueError("`predictions` is empty; give at least one.")
    if not np.isfinite(scores).all():
        raise ValueError("`predictions` holds values that are not finite; leave these cases out.")
    if not np.isin(happened, (0, 1)).all():
        raise ValueError("`references` holds other values than 0 and 1.")
    return scores, happened


def _check_probabilities(probs: np.ndarray) -> None:
    if probs.min() < 0 or probs.max() > 1:
        raise ValueError(f"`predictions` go from {probs.min():g} to {probs.max():g}; give probabilities, from 0 to 1.")


__all__ = [
    "BINS",
    "Reliability",
    "auroc",
    "brier_score",
    "chance_calibration_error",
    "expected_calibration_error",
    "reliability",
]
