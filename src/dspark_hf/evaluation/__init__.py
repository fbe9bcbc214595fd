"""Measuring, calibrating and comparing drafters.

`dspark_hf.evaluation.harness` is not imported here: it brings `datasets`, which measuring one prompt does not need.
"""

from .acceptance import Rounds
from .calibration import Observations, collect_observations, fit_temperatures
from .comparison import Comparison, compare, repeated_share
from .metrics import metric_path

__all__ = [
    "Comparison",
    "Observations",
    "Rounds",
    "collect_observations",
    "compare",
    "fit_temperatures",
    "metric_path",
    "repeated_share",
]
