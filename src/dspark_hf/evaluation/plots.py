"""Figures; they need matplotlib, which comes with `pip install "dspark-hf[plots]"`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import numpy as np

from .calibration import Observations
from .scores import BINS, reliability


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_reliability(
    observations: Observations, temperatures: Sequence[float], path: str | os.PathLike[str], bins: int = BINS
) -> None:
    """Draws a reliability diagram for each position: predicted against observed survival of the prefix up to it.

    Args:
        observations: rounds that were not fitted to.
        temperatures: one per position; confidences without them stand beside.
        path: where to write the figure; the ending says the format.
        bins: bins of equal width.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    # Not `pyplot`, which would choose a backend for the whole process.
    from matplotlib.figure import Figure

    columns = min(4, observations.block_size)
    rows = -(-observations.block_size // columns)
    figure = Figure(figsize=(3 * columns, 3 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    series = {
        "uncalibrated": np.cumprod(observations.confidences(), axis=1),
        "calibrated": np.cumprod(observations.confidences(temperatures), axis=1),
    }
    for position, axis in enumerate(axes):
        if position >= observations.block_size:
            axis.set_axis_off()
            continue
        seen = observations.was_verified(position)
        axis.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
        axis.set(title=f"first {position + 1}", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        if not seen.any():
            continue
        for (label, products), marker in zip(series.items(), ("x", "o"), strict=True):
            curve = reliability(products[seen, position], observations.survives(position)[seen], bins)
            filled = curve.counts > 0
            axis.plot(curve.predicted[filled], curve.observed[filled], marker=marker, markersize=4, label=label)
    axes[0].legend(loc="upper left", fontsize="small")
    figure.supxlabel("predicted probability that these drafted tokens survive")
    figure.supylabel("share that survived")
    figure.savefig(path, dpi=120)


__all__ = ["can_plot", "plot_reliability"]
