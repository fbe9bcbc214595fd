"""What the measurements say, each of the paper's findings beside it: figures with intervals, and whether they agree.

Accepted length is tokens per round, the bonus token included. Over all it is the mean of the three kinds of prompts,
each of which counts the same. Intervals are 95% bootstrap intervals that draw questions; of two drafters the same ones,
so that what makes a question hard for both does not widen that of their ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from drafters import BLOCK, BLOCK_SIZES, DEPTH, EAGLE3, LAYERS, MTP, SERVED, recipe
from serving import Curve, at_matched_speed, at_matched_throughput, mean_ratio

from dspark_hf.evaluation.acceptance import Rounds, share
from dspark_hf.evaluation.bootstrap import confidence_interval
from dspark_hf.evaluation.report import rounds_by_question

PLAIN = "plain"


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval, either `None` where there is too little to tell."""

    value: float | None
    interval: list[float] | None

    def __format__(self, spec: str) -> str:
        if self.value is None:
            return "-"
        ends = "" if self.interval is None else f" [{', '.join(format(end, spec) for end in self.interval)}]"
        return f"{self.value:{spec}}{ends}"


def _estimate(values: np.ndarray, statistic: Any) -> Estimate:
    value = float(statistic(values.sum(axis=0)))
    ends = confidence_interval(values, statistic)
    known = ends is not None and not np.isnan(ends).any()
    return Estimate(value if np.isfinite(value) else None, ends.tolist() if known else None)


