"""Many requests at once: throughput against speed per request, and what one drafter gains on another (Figure 7)."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rounds import SAMPLED
from transformers import PreTrainedModel

from dspark_hf import SpeculativeEngine
from dspark_hf.generation.schedulers import Scheduler
from dspark_hf.models import Drafter

# Doubling the requests has brought less than this much more throughput: only waiting is added.
SATURATED = 1.1
# At this share of its speed for a single request a policy can hardly serve a second one.
NEAR_ALONE = 0.9


@dataclass(frozen=True)
class Policy:
    """A way to serve requests.

    Attributes:
        drafter: what drafts; `None` for plain decoding.
        scheduler: what decides how much is verified; keeps what it learns from run to run, as on a server.
    """

    drafter: Drafter | None
    scheduler: Scheduler


def serve(
    target: PreTrainedModel, prompts: torch.Tensor, policy: Policy, load: int, tokens: int, least: int, seed: int
) -> dict[str, float]:
    """Figures of one policy with `load` requests active at any time: when one ends the next one joins.

    Requests write between half and one and a half times `tokens`, so that they do not end together. The clock runs
    from when all are active until `load * tokens` tokens were written, and at least `least`.
    """
    torch.manual_seed(seed)
    source = itertools.cycle(prompts)
    lengths = itertools.cycle([tokens * (2 + step) // 4 for step in (0, 3, 1, 4, 2)])
    options = {**SAMPLED, "eos_token_id": None, "pad_token_id": 0, "dspark_scheduler": policy.scheduler}
    if policy.drafter is None:
        del options["dspark_scheduler"]
    names = ("emitted", "rows", "verified")
    with SpeculativeEngine(
        target, policy.drafter, max_batch=load, max_queue=load, threaded=False, **options
    ) as engine:
        requests = [engine.submit(next(source), max_new_tokens=next(lengths)) for _ in range(load)]
        engine.step()
        before, start = [engine.stats.total(name) for name in names], time.perf_counter()
        while engine.stats.total("emitted") - before[0] < max(load * tokens, least):
            requests = [request for request in requests if not request.done]
            while len(requests) < load:
                requests.append(engine.submit(next(source), max_new_tokens=next(lengths)))
            engine.step()
        seconds = time.perf_counter() - start
        emitted, rows, verified = (engine.stats.total(name) - count for name, count in zip(names, before))
        engine.close(cancel=True)
    return {"tokens_per_second": emitted / seconds, "accepted_length": emitted / rows, "budget": verified / rows}


def measure_load(
    target: PreTrainedModel,
    prompts: torch.Tensor,
    policies: Mapping[str, Policy],
    load: int,
    tokens: int,
    least: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """A row per policy; they take turns in another order each time, so that a drift of the machine favours none."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in policies}
    for repeat in range(repeats):
        for name in random.Random(repeat).sample(list(policies), len(policies)):
            figures[name].append(serve(target, prompts, policies[name], load, tokens, least, seed=repeat))
    return [_row(load, name, runs) for name, runs in figures.items()]


def _row(load: int, policy: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians over the repeats. A request's speed is its share of the throughput: the load is always the same."""
    rates = [run["tokens_per_second"] for run in runs]
    budgets = [run["budget"] for run in runs]
    return {
        "policy": policy,
        "load": load,
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_of_repeats": rates,
        "speed_per_request": statistics.median(rates) / load,
        "accepted_length": statistics.median(run["accepted_length"] for run in runs),
        "budget": statistics.median(budgets),
        "budget_range": [min(budgets), max(budgets)],
    }


# --- ratios ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A policy under load.

    Attributes:
        loads: requests at once, rising.
        rates: tokens per second, all requests together.
    """

    loads: np.ndarray
    rates: np.ndarray

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]], policy: str, repeat: int | None = None) -> Curve:
        """From `measure_load`: medians, or one repeat."""
        mine = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["load"])
        rates = [
            row["tokens_per_second"] if repeat is None else row["tokens_per_second_of_repeats"][repeat] for row in mine
        ]
        return Curve(np.array([row["load"] for row in mine], dtype=float), np.array(rates))

    @property
    def speeds(self) -> np.ndarray:
        """Tokens per second of one request."""
        return self.rates / self.loads

    def speed_at(self, rate: float) -> float | None:
        """Speed of a request where the throughput is `rate`, at the smallest load for it; `None` where it never is."""
        return _crossing(self.rates, self.speeds, rate)

    def rate_at(self, speed: float) -> float | None:
        """Throughput where a request has this speed, at the largest load for it; `None` where it never has."""
        return _crossing(self.speeds[::-1], self.rates[::-1], speed)

    def is_saturated(self, index: int) -> bool:
        """Whether the last step up to this load brought next to no throughput."""
        return index > 0 and bool(self.rates[index] < SATURATED * self.rates[index - 1])


def _crossing(along: np.ndarray, values: np.ndarray, at: float) -> float | None:
    """`values` where a line through the points first has `at` on the other axis."""
    for left in range(len(along) - 1):
        low, high = sorted(along[left : left + 2])
        if low <= at <= high:
            share = 0.0 if high == low else (at - along[left]) / (along[left + 1] - along[left])
            return float(values[left] + share * (values[left + 1] - values[left]))
    return None


def at_matched_throughput(ours: Curve, baseline: Curve) -> list[dict[str, Any]]:
    """For each load of the baseline how much faster a request of ours is, at the baseline's throughput there.

    `is_least`: a single request of ours already brings more throughput, so its speed there is taken. `collapsed`: the
    baseline is saturated, its speed there buys no throughput, and the ratio says more about it than about ours. The
    ratio is `None` where ours never has that throughput.
    """
    found = []
    for index, (load, rate, speed) in enumerate(zip(baseline.loads, baseline.rates, baseline.speeds)):
        is_least = bool(rate < ours.rates[0])
        own = float(ours.speeds[0]) if is_least else ours.speed_at(rate)
        found.append(
            {
                "load": int(load),
                "tokens_per_second": float(rate),
                "ratio": None if own is None else own / float(speed),
                "is_least": is_least,
                "collapsed": baseline.is_saturated(index),
            }
        )
    return found


def at_matched_speed(ours: Curve, baseline: Curve) -> list[dict[str, Any]]:
    """For each load of ours how much more throughput it has than the baseline, at the speed of our requests there.

    `collapsed`: the baseline reaches that speed, if at all, only with hardly more than a single request, so that its
    throughput has collapsed. The ratio is `None` where it never has that speed, above or below.
    """
    found = []
    for load, rate, speed in zip(ours.loads, ours.rates, ours.speeds):
        other = baseline.rate_at(speed)
        found.append(
            {
                "load": int(load),
                "speed_per_request": float(speed),
                "ratio": None if other is None else float(rate) / other,
                "collapsed": bool(speed > NEAR_ALONE * baseline.speeds[0]),
            }
        )
    return found


def mean_ratio(ratios: Sequence[Mapping[str, Any]]) -> float | None:
    """Geometric mean of the ratios that exist where the baseline has not collapsed."""
    known = [entry["ratio"] for entry in ratios if entry["ratio"] is not None and not entry["collapsed"]]
    return statistics.geometric_mean(known) if known else None
