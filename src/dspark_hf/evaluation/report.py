"""The figures of an evaluation, made from what its journal holds and nothing else.

Figures of acceptance are over rounds of single rows, whatever batch they were in. Their intervals come from drawing
questions, those of speeds from drawing batches of questions, as the time of a batch belongs to all its questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import calibration
from .acceptance import Rounds, predicted_length, share
from .bootstrap import LEVEL, confidence_interval

SETTING = ("drafter", "num_draft_tokens", "threshold", "scheduler")
"""Of a row, what a variant is."""

CELL = ("task", "temperature", "batch_size")
"""Of a row, what it shares with those of the other variants."""

Unit = dict[str, Any]


def build_report(
    units: Sequence[Unit], variants: Sequence[dict[str, Any]], drafters: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of an evaluation.

    Args:
        units: what was measured, as `Evaluation.measure` gives it, in the order of their numbers.
        variants: fields of the variants.
        drafters: the drafters by name, for their temperatures.

    Returns:
        `rows`, one per task, temperature, batch size and variant:

        - `accepted_length`: tokens per round, the bonus token included; `accepted_length_per_question`: the mean of
          the questions' own; `predicted_accepted_length`: `1 + p_1 + p_1 p_2 + ...`, where whole drafts are
          verified, as acceptance of what was left of cut ones says nothing of the others;
        - `conditional_acceptance` and `prefix_acceptance` by position, and the rounds (`cases`) that reached each;
        - `drafted`, `verified`, `kept` and `wasted` tokens; `acceptance_rate`, the share kept of those verified;
        - `tokens_per_second`, `plain_tokens_per_second` and their ratio, `speedup`: prompts included;
        - `seconds_per_round` of drafting, verifying and the rest, for all rows together; `prefill_seconds` per call;
        - `identical_to_plain`: greedy answers that are plain `generate`'s, token for token; `None` when sampled;
        - `repeated_8grams`: how much the answers loop, which makes them easy to draft;
        - `..._interval`: 95% bootstrap intervals, `None` where there is a single question or batch.

        `averages`: means over the tasks. `confidence`: how well confidences fit survival, position by position, with
        the drafter's own temperatures, per task, temperature and drafter. A figure that does not exist is `None`.
    """
    cells = _grouped(units, lambda unit: tuple(unit[name] for name in CELL))
    rows = [
        {**dict(zip(CELL, key, strict=True)), **variant, **_figures(members, str(index), variant, greedy=key[1] == 0)}
        for key, members in cells.items()
        for index, variant in enumerate(variants)
    ]
    return {
        "interval_level": LEVEL,
        "left_out": {task: sum(unit["left_out"] for unit in members) for task, members in _by_task(units).items()},
        "rows": rows,
        "averages": _averages(rows),
        "confidence": list(_confidence(units, drafters)),
    }


