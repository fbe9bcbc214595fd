"""What the measurements say: comparisons of two drafters on the same questions, and pooled figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_hf.evaluation.bootstrap import confidence_interval

Report = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Ratio:
    """Mean accepted length of one drafter over another's.

    Attributes:
        value: the ratio.
        interval: 95%, over questions, which both answered.
    """

    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.interval[0]:.2f} to {self.interval[1]:.2f})"


def select(report: Report, drafter: str, temperature: float, length: int | None = None) -> list[Row]:
    """A drafter's rows, one per task."""
    return [
        row
        for row in report["rows"]
        if (row["drafter"], row["temperature"]) == (drafter, temperature) and length in (None, row["num_draft_tokens"])
    ]


def mean_length(rows: Sequence[Row]) -> float:
    """Accepted length, bonus token included, as the mean over the tasks."""
    return float(np.mean([row["accepted_length"] for row in rows]))


def mean_length_interval(rows: Sequence[Row]) -> tuple[float, float] | None:
    """95% interval of that mean, over questions; `None` where there are too few."""
    return _interval(_sums(rows), lambda total: (total[..., 0] / total[..., 1]).mean(axis=-1))


def mean_speedup(rows: Sequence[Row]) -> float:
    """Speed over plain decoding, as the mean over the tasks."""
    return float(np.mean([row["speedup"] for row in rows]))


def ratio(mine: Sequence[Row], others: Sequence[Row]) -> Ratio:
    """Compares two drafters by their mean accepted length; `mine` and `others` have the same tasks.

    Raises:
        ValueError: if they have other questions.
    """
    sums = np.concatenate([_sums(mine), _sums(others)], axis=-1)

    def statistic(total: np.ndarray) -> np.ndarray:
        lengths = total[..., [0, 2]] / total[..., [1, 3]]  # (..., tasks, 2)
        means = lengths.mean(axis=-2)
        return means[..., 0] / means[..., 1]

    if [_names(row) for row in mine] != [_names(row) for row in others]:
        raise ValueError("The drafters answered other questions, so they cannot be compared one by one.")
    return Ratio(float(statistic(sums.sum(axis=0))), _interval(sums, statistic))


def _interval(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float] | None:
    # With few questions a draw may have none of some task, and so no figure.
    with np.errstate(invalid="ignore", divide="ignore"):
        ends = confidence_interval(sums, statistic)
    return None if ends is None or np.isnan(ends).any() else (float(ends[0]), float(ends[1]))


def _names(row: Row) -> tuple[str, list[str]]:
    return row["task"], [question["id"] for question in row["accepted_length_of_questions"]]


def _sums(rows: Sequence[Row]) -> np.ndarray:
    """Tokens and rounds of each question, in its task's place, `(questions, tasks, 2)`."""
    sums = []
    for place, row in enumerate(rows):
        for question in row["accepted_length_of_questions"]:
            entry = np.zeros((len(rows), 2))
            rounds = question["rounds"]
            entry[place] = ((question["accepted_length"] or 0) * rounds, rounds)
            sums.append(entry)
    return np.array(sums)


def pooled_acceptance(rows: Sequence[Row], min_cases: int = 50) -> list[float]:
    """Share accepted at each position where all before it were, over the rounds of all tasks.

    Args:
        rows: of one drafter.
        min_cases: rounds that must have come to a position; what is behind the first with fewer is left out.
    """
    longest = max(len(row["cases"]) for row in rows)
    cases, kept = np.zeros(longest), np.zeros(longest)
    for row in rows:
        for place, (count, share) in enumerate(zip(row["cases"], row["conditional_acceptance"], strict=True)):
            cases[place] += count
            kept[place] += count * (share or 0)
    known = int(np.argmin(np.append(cases, 0) >= min_cases))
    return [float(share) for share in kept[:known] / cases[:known]]


def round_times(rows: Sequence[Row]) -> dict[str, float]:
    """Milliseconds of a round's parts, as means over the tasks."""
    return {
        part: 1000 * float(np.mean([row["seconds_per_round"][part] for row in rows]))
        for part in ("draft", "verify", "rest")
    }


def at_throughput(curve: Sequence[Row], throughput: float) -> float | None:
    """Tokens per second of a single request where all together get `throughput`; `None` beyond what was measured.

    Args:
        curve: rows of one policy, by load.
        throughput: tokens per second of all requests.
    """
    points = sorted((row["tokens_per_second"], row["tokens_per_second"] / row["load"]) for row in curve)
    totals, singles = zip(*points, strict=True)
    if not totals[0] <= throughput <= totals[-1]:
        return None
    return float(np.interp(throughput, totals, singles))


__all__ = [
    "Ratio",
    "at_throughput",
    "mean_length",
    "mean_length_interval",
    "mean_speedup",
    "pooled_acceptance",
    "ratio",
    "round_times",
    "select",
]
