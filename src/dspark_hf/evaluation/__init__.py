"""Measuring and calibrating drafters."""

from .calibration import Observations, collect_observations, fit_temperatures
from .comparison import Comparison, compare, repeated_share
from .metrics import metric_path

__all__ = [
    "Comparison",
    "Observations",
    "collect_observations",
    "compare",
    "fit_temperatures",
    "metric_path",
    "repeated_share",
]
