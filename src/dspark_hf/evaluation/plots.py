"""Figures; they need matplotlib, which comes with `pip install "dspark-hf[plots]"`."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
    policies = [*dict.fromkeys(row["policy"] for row in rows)]
    fixed = [policy for policy in policies if policy.startswith("length")]
    others = itertools.cycle((("black", "s", "--"), ("#0072B2", "o", "-"), ("#D55E00", "^", "-")))
    for policy in policies:
        points = [row for row in rows if row["policy"] == policy]
        loads = [row["load"] for row in points]
        medians = np.array([row["tokens_per_second"] for row in points])
        drafted = [row["budget"] for row in points]
        if policy in fixed:
            # They are many and stand back behind the others, the longer the darker.
            shade = str(0.85 - 0.5 * fixed.index(policy) / max(1, len(fixed) - 1))
            for axis, values in ((rates, medians), (budgets, drafted)):
                axis.plot(loads, values, color=shade, linewidth=1, zorder=1, label=policy)
            continue
        color, marker, line = next(others)
        style = {"color": color, "marker": marker, "markersize": 4, "linestyle": line, "linewidth": 2}
        spread = np.abs(np.array([row["tokens_per_second_range"] for row in points]).T - medians)
        rates.errorbar(loads, medians, yerr=spread, capsize=3, elinewidth=1, label=policy, **style)
        budgets.plot(loads, drafted, **style)
    # Equal ratios are equally far apart.
    rates.set_yscale("log", base=2)
    rates.yaxis.set_major_formatter("{x:.0f}")
    rates.set(ylabel="tokens per second")
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


# --- comparing drafters --------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which all kinds of sight tell apart, without the yellow that fades on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", ":", "-.")

Rows = Sequence[Mapping[str, Any]]


def plot_bars(rows: Rows, path: str | os.PathLike[str], figure: str = "accepted_length") -> None:
    """Draws a figure by task and drafter as bars, a panel per temperature (Table 1 of the paper).

    Args:
        rows: of an evaluation's report, one for each task, drafter and temperature.
        path: where to write the figure; the ending says the format.
        figure: `accepted_length` or `speedup`.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    tasks, drafters, temperatures = (_values(rows, name) for name in ("task", "drafter", "temperature"))
    is_turned = len(tasks) > 5
    label = 0 if is_turned else 0.1 * max(map(len, tasks))
    width = max(5.0, 1.5 + len(tasks) * max(0.35 * len(drafters) + 0.5, label))
    canvas = Figure(figsize=(width, 2.6 * len(temperatures) + 0.8), layout="constrained")
    panels = canvas.subplots(len(temperatures), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    bar = 0.8 / len(drafters)
    for temperature, axis in zip(temperatures, panels, strict=True):
        for number, drafter in enumerate(drafters):
            mine = [row for row in rows if row["drafter"] == drafter and row["temperature"] == temperature]
            places = [tasks.index(row["task"]) + (number - (len(drafters) - 1) / 2) * bar for row in mine]
            axis.bar(
                places,
                [row[figure] for row in mine],
                width=0.92 * bar,
                yerr=_error(mine, figure),
                capsize=2,
                color=_COLOURS[number % len(_COLOURS)],
                error_kw={"linewidth": 1},
                label=drafter,
            )
        axis.axhline(1, color="0.4", linewidth=1, linestyle="--")
        axis.set_title(_temperature(temperature), fontsize="medium")
        axis.margins(x=0.02)
        axis.set_xticks(range(len(tasks)), tasks, rotation=30 if is_turned else 0)
    labels = {"accepted_length": "accepted length (tokens per round)", "speedup": "speed, times plain generate"}
    canvas.supylabel(labels[figure], fontsize="medium")
    _legend(canvas, panels[0], len(drafters))
    canvas.savefig(path, dpi=120)


def plot_acceptance(rows: Rows, path: str | os.PathLike[str], min_cases: int = 20) -> None:
    """Draws conditional acceptance over the position in the block, a panel per task, a line per drafter.

    Args:
        rows: of an evaluation's report, one for each task, drafter and temperature.
        path: where to write the figure; the ending says the format.
        min_cases: rounds that must have come to a position for it to be drawn; the first always is.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    canvas, panels = _task_panels(rows)
    longest = max(len(row["conditional_acceptance"]) for row in rows)
    shifts = _shifts(rows, longest - 1)
    for row, axis, style in _styled(rows, panels):
        shares = row["conditional_acceptance"]
        points = [
            {"share": share, "share_interval": None if None in ends else ends}
            for place, (share, *ends) in enumerate(
                zip(shares, *(row["conditional_acceptance_interval"] or [shares, shares]), strict=True)
            )
            if share is not None and (place == 0 or row["cases"][place] >= min_cases)
        ]
        axis.errorbar(
            [place + 1 + shifts[style["label"]] for place in range(len(points))],
            [point["share"] for point in points],
            yerr=_error(points, "share"),
            capsize=2,
            elinewidth=0.8,
            **style,
        )
    for axis in panels.values():
        axis.set_xticks(range(1, longest + 1))
        axis.set(ylim=(0, 1.02))
    canvas.supxlabel("position in the block", fontsize="medium")
    canvas.supylabel("accepted, where all before it were", fontsize="medium")
    _legend(canvas, next(iter(panels.values())), len(_values(rows, "drafter")))
    canvas.savefig(path, dpi=120)


def plot_draft_lengths(rows: Rows, path: str | os.PathLike[str]) -> None:
    """Draws accepted length over the most tokens drafted in a round, a panel per task, a line per drafter.

    Args:
        rows: of an evaluation's report, one for each task, drafter, temperature and `num_draft_tokens`.
        path: where to write the figure; the ending says the format.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    canvas, panels = _task_panels(rows)
    for places, points, axis, style in _lines(rows, panels, "num_draft_tokens"):
        axis.errorbar(
            places,
            [row["accepted_length"] for row in points],
            yerr=_error(points, "accepted_length"),
            capsize=2,
            **style,
        )
    for axis in panels.values():
        axis.set_xticks(_values(rows, "num_draft_tokens"))
        axis.set(ylim=(1, None))
    canvas.supxlabel("most tokens drafted in a round", fontsize="medium")
    canvas.supylabel("accepted length (tokens per round)", fontsize="medium")
    _legend(canvas, next(iter(panels.values())), len(_values(rows, "drafter")))
    canvas.savefig(path, dpi=120)


def plot_threshold_speeds(rows: Rows, path: str | os.PathLike[str]) -> None:
    """Draws tokens per second and the share of verified tokens kept over the threshold, a pair of panels per task.

    Args:
        rows: of an evaluation's report, one for each task, drafter, temperature and `threshold`.
        path: where to write the figure; the ending says the format.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    tasks = _values(rows, "task")
    canvas = Figure(figsize=(8, 2.6 * len(tasks) + 0.9), layout="constrained")
    grid = canvas.subplots(len(tasks), 2, sharex=True, squeeze=False)
    names = {"tokens_per_second": "tokens per second", "acceptance_rate": "verified tokens kept"}
    for column, (name, label) in enumerate(names.items()):
        panels = dict(zip(tasks, grid[:, column], strict=True))
        for places, points, axis, style in _lines(rows, panels, "threshold"):
            # Nothing may have been verified under a high threshold.
            known = [index for index, row in enumerate(points) if row[name] is not None]
            axis.errorbar(
                [places[index] for index in known],
                [points[index][name] for index in known],
                yerr=_error([points[index] for index in known], name),
                capsize=2,
                **style,
            )
        for task, axis in panels.items():
            axis.set(ylabel=label, title=task, ylim=(0, 1.02 if name == "acceptance_rate" else None))
    canvas.supxlabel("confidence threshold", fontsize="medium")
    _legend(canvas, grid[0, 0], len(_values(rows, "drafter")))
    canvas.savefig(path, dpi=120)


def plot_evaluation(report: Mapping[str, Any], output: str | os.PathLike[str]) -> list[Path]:
    """Draws the figures that an evaluation's report has data for, beside it.

    Of several batch sizes, schedulers, thresholds and draft lengths, a figure that is not about them shows the first
    batch size, scheduler and threshold, and each drafter's longest drafts.

    Args:
        report: of `evaluate_drafters`.
        output: the report's file, whose name without its ending begins those of the figures.

    Returns:
        The files: `-accepted-length`, `-speed` and `-acceptance`, further `-draft-lengths` and `-thresholds` where
        several ran; `.png`.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if a file cannot be written.
    """
    path, written = Path(output), []
    settings = report["settings"]
    rows = [
        row
        for row in report["rows"]
        if row["batch_size"] == settings["batch_sizes"][0] and row["scheduler"] == settings["schedulers"][0]
    ]
    uncut = [row for row in rows if row["threshold"] == settings["thresholds"][0]]
    longest = {
        name: max(row["num_draft_tokens"] or 0 for row in rows if row["drafter"] == name)
        for name in _values(rows, "drafter")
    }
    whole = [row for row in rows if (row["num_draft_tokens"] or 0) == longest[row["drafter"]]]
    plain = [row for row in uncut if row in whole]
    drawings: list[tuple[str, Any, Rows]] = [
        ("accepted-length", plot_bars, plain),
        ("speed", functools.partial(plot_bars, figure="speedup"), plain),
        ("acceptance", plot_acceptance, plain),
    ]
    if len(settings["num_draft_tokens"]) > 1:
        drawings.append(("draft-lengths", plot_draft_lengths, uncut))
    if len(settings["thresholds"]) > 1:
        drawings.append(("thresholds", plot_threshold_speeds, whole))
    for name, draw, chosen in drawings:
        written.append(path.with_name(f"{path.stem}-{name}.png"))
        draw(chosen, written[-1])
    return written


def _values(rows: Rows, name: str) -> list[Any]:
    """The different values of a column, in the order of their appearance."""
    return list(dict.fromkeys(row[name] for row in rows))


def _temperature(value: float) -> str:
    return "greedy" if value == 0 else f"temperature {value:g}"


def _error(rows: Rows, name: str) -> np.ndarray:
    """`(2, n)` lengths of error bars; none where there is no interval."""
    lengths = []
    for row in rows:
        low, high = row[f"{name}_interval"] or (row[name], row[name])
        # The interval of a skewed figure may lie beside it.
        lengths.append([max(0, row[name] - low), max(0, high - row[name])])
    return np.array(lengths).reshape(-1, 2).T


def _task_panels(rows: Rows) -> tuple[Any, dict[str, Any]]:
    """A figure and a panel per task, at most three side by side."""
    from matplotlib.figure import Figure

    tasks = _values(rows, "task")
    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    canvas = Figure(figsize=(max(4.5, 3.2 * columns), 2.7 * lines + 0.9), layout="constrained")
    axes = canvas.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axis in axes[len(tasks) :]:
        axis.set_axis_off()
    panels = dict(zip(tasks, axes, strict=False))
    for task, axis in panels.items():
        axis.set_title(task, fontsize="medium")
        axis.tick_params(labelbottom=True)
    return canvas, panels


def _styled(rows: Rows, panels: Mapping[str, Any]) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Each row with its panel and its style: colour and marker by drafter, line by temperature."""
    drafters, temperatures = _values(rows, "drafter"), _values(rows, "temperature")
    for row in rows:
        number, line = drafters.index(row["drafter"]), temperatures.index(row["temperature"])
        label = row["drafter"] if len(temperatures) == 1 else f"{row['drafter']}, {_temperature(row['temperature'])}"
        yield (
            row,
            panels[row["task"]],
            {
                "color": _COLOURS[number % len(_COLOURS)],
                "marker": _MARKERS[number % len(_MARKERS)],
                "markersize": 4,
                "linewidth": 1.5,
                "linestyle": _LINES[line % len(_LINES)],
                "label": label,
            },
        )


def _lines(
    rows: Rows, panels: Mapping[str, Any], along: str
) -> Iterator[tuple[list[float], list[Mapping[str, Any]], Any, dict[str, Any]]]:
    """The points of each line, sorted by the column `along`, with their places on that axis, panel and style."""
    found: dict[tuple[str, str], tuple[list[Mapping[str, Any]], Any, dict[str, Any]]] = {}
    for row, axis, style in _styled(rows, panels):
        found.setdefault((row["task"], style["label"]), ([], axis, style))[0].append(row)
    values = _values(rows, along)
    shifts = _shifts(rows, max(values) - min(values))
    for points, axis, style in found.values():
        points.sort(key=lambda row: row[along])
        yield [row[along] + shifts[style["label"]] for row in points], points, axis, style


def _shifts(rows: Rows, span: float) -> dict[str, float]:
    """How far each line, by its label, is moved along an axis of length `span`, so that error bars show."""
    labels = list(dict.fromkeys(style["label"] for _, _, style in _styled(rows, dict.fromkeys(_values(rows, "task")))))
    return {label: 0.012 * span * (place - (len(labels) - 1) / 2) for place, label in enumerate(labels)}


def _legend(canvas: Any, axis: Any, drafters: int) -> None:
    """One legend for all panels, above them, a column per drafter, its temperatures below each other."""
    handles, labels = axis.get_legend_handles_labels()
    names = [label.rpartition(", ")[0] for label in labels]
    order = sorted(range(len(labels)), key=lambda place: names.index(names[place]))
    if len(labels) > 1:
        canvas.legend(
            [handles[i] for i in order],
            [labels[i] for i in order],
            loc="outside upper center",
            ncols=min(drafters, max(4, int(canvas.get_figwidth() / 1.8))),
            fontsize="small",
        )


__all__ = [
    "can_plot",
    "plot_acceptance",
    "plot_bars",
    "plot_capacity",
    "plot_draft_lengths",
    "plot_evaluation",
    "plot_load",
    "plot_reliability",
    "plot_threshold_speeds",
    "plot_thresholds",
]
