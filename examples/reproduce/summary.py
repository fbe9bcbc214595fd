"""Tables and figures of the study, from its reports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafters import BLOCK, DRAFT_LENGTHS, LAYERS, comparison
from figures import plot_depth, plot_speed_and_throughput
from findings import (
    Report,
    at_throughput,
    mean_length,
    mean_length_interval,
    mean_speedup,
    pooled_acceptance,
    ratio,
    round_times,
    select,
)

from dspark_hf.evaluation.plots import plot_acceptance, plot_bars, plot_draft_lengths

TEMPERATURES = (0.0, 1.0)
SHOWN = ("mtp-1", "eagle3", "dflash-2", "markov-2", "dflash-2-long", "markov-2-long")
"""Of each method one or two drafters, in figures that have no room for more."""

SHOWN_BY_POSITION = ("eagle3", "dflash-2-long", "markov-2-long")
"""Those whose drafts get far enough that positions can be compared."""

COMPARED = (
    *((f"markov-{layers}", f"dflash-{layers}") for layers in LAYERS),
    *((f"rnn-{layers}", f"markov-{layers}") for layers in LAYERS),
    ("markov-1", "eagle3"),
    ("markov-2", "eagle3"),
    ("rnn-2", "eagle3"),
    ("markov-2-long", "eagle3"),
    ("dflash-2-long", "eagle3"),
    ("markov-2-long", "dflash-2-long"),
    ("markov-2", "mtp-1"),
    ("markov-2-long", "mtp-1"),
    ("markov-2", "dflash-5"),
    ("rnn-2", "dflash-5"),
    ("dflash-2-tv", "dflash-2"),
    ("markov-2", "dflash-2-tv"),
)
"""Pairs whose accepted lengths are compared, question by question."""


def write_summary(reports: Mapping[str, Report], facts: Mapping[str, Any], folder: Path) -> None:
    """Writes `tables.md`, the figures, and the measurements that they are made from.

    Args:
        reports: of the stages `comparison`, `draft_lengths`, `eagle3_lengths` and `load`.
        facts: machine, versions, settings and stages.
        folder: for all of it; made anew.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tables = {
        "Accepted length and speed": accepted_lengths(reports["comparison"], facts),
        "Ratios of accepted length": ratios(reports["comparison"]),
        "Acceptance by position": positions(reports["comparison"]),
        "Draft length": lengths_table(reports),
        "Parts of a round": parts(reports["comparison"]),
        "Under load": loads(reports["load"]["rows"]),
    }
    text = "\n".join(f"### {title}\n\n{table}" for title, table in tables.items())
    (folder / "tables.md").write_text(text, encoding="utf-8")
    for name, report in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(_short(report), indent=1) + "\n", encoding="utf-8")
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    draw(reports, folder)


def _short(report: Report) -> dict[str, Any]:
    """Without the questions one by one."""
    rows = [
        {name: value for name, value in row.items() if name != "accepted_length_of_questions"}
        for row in report["rows"]
    ]
    return {**report, "rows": rows}


# --- tables ----------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, its first column of words and the others of figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def accepted_lengths(report: Report, facts: Mapping[str, Any]) -> str:
    """Every drafter of the comparison: tokens per round by task and on average, and speed."""
    tasks = list(report["tasks"])
    header = ["drafter"]
    for temperature in TEMPERATURES:
        header += [f"{task.removeprefix('embedded-')}, T={temperature:g}" for task in tasks] + ["mean", "speed"]
    rows = []
    for name in comparison():
        line: list[str] = [name]
        for temperature in TEMPERATURES:
            found = select(report, name, temperature)
            line += [f"{row['accepted_length']:.2f}" for row in found]
            line += [f"**{mean_length(found):.2f}**", f"{mean_speedup(found):.2f}x"]
        weights = facts["stages"][f"train-{name}"]["parameters"]
        step = facts["stages"]["step_times"]["median_step_seconds"][name]
        rows.append([*line, f"{weights / 1e6:.2f} M", f"{step:.2f} s"])
    return table([*header, "weights", "training step"], rows)


def ratios(report: Report) -> str:
    """Pairs of drafters, with intervals over questions."""
    rows = [
        [
            f"{mine} / {other}",
            *(str(ratio(select(report, mine, t), select(report, other, t))) for t in TEMPERATURES),
        ]
        for mine, other in COMPARED
    ]
    return table(["accepted length of", *(f"T={t:g}" for t in TEMPERATURES)], rows)


def positions(report: Report) -> str:
    """Conditional acceptance at each position, at temperature 1, over all tasks."""
    rows = []
    for name in comparison():
        shares = pooled_acceptance(select(report, name, 1.0))
        rows.append([name, *(f"{share:.0%}" for share in shares), *[""] * (BLOCK - len(shares))])
    return table(["drafter", *map(str, range(1, BLOCK + 1))], rows)


