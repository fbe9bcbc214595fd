"""Decoding under load: so many requests are active at any time, and when one ends the next one joins."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.engine import SpeculativeEngine
from ..generation.schedulers import Scheduler
from ..models import Drafter

_SHARES = (0.5, 1.25, 0.75, 1.5, 1.0)
"""Lengths of requests after one another, as shares of their mean, so that they do not end together."""

_TURN_TOKENS = 64
_TURN_TOKENS_PER_REQUEST = 8
"""A turn is short, so that policies which take turns see the machine in the same state, and has several rounds."""


@dataclass(frozen=True)
class LoadFigures:
    """What decoding under load gave.

    Attributes:
        seconds: that it took.
        emitted: tokens of all requests together.
        rows: rounds, counted once for each request in them.
        verified: drafted tokens that were verified.
    """

    seconds: float = 0.0
    emitted: int = 0
    rows: int = 0
    verified: int = 0

    def __add__(self, other: LoadFigures) -> LoadFigures:
        return LoadFigures(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.emitted / self.seconds

    @property
    def accepted_length(self) -> float:
        """Tokens per round and request, bonus token included."""
        return self.emitted / self.rows

    @property
    def budget(self) -> float:
        """Drafted tokens verified per round and request."""
        return self.verified / self.rows


class LoadedEngine:
    """An engine with `load` requests at once, which decodes when it is told to.

    Args:
        target: the target.
        drafter: its drafter.
        scheduler: decides how much is verified; it keeps what it learns, as on a server.
        prompts: `(1, length)` each, taken in turns.
        load: requests at once.
        mean_tokens: tokens that a request writes, on average: from half as many to half more.
        num_draft_tokens: most tokens drafted in a round; whole blocks if unset.
        options: further options of `generate` for every request.

    Raises:
        ValueError: if there is no prompt, or a number is not positive.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        scheduler: Scheduler,
        prompts: Iterable[torch.Tensor],
        load: int,
        *,
        mean_tokens: int,
        num_draft_tokens: int | None = None,
        **options: Any,
    ) -> None:
        _check_positive(load=load, mean_tokens=mean_tokens)
        prompts = list(prompts)
        if not prompts:
            raise ValueError("`prompts` is empty; give at least one.")
        self.load = load
        self._prompts = itertools.cycle(prompts)
        self._lengths = itertools.cycle([max(1, int(share * mean_tokens)) for share in _SHARES])
        block = drafter.config.block_size if num_draft_tokens is None else num_draft_tokens
        # A request ends when it has its length, and at nothing before.
        options |= {"eos_token_id": None, "dspark_scheduler": scheduler, "dspark_num_draft_tokens": block}
        self._engine = SpeculativeEngine(target, drafter, max_batch=load, max_queue=load, threaded=False, **options)
        self._requests: list[Any] = []
        self._step()

    def decode(self, tokens: int) -> LoadFigures:
        """Decodes until there are so many further tokens, over all requests, or a few more."""
        before, start = self._totals(), time.perf_counter()
        while self._totals().emitted - before.emitted < tokens:
            self._step()
        seconds, after = time.perf_counter() - start, self._totals()
        return LoadFigures(
            seconds, after.emitted - before.emitted, after.rows - before.rows, after.verified - before.verified
        )

    def close(self) -> None:
        """Cancels what is being decoded."""
        self._engine.close(cancel=True)

    def _step(self) -> None:
        self._requests = [request for request in self._requests if not request.done]
        while len(self._requests) < self.load:
            self._requests.append(self._engine.submit(next(self._prompts), max_new_tokens=next(self._lengths)))
        self._engine.step()

    def _totals(self) -> LoadFigures:
        stats = self._engine.stats
        return LoadFigures(0.0, stats.total("emitted"), stats.total("rows"), stats.total("verified"))


def take_turns(engines: Mapping[str, LoadedEngine], total_tokens: int, seed: int = 0) -> dict[str, LoadFigures]:
    """Lets engines decode in short turns, in another order each time, so that a drift of the machine favours none.

    Args:
        engines: by name.
        total_tokens: what each decodes, at least.
        seed: of the orders and of sampling.

    Raises:
        ValueError: if there is no engine, or `total_tokens` is not positive.
    """
    _check_positive(total_tokens=total_tokens)
    if not engines:
        raise ValueError("`engines` is empty; give at least one.")
    torch.manual_seed(seed)
    rng = random.Random(seed)
    load = max(engine.load for engine in engines.values())
    turn = min(total_tokens, max(_TURN_TOKENS, _TURN_TOKENS_PER_REQUEST * load))
    figures = dict.fromkeys(engines, LoadFigures())
    for _ in range(math.ceil(total_tokens / turn)):
        for name in rng.sample(list(engines), len(engines)):
            figures[name] += engines[name].decode(turn)
    return figures


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")


__all__ = ["LoadFigures", "LoadedEngine", "take_turns"]
