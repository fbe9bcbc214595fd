"""Area under the ROC curve, for `evaluate.load`."""

from __future__ import annotations

import evaluate

from dspark_hf.evaluation import scores
from dspark_hf.evaluation.metrics.info import metric_info

_DESCRIPTION = """
The probability that a case that happened was rated above one that did not; ties count one half.
"""

_INPUTS = """
Args:
    predictions: scores; only their order matters.
    references: 0 or 1, what happened.
Returns:
    auroc: a number from 0 to 1; NaN where all references are the same.
"""


class Auroc(evaluate.Metric):
    """`evaluate.load("<folder of this file>")`; computed by `dspark_hf.evaluation.scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(_DESCRIPTION, _INPUTS)

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        return {"auroc": scores.auroc(predictions, references)}
