"""What the metrics have in common.

`evaluate.load` copies a metric's file alone, so metrics take this from the installed package, and as a function: of a
metric's file `evaluate` takes the first class that it finds.
"""

from __future__ import annotations

import datasets
import evaluate


def metric_info(description: str, inputs: str) -> evaluate.MetricInfo:
    """A metric of numbers against labels, 0 or 1.

    Args:
        description: what the metric says.
        inputs: its arguments and what it returns.
    """
    return evaluate.MetricInfo(
        description=description,
        citation="",
        inputs_description=inputs,
        features=datasets.Features({"predictions": datasets.Value("float64"), "references": datasets.Value("int32")}),
    )


__all__ = ["metric_info"]
