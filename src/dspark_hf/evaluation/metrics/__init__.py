"""Metrics for `evaluate.load`: one folder each, `evaluate.load(metric_path("brier_score"))`."""

from __future__ import annotations

from pathlib import Path

NAMES = ("accepted_length", "auroc", "brier_score", "expected_calibration_error", "wasted_tokens")


def metric_path(name: str) -> str:
    """Folder of a metric, which `evaluate.load` takes without a network.

    Raises:
        ValueError: if there is no such metric.
    """
    if name not in NAMES:
        raise ValueError(f"`name` is {name!r}; choose one of {NAMES}.")
    return str(Path(__file__).resolve().parent / name)


__all__ = ["NAMES", "metric_path"]
