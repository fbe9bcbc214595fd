"""What the metrics have in common.

`evaluate.load` copies a metric's file alone, so metrics take this from the installed package, and as a function: of a
metric's file `evaluate` takes the first class that it finds.
"""

from __future__ import annotations

from collections.abc import Mapping

import datasets
import evaluate

PREDICTIONS = {"predictions": "float64", "references": "int32"}
"""Numbers against labels, 0 or 1."""

ROUNDS = dict.fromkeys(("verified", "survived", "emitted"), "int32")
"""Counts of rounds of verification, see `dspark_hf.evaluation.acceptance.Rounds`."""


def metric_info(description: str, inputs: str, columns: Mapping[str, str] = PREDICTIONS) -> evaluate.MetricInfo:
    """What `evaluate` wants to know of a metric.

    Args:
        description: what the metric says.
        inputs: its arguments and what it returns.
        columns: the types of its inputs by their names.
    """
    return evaluate.MetricInfo(
        description=description,
        citation="",
        inputs_description=inputs,
        features=datasets.Features({name: datasets.Value(dtype) for name, dtype in columns.items()}),
    )


__all__ = ["PREDICTIONS", "ROUNDS", "metric_info"]
