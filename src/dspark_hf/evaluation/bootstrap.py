"""Confidence intervals by the bootstrap: how figures vary when other questions of the same kind are asked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LEVEL = 0.95
DRAWS = 2000


def confidence_interval(
    values: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> np.ndarray | None:
    """Percentile interval of a figure that is made from sums over questions.

    Questions are drawn with replacement, as many as there are. Drawing a question is counting it so many times, so
    that all draws are one product of matrices.

    Args:
        values: `(n, ...)`, what each question adds to the sums.
        statistic: makes the figures `(draws, ...)` from sums `(draws, ...)`; NaN where a draw has none.
        level: share of the draws that lie in the interval.
        draws: how many.
        seed: of the draws.

    Returns:
        `(2, ...)`, lower and upper ends; NaN where no draw had a figure. `None` for fewer than two questions.
    """
    count = len(values)
    if count < 2:
        return None
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    figures = statistic(np.tensordot(times, np.asarray(values, dtype=float), axes=1))
    ends = np.full((2, *figures.shape[1:]), np.nan)
    known = ~np.isnan(figures).all(axis=0)
    if not known.any():
        return ends
    ends[:, known] = np.nanquantile(figures[:, known], [(1 - level) / 2, (1 + level) / 2], axis=0)
    return ends


__all__ = ["DRAWS", "LEVEL", "confidence_interval"]
