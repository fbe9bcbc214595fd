"""Figures of the study that no evaluation of the library draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# Okabe and Ito's, which all kinds of sight tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73")
MARKERS = ("o", "s", "^")
PLACES = ((6, 3), (-5, -12), (-12, -5))
"""Where numbers stand beside the points of a line, so that those of two lines do not meet."""


def plot_depth(series: Mapping[str, Sequence[tuple[int, float, Sequence[float]]]], path: Path) -> None:
    """Draws mean accepted length over the layers of a drafter, a line per method.

    Args:
        series: for each method its points: layers, accepted length, and the ends of its interval.
        path: where to write the figure.
    """
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axis = figure.subplots()
    for (name, points), colour, marker in zip(series.items(), COLOURS, MARKERS, strict=False):
        layers, lengths, ends = zip(*points, strict=True)
        errors = [
            [length - low for length, (low, _) in zip(lengths, ends, strict=True)],
            [high - length for length, (_, high) in zip(lengths, ends, strict=True)],
        ]
        style = {"color": colour, "marker": marker, "markersize": 5, "capsize": 3, "elinewidth": 1}
        axis.errorbar(layers, lengths, yerr=errors, label=name, **style)
    axis.set_xticks(sorted({point[0] for points in series.values() for point in points}))
    axis.set(xlabel="layers of the drafter", ylabel="accepted length (tokens per round)")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def plot_speed_and_throughput(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws tokens per second of all requests over those of each, a line per policy (Figure 7 of the paper).

    Args:
        rows: `load`, `policy` and `tokens_per_second` of each point.
        path: where to write the figure.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for policy, colour, marker, place in zip(policies, COLOURS, MARKERS, PLACES, strict=True):
        points = [row for row in rows if row["policy"] == policy]
        speeds = [row["tokens_per_second"] / row["load"] for row in points]
        totals = [row["tokens_per_second"] for row in points]
        axis.plot(speeds, totals, color=colour, marker=marker, markersize=5, label=policy)
        for row, speed, total in zip(points, speeds, totals, strict=True):
            label = {"textcoords": "offset points", "xytext": place, "fontsize": 7, "color": colour}
            axis.annotate(str(row["load"]), (speed, total), **label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter("{x:.0f}")
    axis.set(
        xlabel="tokens per second of each request (numbers: requests at once)",
        ylabel="tokens per second of all requests",
    )
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)


__all__ = ["plot_depth", "plot_speed_and_throughput"]