def by_length(reports: Mapping[str, Report], method: str, temperature: float) -> dict[int, list[Any]]:
    """Rows of a method by the most tokens that it drafts."""
    if method == "eagle3":
        others = {length: select(reports["eagle3_lengths"], "eagle3", temperature, length) for length in DRAFT_LENGTHS}
    else:
        others = {
            length: select(reports["draft_lengths"], f"{method}-of-{length}", temperature) for length in DRAFT_LENGTHS
        }
    return {**others, BLOCK: select(reports["comparison"], method, temperature)}


METHODS = ("eagle3", "dflash-2", "markov-2")


def lengths_table(reports: Mapping[str, Report]) -> str:
    """Mean accepted length by draft length, and DSpark over the others."""
    rows = []
    for temperature in TEMPERATURES:
        found = {method: by_length(reports, method, temperature) for method in METHODS}
        for length in DRAFT_LENGTHS:
            mine = found["markov-2"][length]
            rows.append(
                [
                    f"T={temperature:g}, {length}",
                    *(f"{mean_length(found[method][length]):.2f}" for method in METHODS),
                    *(str(ratio(mine, found[method][length])) for method in METHODS if method != "markov-2"),
                ]
            )
    header = ["tokens drafted", *METHODS, *(f"markov-2 / {method}" for method in METHODS if method != "markov-2")]
    return table(header, rows)


def parts(report: Report) -> str:
    """Milliseconds of a round at temperature 1, and what the sequential head adds to it."""
    rows = []
    for name in comparison():
        times = round_times(select(report, name, 1.0))
        share = ""
        method, _, layers = name.partition("-")
        if method in ("markov", "rnn"):
            without = round_times(select(report, f"dflash-{layers}", 1.0))
            share = f"{(times['draft'] - without['draft']) / sum(times.values()):.1%}"
        rows.append([name, *(f"{times[part]:.2f}" for part in ("draft", "verify", "rest")), share])
    return table(["drafter", "draft, ms", "verify, ms", "rest, ms", "heads' share"], rows)


def loads(rows: Sequence[Mapping[str, Any]]) -> str:
    """Throughput under load, and speed of a request at the throughput that MTP-1 has."""
    curves = {policy: [row for row in rows if row["policy"] == policy] for policy in ("plain", "MTP-1", "DSpark")}
    lines = []
    for plain, mtp, dspark in zip(*curves.values(), strict=True):
        total = mtp["tokens_per_second"]
        single = at_throughput(curves["DSpark"], total)
        matched = "out of DSpark's range" if single is None else f"{single / (total / mtp['load']):.2f}"
        lines.append(
            [
                mtp["load"],
                *(f"{row['tokens_per_second']:.0f}" for row in (plain, mtp, dspark)),
                f"{dspark['tokens_per_second'] / total:.2f}",
                f"{dspark['budget']:.2f}",
                matched,
            ]
        )
    header = [
        "requests",
        "plain, tokens/s",
        "MTP-1",
        "DSpark",
        "DSpark / MTP-1",
        "DSpark verifies",
        "a request's speed at MTP-1's throughput",
    ]
    return table(header, lines)


# --- figures ---------------------------------------------------------------------------------------------------------


def draw(reports: Mapping[str, Report], folder: Path) -> None:
    """All figures."""
    rows = [row for row in reports["comparison"]["rows"] if row["drafter"] in SHOWN]
    rows.sort(key=lambda row: SHOWN.index(row["drafter"]))
    sampled = [row for row in rows if row["temperature"] == 1]
    plot_bars(rows, folder / "accepted-length.png")
    plot_bars(rows, folder / "speed.png", figure="speedup")
    plot_acceptance([row for row in sampled if row["drafter"] in SHOWN_BY_POSITION], folder / "acceptance.png")
    by_lengths = [
        {**row, "drafter": method, "num_draft_tokens": length}
        for method in METHODS
        for length, found in sorted(by_length(reports, method, 1.0).items())
        for row in found
    ]
    plot_draft_lengths(by_lengths, folder / "draft-lengths.png")
    names = {"dflash": "DFlash", "markov": "DSpark, Markov", "rnn": "DSpark, RNN"}
    series = {
        label: [_point(reports["comparison"], f"{method}-{layers}", layers) for layers in LAYERS]
        for method, label in names.items()
    }
    plot_depth(series, folder / "depth.png")
    plot_speed_and_throughput(reports["load"]["rows"], folder / "load.png")


def _point(report: Report, drafter: str, layers: int) -> tuple[int, float, tuple[float, float]]:
    """Mean accepted length over tasks at temperature 1, with its interval."""
    rows = select(report, drafter, 1.0)
    mean = mean_length(rows)
    return layers, mean, mean_length_interval(rows) or (mean, mean)


__all__ = ["write_summary"]
