"""Expected calibration error, for `evaluate.load`."""

from __future__ import annotations

import evaluate

from dspark_hf.evaluation import scores
from dspark_hf.evaluation.metrics.info import metric_info

_DESCRIPTION = """
The mean distance between predicted and observed probability, over bins of equal width weighted by their counts.
"""

_INPUTS = """
Args:
    predictions: probabilities, from 0 to 1.
    references: 0 or 1, what happened.
    bins: number of bins, 20 by default.
Returns:
    expected_calibration_error: a number from 0 to 1, 0 for perfect calibration.
"""


class ExpectedCalibrationError(evaluate.Metric):
    """`evaluate.load("<folder of this file>")`; computed by `dspark_hf.evaluation.scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(_DESCRIPTION, _INPUTS)

    def _compute(self, predictions: list[float], references: list[int], bins: int = scores.BINS) -> dict[str, float]:
        return {"expected_calibration_error": scores.expected_calibration_error(predictions, references, bins)}