def _grouped(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """By key, in the order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def _by_task(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    return _grouped(units, lambda unit: unit["task"])


# --- one row ---------------------------------------------------------------------------------------------------------


def _figures(units: Sequence[Unit], variant: str, setting: dict[str, Any], greedy: bool) -> dict[str, Any]:
    """Figures of one variant, by its name in the journal, in one cell."""
    runs = [turn["runs"][variant] for unit in units for turn in unit["turns"]]
    answers = [same for run in runs for same in run["same"]]
    return {
        "questions": sum(len(unit["ids"]) for unit in units),
        "answers": len(answers),
        **_acceptance(
            rounds_by_question(units, variant), whole=setting["threshold"] == 0 and setting["scheduler"] == "none"
        ),
        "drafted": sum(run["totals"]["drafted"] for run in runs),
        **_speed(units, variant),
        **_round_times(runs),
        "identical_to_plain": sum(answers) if greedy else None,
        "repeated_8grams": float(np.mean([value for run in runs for value in run["repeated"]])),
    }


def rounds_by_question(units: Sequence[Unit], variant: str) -> dict[tuple[int, str], Rounds]:
    """The rounds of each question, all turns together; questions of one id are told apart by their place.

    Args:
        units: of one task, temperature and batch size, as for `build_report`.
        variant: the place of a variant among them all, counted from 0, in digits.
    """
    parts: dict[tuple[int, str], list[Rounds]] = {}
    count = 0
    for unit in units:
        for turn in unit["turns"]:
            for row, rounds in zip(turn["rows"], turn["runs"][variant]["rows"], strict=True):
                parts.setdefault((count + row, unit["ids"][row]), []).append(Rounds(**rounds))
        count += len(unit["ids"])
    return {place: Rounds.join(found) for place, found in sorted(parts.items())}


def _acceptance(questions: dict[tuple[int, str], Rounds], whole: bool) -> dict[str, Any]:
    """What verification kept, of whole drafts or of such as something cut."""
    everything = Rounds.join(list(questions.values()))
    lengths = np.array([[rounds.emitted.sum(), len(rounds)] for rounds in questions.values()])
    kept = np.array([[rounds.kept.sum(), rounds.verified.sum()] for rounds in questions.values()])
    own = np.array([rounds.accepted_length for rounds in questions.values() if len(rounds)])
    positions = np.array([rounds.position_counts(everything.positions) for rounds in questions.values()])
    predicted = _interval(positions, lambda sums: predicted_length(_conditional(sums)))
    return {
        "rounds": len(everything),
        "accepted_length": _number(everything.accepted_length),
        "accepted_length_interval": _interval(lengths, _first_over_second),
        "accepted_length_per_question": _number(own.mean()) if len(own) else None,
        "accepted_length_per_question_interval": _interval(own, lambda sums: sums / len(own)),
        "accepted_length_of_questions": [
            {"id": name, "accepted_length": _number(rounds.accepted_length), "rounds": len(rounds)}
            for (_, name), rounds in questions.items()
        ],
        "predicted_accepted_length": _number(everything.predicted_length) if whole else None,
        "predicted_accepted_length_interval": predicted if whole else None,
        "conditional_acceptance": _number(everything.conditional_acceptance()),
        "conditional_acceptance_interval": _interval(positions, _conditional),
        "prefix_acceptance": _number(everything.prefix_acceptance()),
        "cases": everything.position_counts(everything.positions)[1].tolist(),
        "verified": int(everything.verified.sum()),
        "kept": int(everything.kept.sum()),
        "wasted": int(everything.wasted.sum()),
        "acceptance_rate": _number(everything.acceptance_rate),
        "acceptance_rate_interval": _interval(kept, _first_over_second),
    }


def _first_over_second(sums: np.ndarray) -> np.ndarray:
    return share(sums[..., 0], sums[..., 1])


def _conditional(counts: np.ndarray) -> np.ndarray:
    """Conditional acceptances from counts `(..., 3, K)` of `Rounds.position_counts`."""
    return share(counts[..., 2, :], counts[..., 1, :])


def _speed(units: Sequence[Unit], variant: str) -> dict[str, Any]:
    """Tokens per second with the drafter and without, from the same prompts in the same run."""
    values = np.array(
        [_tokens_and_seconds(unit, variant) + _tokens_and_seconds(unit, "plain") for unit in units], dtype=float
    )
    found: dict[str, Any] = {"new_tokens": int(values[:, 0].sum()), "plain_new_tokens": int(values[:, 2].sum())}
    for name, statistic in (
        ("tokens_per_second", _first_over_second),
        ("plain_tokens_per_second", _plain_rate),
        ("speedup", lambda sums: _first_over_second(sums) / _plain_rate(sums)),
    ):
        found[name] = _number(statistic(values.sum(axis=0)))
        found[f"{name}_interval"] = _interval(values, statistic)
    return found


def _tokens_and_seconds(unit: Unit, run: str) -> list[float]:
    runs = [turn["runs"][run] for turn in unit["turns"]]
    return [sum(sum(entry["tokens"]) for entry in runs), sum(entry["seconds"] for entry in runs)]


def _plain_rate(sums: np.ndarray) -> np.ndarray:
    return share(sums[..., 2], sums[..., 3])


def _round_times(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the rounds of all calls: T_draft and T_verify of equation 1, and what else a round takes."""
    rounds = sum(run["rounds"] for run in runs)
    draft, verify, whole = (
        sum(run["totals"][name] for run in runs) for name in ("draft_seconds", "verify_seconds", "seconds")
    )
    parts = {"draft": draft, "verify": verify, "rest": whole - draft - verify}
    return {
        "seconds_per_round": {name: _number(share(seconds, rounds)) for name, seconds in parts.items()},
        "prefill_seconds": float(np.mean([run["prefill_seconds"] for run in runs])),
    }


def _interval(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Any:
    """`[low, high]`, or two lists; `None` where there is too little to tell."""
    ends = confidence_interval(values, statistic)
    if ends is None or np.isnan(ends).all():
        return None
    return _number(ends.tolist())


def _number(value: Any) -> Any:
    """As JSON takes it: what is not finite becomes `None`."""
    if isinstance(value, (list, tuple)):
        return [_number(entry) for entry in value]
    return float(value) if np.isfinite(value) else None


# --- over tasks, and confidences -------------------------------------------------------------------------------------


def _averages(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the tasks, each of which counts the same, of every variant, temperature and batch size."""
    names = ("temperature", "batch_size", *SETTING)
    groups = _grouped(rows, lambda row: tuple(row[name] for name in names))
    figures = ("accepted_length", "predicted_accepted_length", "acceptance_rate", "speedup")
    return [
        {
            **dict(zip(names, key, strict=True)),
            "tasks": len(members),
            **{name: _mean([row[name] for row in members]) for name in figures},
        }
        for key, members in groups.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def _confidence(units: Sequence[Unit], drafters: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """How confidences, as the drafters use them, fit what survived."""
    for (task, temperature), members in _grouped(units, lambda unit: (unit["task"], unit["temperature"])).items():
        for name, drafter in drafters.items():
            turns = [turn.get("confidence", {}) for unit in members for turn in unit["turns"]]
            parts = [calibration.Observations(**_arrays(turn[name])) for turn in turns if name in turn]
            if not parts:
                continue
            temperatures = getattr(drafter.config, "confidence_temperatures", None)
            positions = calibration.report(calibration.Observations.join(parts), temperatures)
            yield {
                "task": task,
                "temperature": temperature,
                "drafter": name,
                "calibrated": temperatures is not None,
                "mean_ece": {part: _mean_score(positions, part, "ece") for part in ("token", "prefix")},
                "mean_auroc": {part: _mean_score(positions, part, "auroc") for part in ("token", "prefix")},
                "positions": [dataclasses.asdict(entry) for entry in positions],
            }


def _arrays(lists: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(values) for name, values in lists.items()}


def _mean_score(positions: Sequence[calibration.PositionReport], part: str, score: str) -> float | None:
    """Mean over the positions that have the score."""
    scores = [getattr(entry, part) for entry in positions]
    known = [getattr(entry, score) for entry in scores if entry is not None and getattr(entry, score) is not None]
    return float(np.mean(known)) if known else None


__all__ = ["CELL", "SETTING", "build_report", "rounds_by_question"]
