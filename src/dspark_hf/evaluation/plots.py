"""Figures; they need matplotlib, which comes with `pip install "dspark-hf[plots]"`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..generation.capacity import CapacityProfile
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


def plot_capacity(profile: CapacityProfile, path: str | os.PathLike[str]) -> None:
    """Draws verifications per second and their milliseconds over the tokens verified, a line per number of rows.

    Each measured context has a pair of panels.

    Args:
        profile: measured times.
        path: where to write the figure; the ending says the format.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.5 * len(profile.contexts) + 0.5), layout="constrained")
    panels = figure.subplots(len(profile.contexts), 2, sharex=True, squeeze=False)
    for context, (rates, times) in zip(profile.contexts, panels, strict=True):
        for rows in profile.rows:
            curve = profile.curve(rows, context)
            seconds = np.asarray(curve.seconds)
            rates.plot(curve.tokens, 1 / seconds, marker="o", markersize=3, label=str(rows))
            times.plot(curve.tokens, 1000 * seconds, marker="o", markersize=3)
        rates.set(ylabel="verifications per second", title=f"context of {context} tokens", ylim=(0, None))
        times.set(ylabel="milliseconds", ylim=(0, None))
        rates.set_xscale("log", base=2)
        rates.xaxis.set_major_formatter("{x:.0f}")
    panels[0, 0].legend(title="rows", fontsize="small")
    figure.supxlabel("tokens of a verification, over all rows")
    figure.suptitle(profile.description, fontsize="small")
    figure.savefig(path, dpi=120)


def plot_load(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draws throughput and verification budget over the load, a line per policy (Figure 8 of the paper).

    Args:
        rows: `load`, `policy`, `tokens_per_second`, its `_range`, and `budget` (drafted tokens verified per request
            and round) of each point.
        path: where to write the figure; the ending says the format.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rates, budgets = figure.subplots(1, 2, sharex=True)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        points = [row for row in rows if row["policy"] == policy]
        loads = [row["load"] for row in points]
        medians = np.array([row["tokens_per_second"] for row in points])
        spread = np.abs(np.array([row["tokens_per_second_range"] for row in points]).T - medians)
        # Fixed lengths are many and stand back behind the others.
        style = {"alpha": 0.5, "linewidth": 1} if policy.startswith("length") else {"linewidth": 2}
        rates.errorbar(loads, medians, yerr=spread, marker="o", markersize=3, capsize=2, label=policy, **style)
        budgets.plot(loads, [row["budget"] for row in points], marker="o", markersize=3, **style)
    rates.set(ylabel="tokens per second", ylim=(0, None))
    budgets.set(ylabel="drafted tokens verified per request and round", ylim=(0, None))
    rates.set_xscale("log", base=2)
    rates.xaxis.set_major_formatter("{x:.0f}")
    figure.legend(*rates.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.supxlabel("requests at once")
    figure.savefig(path, dpi=120)


def plot_thresholds(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draws tokens per round and the share of verified tokens that were kept over the confidence threshold.

    Args:
        rows: `kind`, `threshold`, `accepted_length` and `acceptance_rate` (`None` where nothing was verified).
        path: where to write the figure; the ending says the format.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True)
    names = {"accepted_length": "tokens per round", "acceptance_rate": "share of verified tokens kept"}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for axis, (name, label) in zip(panels, names.items(), strict=True):
            points = [(row["threshold"], row[name]) for row in rows if row["kind"] == kind and row[name] is not None]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=kind)
            axis.set(ylabel=label)
    panels[0].set(ylim=(1, None))
    panels[1].set(ylim=(0, 1))
    panels[0].legend(fontsize="small")
    figure.supxlabel("confidence threshold")
    figure.savefig(path, dpi=120)


__all__ = ["can_plot", "plot_capacity", "plot_load", "plot_reliability", "plot_thresholds"]
