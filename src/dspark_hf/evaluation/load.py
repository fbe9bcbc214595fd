"""Decoding under load: so many requests are active at any time, and when one ends the next one joins."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.engine import SpeculativeEngine
from ..generation.schedulers import Scheduler
from ..models import Drafter

_SHARES = (0.5, 1.25, 0.75, 1.5, 1.0)
"""Lengths of requests after one another, as shares of their mean, so that they do not end together."""


@dataclass(frozen=True)
class LoadFigures:
    """What decoding under load gave.

    Attributes:
        tokens_per_second: of all requests together.
        accepted_length: tokens per round and request, bonus token included.
        budget: drafted tokens verified per round and request.
    """

    tokens_per_second: float
    accepted_length: float
    budget: float


def measure_load(
    target: PreTrainedModel,
    drafter: Drafter,
    scheduler: Scheduler,
    prompts: Iterable[torch.Tensor],
    load: int,
    *,
    mean_tokens: int,
    total_tokens: int,
    num_draft_tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> LoadFigures:
    """Decodes with `load` requests at once, and measures from when they are active to `total_tokens` later.

    Args:
        target: the target.
        drafter: its drafter.
        scheduler: decides how much is verified; it keeps what it learns, as on a server.
        prompts: `(1, length)` each, taken in turns.
        load: requests at once.
        mean_tokens: tokens that a request writes, on average: from half as many to half more.
        total_tokens: tokens of all requests together.
        num_draft_tokens: most tokens drafted in a round; whole blocks if unset.
        seed: of sampling.
        options: further options of `generate` for every request.

    Raises:
        ValueError: if there is no prompt, or a number is not positive.
    """
    for name, value in (("load", load), ("mean_tokens", mean_tokens), ("total_tokens", total_tokens)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    prompts = list(prompts)
    if not prompts:
        raise ValueError("`prompts` is empty; give at least one.")
    source = itertools.cycle(prompts)
    lengths = itertools.cycle([max(1, int(share * mean_tokens)) for share in _SHARES])
    block = drafter.config.block_size if num_draft_tokens is None else num_draft_tokens
    # A request ends when it has its length, and at nothing before.
    options |= {"eos_token_id": None, "dspark_scheduler": scheduler, "dspark_num_draft_tokens": block}
    torch.manual_seed(seed)
    with SpeculativeEngine(target, drafter, max_batch=load, max_queue=load, threaded=False, **options) as engine:
        requests = [engine.submit(next(source), max_new_tokens=next(lengths)) for _ in range(load)]
        engine.step()
        before, start = _totals(engine), time.perf_counter()
        while engine.stats.total("emitted") - before["emitted"] < total_tokens:
            requests = [request for request in requests if not request.done]
            while len(requests) < load:
                requests.append(engine.submit(next(source), max_new_tokens=next(lengths)))
            engine.step()
        seconds = time.perf_counter() - start
        counts = {name: total - before[name] for name, total in _totals(engine).items()}
        engine.close(cancel=True)
    return LoadFigures(
        tokens_per_second=counts["emitted"] / seconds,
        accepted_length=counts["emitted"] / counts["rows"],
        budget=counts["verified"] / counts["rows"],
    )


def _totals(engine: SpeculativeEngine) -> dict[str, float]:
    return {name: engine.stats.total(name) for name in ("emitted", "rows", "verified")}


__all__ = ["LoadFigures", "measure_load"]
