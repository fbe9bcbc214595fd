"""The pictures of the study, in Okabe and Ito's colours, which all kinds of sight tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafters import BLOCK, BLOCK_FAMILIES, BLOCK_SIZES, DEPTH, EAGLE3, LABELS, LAYERS, MTP, SERVED, recipe
from findings import PLAIN, Acceptance, Estimate
from matplotlib.figure import Figure

STYLES = {
    "eagle3": ("#CC79A7", "D"),
    "dflash": ("#D55E00", "s"),
    "markov": ("#0072B2", "o"),
    "rnn": ("#009E73", "^"),
    "mtp": ("#E69F00", "v"),
    PLAIN: ("#000000", "X"),
}
TEMPERATURES = {1.0: "temperature 1", 0.0: "greedy"}


def _style(family: str) -> dict[str, Any]:
    colour, marker = STYLES[family]
    return {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.5, "capsize": 2, "elinewidth": 0.9}


def _draw(axis: Any, places: Sequence[float], estimates: Sequence[Estimate], scale: float = 1.0, **style: Any) -> None:
    """Points with their intervals; those that do not exist are left out."""
    points = [(place, each) for place, each in zip(places, estimates, strict=True) if each.value is not None]
    ends = [each.interval or (each.value, each.value) for _, each in points]
    errors = [
        [scale * max(0, each.value - low) for (_, each), (low, _) in zip(points, ends)],
        [scale * max(0, high - each.value) for (_, each), (_, high) in zip(points, ends)],
    ]
    axis.errorbar([place for place, _ in points], [scale * each.value for _, each in points], yerr=errors, **style)


def _shift(number: int, count: int, width: float) -> float:
    """Moves a line a little along the axis, so that error bars show."""
    return width * (number - (count - 1) / 2)


def _legend(canvas: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize="small")


def draw_lengths(acceptance: Acceptance, path: Path) -> None:
    """Accepted length over the layers, by kind of prompt and over all."""
    kinds: list[str | None] = [*acceptance.kinds, None]
    canvas = Figure(figsize=(10, 5.6), layout="constrained")
    panels = canvas.subplots(len(TEMPERATURES), len(kinds), sharex=True, sharey="row")
    families = ("eagle3", *BLOCK_FAMILIES, "mtp")
    for line, (temperature, title) in zip(panels, TEMPERATURES.items(), strict=True):
        for axis, kind in zip(line, kinds, strict=True):
            for number, family in enumerate(families):
                shown = [recipe(family, layers=layers) for layers in LAYERS] if family in BLOCK_FAMILIES else []
                shown = shown or [EAGLE3 if family == "eagle3" else MTP]
                places = [LAYERS.index(each.layers) + _shift(number, len(families), 0.07) for each in shown]
                lengths = [acceptance.length(each.name, temperature, kind) for each in shown]
                _draw(axis, places, lengths, label=LABELS[family], **_style(family))
            axis.set_title(f"{'all' if kind is None else kind.removeprefix('embedded-')}, {title}", fontsize="medium")
            axis.set_xticks(range(len(LAYERS)), LAYERS)
            axis.grid(axis="y", linewidth=0.4, color="0.85")
    canvas.supxlabel(f"layers of the drafter (blocks of {BLOCK}; MTP-1 drafts one token)", fontsize="medium")
    canvas.supylabel("accepted length (tokens per round)", fontsize="medium")
    _legend(canvas, panels[0, 0])
    canvas.savefig(path, dpi=120)


def draw_positions(acceptance: Acceptance, path: Path) -> None:
    """Acceptance by position, of blocks of the usual length and of the longest."""
    longest = max(BLOCK_SIZES)
    canvas = Figure(figsize=(9.5, 4), layout="constrained")
    panels = canvas.subplots(1, 2, sharey=True, width_ratios=(2, 3))
    for axis, size in zip(panels, (BLOCK, longest), strict=True):
        shown = {family: recipe(family, block_size=size) for family in BLOCK_FAMILIES}
        shown |= {"eagle3": EAGLE3} if size == BLOCK else {}
        for number, (family, each) in enumerate(shown.items()):
            places = [place + _shift(number, len(shown), 0.09) for place in range(1, size + 1)]
            estimates = acceptance.by_position(each.name, 1.0, size)
            _draw(axis, places, estimates, label=each.label, **_style(family))
        axis.set_title(f"blocks of {size}", fontsize="medium")
        axis.set_xticks(range(1, size + 1))
        axis.set(ylim=(0, 1.02))
        axis.grid(axis="y", linewidth=0.4, color="0.85")
    canvas.supxlabel(f"position in the block ({DEPTH} layers, EAGLE-3 1; temperature 1)", fontsize="medium")
    canvas.supylabel("share accepted, where all before it were", fontsize="medium")
    _legend(canvas, panels[0])
    canvas.savefig(path, dpi=120)


def draw_draft_lengths(acceptance: Acceptance, path: Path) -> None:
    """Accepted length over the draft length, and the gain over DFlash."""
    canvas = Figure(figsize=(9.5, 4), layout="constrained")
    lengths, gains = canvas.subplots(1, 2, sharex=True)
    for number, family in enumerate(BLOCK_FAMILIES):
        names = [recipe(family, block_size=size).name for size in BLOCK_SIZES]
        places = [size + _shift(number, len(BLOCK_FAMILIES), 0.15) for size in BLOCK_SIZES]
        style = {"label": LABELS[family], **_style(family)}
        _draw(lengths, places, [acceptance.length(name, 1.0) for name in names], **style)
        if family != "dflash":
            others = [recipe("dflash", block_size=size).name for size in BLOCK_SIZES]
            found = [acceptance.gain(name, other, 1.0) for name, other in zip(names, others, strict=True)]
            _draw(gains, places, found, scale=100, **style)
    gains.axhline(0, color="0.4", linewidth=1, linestyle="--")
    lengths.set(ylabel="accepted length (tokens per round)")
    gains.set(ylabel="gain over DFlash (%)")
    for axis in (lengths, gains):
        axis.set_xticks(BLOCK_SIZES)
        axis.grid(axis="y", linewidth=0.4, color="0.85")
    canvas.supxlabel(f"tokens drafted in a round ({DEPTH} layers, temperature 1)", fontsize="medium")
    _legend(canvas, lengths)
    canvas.savefig(path, dpi=120)


PARTS = {"parallel": "#56B4E9", "head": "#D55E00", "verify": "#009E73", "rest": "#BBBBBB"}
PART_LABELS = {
    "parallel": "drafting without the head",
    "head": "sequential head",
    "verify": "verification",
    "rest": "everything else",
}


def draw_rounds(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], path: Path) -> None:
    """Where a round's time goes, a panel for each number of rows."""
    sizes = list(dict.fromkeys(row["rows"] for row in rows))
    canvas = Figure(figsize=(3.1 * len(sizes) + 1.6, 3.6), layout="constrained")
    panels = canvas.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axis, size in zip(panels, sizes, strict=True):
        mine = [row for row in rows if row["rows"] == size][::-1]
        left = [0.0] * len(mine)
        for part, colour in PARTS.items():
            widths = [max(0.0, row["ms"][part]) for row in mine]
            axis.barh(
                [names[row["drafter"]] for row in mine], widths, left=left, color=colour, label=PART_LABELS[part]
            )
            left = [before + width for before, width in zip(left, widths)]
        axis.set_title("1 row" if size == 1 else f"{size} rows", fontsize="medium")
    canvas.supxlabel("milliseconds per round (temperature 1)", fontsize="medium")
    _legend(canvas, panels[0])
    canvas.savefig(path, dpi=120)


