"""Brier score, for `evaluate.load`."""

from __future__ import annotations

import evaluate

from dspark_hf.evaluation import scores
from dspark_hf.evaluation.metrics.info import metric_info

_DESCRIPTION = """
The mean squared distance between predicted probability and what happened.
"""

_INPUTS = """
Args:
    predictions: probabilities, from 0 to 1.
    references: 0 or 1, what happened.
Returns:
    brier_score: a number from 0 to 1, 0 for certain and right predictions.
"""


class BrierScore(evaluate.Metric):
    """`evaluate.load("<folder of this file>")`; computed by `dspark_hf.evaluation.scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(_DESCRIPTION, _INPUTS)

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        return {"brier_score": scores.brier_score(predictions, references)}