class Acceptance:
    """Rounds of all drafters, question by question.

    Args:
        units: what an evaluation has measured, as its journal keeps it.
        names: of the drafters, in the order of the evaluation.

    Attributes:
        kinds: of prompts.
    """

    def __init__(self, units: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        self.kinds = list(dict.fromkeys(unit["task"] for unit in units))
        self._rounds: dict[tuple[str, float], list[tuple[int, Rounds]]] = {}
        for temperature in dict.fromkeys(unit["temperature"] for unit in units):
            for kind, task in enumerate(self.kinds):
                cell: Any = [u for u in units if (u["task"], u["temperature"]) == (task, temperature)]
                for index, name in enumerate(names):
                    found = rounds_by_question(cell, str(index)).values()
                    self._rounds.setdefault((name, temperature), []).extend((kind, rounds) for rounds in found)

    def _lengths(self, name: str, temperature: float) -> np.ndarray:
        """`(questions, kinds, 2)`: emitted tokens and rounds of each question, in the line of its kind."""
        found = self._rounds[name, temperature]
        values = np.zeros((len(found), len(self.kinds), 2))
        for place, (kind, rounds) in enumerate(found):
            values[place, kind] = rounds.emitted.sum(), len(rounds)
        return values

    def _positions(self, name: str, temperature: float, positions: int) -> np.ndarray:
        """`(questions, 2, positions)`: rounds in which each position was reached and in which it survived."""
        return np.array([rounds.position_counts(positions)[1:] for _, rounds in self._rounds[name, temperature]])

    def length(self, name: str, temperature: float, kind: str | None = None) -> Estimate:
        """Accepted length on one kind of prompts, or over all."""
        values = self._lengths(name, temperature)
        if kind is not None:
            index = self.kinds.index(kind)
            values = values[values[:, index, 1] > 0][:, index : index + 1]
        return _estimate(values, _mean_length)

    def gain(self, name: str, other: str, temperature: float) -> Estimate:
        """How much longer `name` is accepted than `other`, as a share."""
        return _estimate(self._pairs([(name, other)], temperature), lambda sums: _gains(sums)[..., 0])

    def gain_grows(self, first: tuple[str, str], last: tuple[str, str], temperature: float) -> Estimate:
        """How much larger the gain within one pair is than within another."""
        values = self._pairs([first, last], temperature)
        return _estimate(values, lambda sums: _gains(sums)[..., 1] - _gains(sums)[..., 0])

    def _pairs(self, pairs: Sequence[tuple[str, str]], temperature: float) -> np.ndarray:
        """`(questions, pairs, 2, kinds, 2)`."""
        pair_values = [np.stack([self._lengths(name, temperature) for name in pair], axis=1) for pair in pairs]
        return np.stack(pair_values, axis=1)

    def by_position(self, name: str, temperature: float, positions: int) -> list[Estimate]:
        """Acceptance of each position where all before it were accepted, all questions together."""
        counts = self._positions(name, temperature, positions)
        return [
            _estimate(counts[:, :, place], lambda sums: share(sums[..., 1], sums[..., 0]))
            for place in range(positions)
        ]

    def fall(self, name: str, temperature: float, positions: int) -> Estimate:
        """By how much acceptance is lower at the last third of the positions than at the first."""
        return _estimate(self._positions(name, temperature, positions), _fall)

    def fall_differs(self, name: str, other: str, temperature: float, positions: int) -> Estimate:
        """By how much more the acceptance of `name` falls than that of `other`."""
        both = [self._positions(each, temperature, positions) for each in (name, other)]
        return _estimate(np.stack(both, axis=1), lambda sums: _fall(sums[..., 0, :, :]) - _fall(sums[..., 1, :, :]))


def _mean_length(sums: np.ndarray) -> np.ndarray:
    """`(..., kinds, 2)` to the mean over the kinds."""
    return share(sums[..., 0], sums[..., 1]).mean(axis=-1)


def _gains(sums: np.ndarray) -> np.ndarray:
    """`(..., pairs, 2, kinds, 2)` to `(..., pairs)`."""
    lengths = _mean_length(sums)
    return lengths[..., 0] / lengths[..., 1] - 1


def _fall(counts: np.ndarray) -> np.ndarray:
    """`(..., 2, positions)`, reached and survived."""
    late = counts[..., -max(1, counts.shape[-1] // 3) :].sum(axis=-1)
    return share(counts[..., 1, 0], counts[..., 0, 0]) - share(late[..., 1], late[..., 0])


# --- findings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One finding of the paper and what was measured here.

    Attributes:
        claim: what should hold.
        paper: the paper's figures.
        here: what was measured.
        verdict: `agrees`, `does not agree`, or `open` where the interval has both.
    """

    claim: str
    paper: str
    here: str
    verdict: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def verdict(interval: Sequence[float] | None, bound: float = 0.0) -> str:
    """Whether a figure that should be above `bound` is."""
    if interval is None or interval[0] <= bound <= interval[1]:
        return "open"
    return "agrees" if interval[0] > bound else "does not agree"


def find_acceptance(acceptance: Acceptance) -> list[Finding]:
    """Findings about accepted length at temperature 1, greedy figures beside."""
    deep = max(LAYERS)
    markov, dflash = recipe("markov", layers=deep).name, recipe("dflash", layers=deep).name
    short, long = min(BLOCK_SIZES), max(BLOCK_SIZES)

    def gains(name: str, other: str) -> str:
        return f"{acceptance.gain(name, other, 1.0):+.1%}; greedy {acceptance.gain(name, other, 0.0):+.1%}"

    def pair(block: int) -> tuple[str, str]:
        return recipe("markov", block_size=block).name, recipe("dflash", block_size=block).name

    small = recipe("markov").name
    growth = acceptance.gain_grows(pair(short), pair(long), 1.0)
    falls = {family: acceptance.fall(recipe(family).name, 1.0, BLOCK) for family in ("dflash", "markov", "rnn")} | {
        "eagle3": acceptance.fall(EAGLE3.name, 1.0, BLOCK)
    }
    differs = acceptance.fall_differs(recipe("dflash").name, small, 1.0, BLOCK)
    along = ", ".join(f"{size}: {acceptance.gain(*pair(size), 1.0):+.1%}" for size in BLOCK_SIZES)
    return [
        Finding(
            f"DSpark ({deep} layers) is accepted longer than EAGLE-3.",
            "+27% to +31% on Qwen3 (mean over nine benchmarks, temperature 1)",
            gains(markov, EAGLE3.name),
            verdict(acceptance.gain(markov, EAGLE3.name, 1.0).interval),
        ),
        Finding(
            f"DSpark is accepted longer than DFlash of as many layers ({deep}).",
            "+16% to +18% on Qwen3",
            gains(markov, dflash),
            verdict(acceptance.gain(markov, dflash, 1.0).interval),
        ),
        Finding(
            f"DSpark of {DEPTH} layers is accepted longer than DFlash of {deep}.",
            "it is",
            gains(small, dflash),
            verdict(acceptance.gain(small, dflash, 1.0).interval),
        ),
        Finding(
            "Acceptance falls with the position for DFlash, and less for DSpark.",
            "DFlash decays, DSpark stays flat",
            f"from the first position to the last third, {DEPTH} layers: DFlash {-_value(falls['dflash']):+.1%}, Markov "
            f"{-_value(falls['markov']):+.1%}, RNN {-_value(falls['rnn']):+.1%} (EAGLE-3 {-_value(falls['eagle3']):+.1%}); "
            f"DFlash falls by {100 * _value(differs):.1f} {_points(differs)} percentage points more than Markov",
            verdict(differs.interval),
        ),
        Finding(
            "The longer the drafts, the larger the gain over DFlash.",
            "follows from the decay by position",
            f"gain at each draft length: {along}; from {short} to {long} it grows by {100 * _value(growth):+.1f} "
            f"{_points(growth)} percentage points",
            verdict(growth.interval),
        ),
    ]


def _value(estimate: Estimate) -> float:
    return float("nan") if estimate.value is None else estimate.value


def _points(estimate: Estimate) -> str:
    if estimate.interval is None:
        return ""
    return f"[{', '.join(f'{100 * end:.1f}' for end in estimate.interval)}]"


HEAD_BOUND = 0.013


def find_head(rows: Sequence[Mapping[str, Any]]) -> Finding:
    """The sequential head's share of a round."""
    largest = max(row["rows"] for row in rows)
    names = [recipe(family).name for family in ("markov", "rnn")]
    mine = [row for row in rows if row["drafter"] in names]
    shown = "; ".join(
        f"{name}: " + ", ".join(f"{row['head_share']:.1%} ({row['rows']})" for row in mine if row["drafter"] == name)
        for name in names
    )
    low, high = next(row["head_share_range"] for row in mine if (row["drafter"], row["rows"]) == (names[0], largest))
    return Finding(
        f"The sequential head takes little of a round (no more than {HEAD_BOUND:.1%}).",
        "0.2% to 1.3% (batch of 128, a GPU)",
        f"share of a round, by rows of the batch: {shown}",
        verdict([-high, -low], -HEAD_BOUND),
    )


def find_confidence(scores: Mapping[str, Any]) -> list[Finding]:
    """How well the served drafter's confidences say what survives."""
    found = scores[SERVED.name]
    ece = {name: Estimate(found[f"ece_{name}"], found[f"ece_{name}_interval"]) for name in ("before", "after")}
    auroc = Estimate(found["auroc"], found["auroc_interval"])
    is_better = _value(ece["after"]) < _value(ece["before"])
    return [
        Finding(
            "Confidences tell the tokens that survive from those that do not.",
            "AUROC 0.81 to 0.91",
            f"AUROC {auroc:.3f}",
            verdict(auroc.interval, 0.81),
        ),
        Finding(
            "Sequential Temperature Scaling mends their calibration.",
            "ECE 3% to 8% before, about 1% after",
            f"ECE {ece['before']:.1%} before, {ece['after']:.1%} after; right confidences would show "
            f"{found['chance_ece']:.1%} in so few rounds",
            "agrees" if is_better else "does not agree",
        ),
    ]


def find_serving(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What DSpark with its scheduler gains under load."""
    repeats = range(len(rows[0]["tokens_per_second_of_repeats"]))
    ours, baseline = Curve.of(rows, SERVED.name), Curve.of(rows, MTP.name)
    ratios = at_matched_throughput(ours, baseline)
    of_repeats = [
        mean_ratio(at_matched_throughput(Curve.of(rows, SERVED.name, one), Curve.of(rows, MTP.name, one)))
        for one in repeats
    ]
    known = [ratio for ratio in of_repeats if ratio is not None]
    spread = [min(known), max(known)] if len(known) > 1 else None
    shown = ", ".join(f"{entry['load']}: {show_ratio(entry)}" for entry in ratios)
    mean = Estimate(mean_ratio(ratios), spread)
    mine = sorted((row for row in rows if row["policy"] == SERVED.name), key=lambda row: row["load"])
    few, many = mine[0], mine[-1]
    fall = [few["budget_range"][0] - many["budget_range"][1], few["budget_range"][1] - many["budget_range"][0]]
    return [
        Finding(
            "At matched throughput a request is faster with DSpark than with MTP-1.",
            "60% to 85% faster (DeepSeek-V4 in production)",
            f"{mean:.2f} times as fast (geometric mean where MTP-1 has not collapsed, range over the repeats); by "
            f"MTP-1's requests at once: {shown}",
            verdict(spread, 1.0),
        ),
        Finding(
            "The scheduler verifies less per request as the load grows.",
            "from 4 to 6 tokens to about 2",
            f"drafted tokens verified per request and round: {few['budget']:.2f} at {few['load']}, "
            f"{many['budget']:.2f} at {many['load']} requests",
            verdict(sorted(fall)),
        ),
    ]


def show_ratio(entry: Mapping[str, Any]) -> str:
    """A ratio with its labels."""
    if entry["ratio"] is None:
        return "not reached"
    least = "at least " if entry.get("is_least") else ""
    return f"{least}{entry['ratio']:.2f}{' (collapsed)' if entry['collapsed'] else ''}"


def serving_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """DSpark against MTP-1 and plain decoding, at matched throughput and at matched speed."""
    ours = Curve.of(rows, SERVED.name)
    return {
        name: {
            "matched_throughput": at_matched_throughput(ours, Curve.of(rows, name)),
            "matched_speed": at_matched_speed(ours, Curve.of(rows, name)),
        }
        for name in (MTP.name, PLAIN)
    }