def draw_serving(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Throughput against speed per request, requests at once beside the points; what is verified over the load."""
    canvas = Figure(figsize=(10, 4.2), layout="constrained")
    rates, budgets = canvas.subplots(1, 2)
    shown = {
        PLAIN: (PLAIN, "plain decoding"),
        "mtp": (MTP.name, "MTP-1"),
        "markov": (SERVED.name, "DSpark, scheduled"),
    }
    for family, (name, label) in shown.items():
        mine = sorted((row for row in rows if row["policy"] == name), key=lambda row: row["load"])
        colour, marker = STYLES[family]
        style = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.5, "label": label}
        rates.plot([row["speed_per_request"] for row in mine], [row["tokens_per_second"] for row in mine], **style)
        for row in mine:
            rates.annotate(
                str(row["load"]),
                (row["speed_per_request"], row["tokens_per_second"]),
                textcoords="offset points",
                xytext=(5, 4),
                fontsize="x-small",
                color=colour,
            )
        if name != PLAIN:
            budgets.plot([row["load"] for row in mine], [row["budget"] for row in mine], **style)
    rates.set(
        xlabel="tokens per second of one request", ylabel="tokens per second of all", xscale="log", ylim=(0, None)
    )
    rates.xaxis.set_major_formatter("{x:.0f}")
    rates.xaxis.set_minor_formatter("{x:.0f}")
    rates.tick_params(axis="x", which="both", labelsize="small")
    budgets.set(xlabel="requests at once", ylabel="drafted tokens verified\nper request and round", ylim=(0, None))
    budgets.set_xscale("log", base=2)
    budgets.xaxis.set_major_formatter("{x:.0f}")
    _legend(canvas, rates)
    canvas.savefig(path, dpi=120)
