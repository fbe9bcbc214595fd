"""The scheduler of one decoding loop: whether a round drafts, and how much of each draft it verifies.

`scheduling.py` has the rules, as functions of numbers; a scheduler here applies one of them round after round. All of
them decide before a draft whether there is one, and about a drafted token by what was known before it was drawn, so
the output's law is the target's whatever they choose.

Rows are padded to the longest proposal, so a verification of R rows costs `R * (1 + longest)` tokens. Verifying a
*column*, the k-th drafted token of every row, is therefore what `Hardware` decides on.

Shape symbols: `R` rows of the round, `k` drafted tokens of each.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.utils import logging

from ..models import Drafter
from .capacity import CapacityProfile, find_profile
from .drafting import GoesOn
from .scheduling import (
    CapacityCurve,
    DraftingGate,
    Floats,
    History,
    Lengths,
    Outlook,
    Promise,
    expected_tokens,
    is_column_worth,
    schedule_columns,
    schedule_early_stop,
    survival,
    top_k,
)

logger = logging.get_logger(__name__)

# A context length stands for all within this many tokens, so that curves need not be made anew each round.
CONTEXT_STEP = 64


class Scheduler:
    """Drafts in every round and verifies all of it; the base of the others.

    Attributes:
        needs_confidences: whether `lengths` looks at confidences.
    """

    needs_confidences = False

    def wants_draft(self, rows: Sequence[int], context: int) -> bool:
        """Whether the next round drafts; `rows` are the ids of its rows, `context` the longest text among them."""
        return True

    def goes_on(self, rows: Sequence[int], context: int) -> GoesOn | None:
        """What says during a draft whether to draft a further token; `None` for all. Where it is not asked all are.

        Without a confidence head it is asked only if `needs_confidences`.
        """
        return None

    def lengths(self, rows: Sequence[int], context: int, confidences: Any, limits: Sequence[int]) -> list[int]:
        """Tokens of each row's draft to verify.

        Args:
            rows: ids of the rows.
            context: length of the longest text.
            confidences: `(R, k)`, or `None` without `needs_confidences`.
            limits: `(R,)`, how many could be kept at all.
        """
        return list(limits)

    def record(
        self,
        rows: Sequence[int],
        context: int,
        drafted: int,
        lengths: Sequence[int],
        survived: Sequence[int],
        emitted: int,
    ) -> None:
        """Takes what came of a round.

        Args:
            rows: ids of the rows.
            context: length of the longest text.
            drafted: drafted tokens per row, 0 in a round without a draft.
            lengths: verified drafted tokens of each row.
            survived: how many of these verification accepted.
            emitted: new tokens of all rows.
        """


class Plain(Scheduler):
    """Never drafts: plain decoding in this package's loop, to measure against."""

    def wants_draft(self, rows: Sequence[int], context: int) -> bool:
        return False


@dataclass
class Fixed(Scheduler):
    """Verifies a fixed number of tokens of each draft.

    Attributes:
        length: most tokens of a row's draft.
    """

    length: int

    def lengths(self, rows: Sequence[int], context: int, confidences: Any, limits: Sequence[int]) -> list[int]:
        return [min(self.length, limit) for limit in limits]


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of rounds of so many rows, at about one length of context.

    Attributes:
        verify: of verifying 0, 1, 2, ... drafted tokens of each row; never falls, as measured times may by chance.
        draft: of drafting 0, 1, 2, ... tokens per row, beside the verification.
        rest: of everything else.
    """

    verify: list[float]
    draft: list[float]
    rest: float

    @property
    def plain(self) -> float:
        """Of a round of plain decoding."""
        return self.verify[0] + self.rest


@dataclass
class _Profiled(Scheduler):
    """A scheduler that knows what rounds cost, and skips drafts while they do not pay.

    Attributes:
        profile: costs of verifying and drafting on this device.
        gate: says whether drafting pays.
        promise: says what confidences are worth.
    """

    profile: CapacityProfile
    gate: DraftingGate = field(default_factory=DraftingGate)
    promise: Promise = field(default_factory=Promise)
    needs_confidences = True

    def __post_init__(self) -> None:
        self._curves: dict[tuple[int, int], CapacityCurve] = {}
        self._costs: dict[tuple[int, int, int], RoundCosts] = {}
        self._promised = 0.0

    def curve(self, rows: int, context: int) -> CapacityCurve:
        """Seconds of verifications of so many rows, by tokens in all."""
        key = (rows, context // CONTEXT_STEP)
        if key not in self._curves:
            self._curves[key] = self.profile.curve(rows, key[1] * CONTEXT_STEP)
        return self._curves[key]

    def costs(self, rows: int, context: int, columns: int) -> RoundCosts:
        """What rounds with up to so many drafted tokens per row take."""
        key = (rows, context // CONTEXT_STEP, columns)
        if key not in self._costs:
            tokens = rows * np.arange(1, columns + 2)
            verify = np.maximum.accumulate(self.curve(rows, context).seconds_for(tokens))
            near = key[1] * CONTEXT_STEP
            draft = [self.profile.draft_seconds(rows, near, count) for count in range(columns + 1)]
            self._costs[key] = RoundCosts(verify.tolist(), draft, self.profile.plain_seconds(rows, near))
        return self._costs[key]

    def wants_draft(self, rows: Sequence[int], context: int) -> bool:
        return self.gate.is_open

    def lengths(self, rows: Sequence[int], context: int, confidences: Any, limits: Sequence[int]) -> list[int]:
        survivals = survival(confidences, limits)
        lengths: list[int] = self._choose(rows, context, confidences, survivals).tolist()
        self._promised = expected_tokens(survivals, lengths) - len(lengths)
        return lengths

    def _choose(self, rows: Sequence[int], context: int, confidences: Any, survivals: Floats) -> Lengths:
        """`(R,)`: tokens of each row to verify."""
        raise NotImplementedError

    def record(
        self,
        rows: Sequence[int],
        context: int,
        drafted: int,
        lengths: Sequence[int],
        survived: Sequence[int],
        emitted: int,
    ) -> None:
        count, longest = len(rows), max(lengths)
        if not drafted:
            self.promise.record(0, 0)
            self.gate.record_plain()
            self._remember(1.0, 1.0)
            return
        self._learn(lengths, survived)
        self.promise.record(self._promised, max(0, emitted - count))
        tokens = count + self.promise.share * self._promised
        costs = self.costs(count, context, max(drafted, longest))
        seconds, plain_seconds = costs.draft[drafted] + costs.verify[longest] + costs.rest, costs.plain
        self.gate.record_drafted(tokens, count, seconds, plain_seconds)
        self._remember(tokens / count, seconds / plain_seconds)

    def _learn(self, lengths: Sequence[int], survived: Sequence[int]) -> None:
        """Takes what became of the tokens that a round with a draft verified, see `record`."""

    def _remember(self, brought: float, took: float) -> None:
        """Takes what a round brought and took, in rounds of plain decoding."""


class Steering:
    """Follows a draft as it is made, and ends it where no further token is worth drafting and verifying.

    Confidences take time as well, so columns that are worth their price on average are drafted and verified unasked;
    the first of the others is where they begin to count, those of the columns before it included.

    Args:
        rows: rows of the draft.
        prices: of verifying each column, in tokens.
        step: of drafting one.
        shares: of a column's tokens, those that survive in the next; see `is_column_worth`.
    """

    def __init__(self, rows: int, prices: list[float], step: float, shares: list[float]) -> None:
        self.survivals = [1.0] * rows
        # The first token is drafted in any case.
        self.prices = [prices[0], *(price + step for price in prices[1:])]
        self.shares = shares
        # Tokens that are expected to survive in each column, before anything is known of this draft.
        self.expected = [rows * alive for alive in itertools.accumulate(shares, operator.mul)]
        self.sure = next(
            (column for column, alive in enumerate(self.expected) if not self._is_worth(column, alive)), len(shares)
        )
        # Survivals of every column that was asked about, of which the last may not be drafted.
        self.columns: list[list[float]] = []
        self.is_worth_verifying = True

    def _is_worth(self, column: int, alive: float) -> bool:
        return is_column_worth(alive, self.prices[column:], self.shares[column:])

    def __call__(self, confidences: list[list[float]]) -> bool:
        """Whether to draft the next column, given, in each row, confidences of it and of those not known before."""
        for each in confidences:
            self.survivals = [before * own for before, own in zip(self.survivals, each, strict=True)]
            self.columns.append(self.survivals)
        column = len(self.columns) - 1
        is_worth = self._is_worth(column, sum(self.survivals))
        if column == 0:
            self.is_worth_verifying = is_worth
        return is_worth

    def promised(self, lengths: Sequence[int]) -> float:
        """Tokens that are expected to survive of `lengths` in each row."""
        if self.columns:
            return sum(survivals[row] for row, length in enumerate(lengths) for survivals in self.columns[:length])
        return sum(sum(self.expected[:length]) for length in lengths) / len(lengths)


@dataclass
class Hardware(_Profiled):
    """Verifies a column while it is expected to bring more tokens than its time is worth (`schedule_columns`).

    Drafting a token costs time as well, so a draft ends, too, where the next one would not be worth drafting and
    verifying (`Steering`); like the choice of columns, this looks at its confidence before it is drawn.

    What time is worth, tokens per second, is what the rounds before have brought, and at least what plain decoding
    brings; how many tokens survive further on is what they have shown. So both are fixed before a draft, like the
    budget of the asynchronous scheduler in section 5.2 of the paper, and a jagged curve cannot hold the choice at 0.

    Attributes:
        memory: share of the past that counts on from round to round.
        outlook: says what share of tokens survives from one column to the next.
    """

    memory: float = 0.9
    outlook: Outlook = field(default_factory=Outlook)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Rounds of plain decoding: what the rounds so far have brought, and what they took. It starts as if plain.
        self._brought = self._took = 1.0
        self._steering: Steering | None = None

    @property
    def speed(self) -> float:
        """Tokens per second of late, in those of plain decoding; at least 1."""
        return max(1.0, self._brought / self._took)

    def goes_on(self, rows: Sequence[int], context: int) -> GoesOn | None:
        counts = self.profile.draft_counts
        if len(counts) == 1:
            return None
        columns = counts[-1]
        drafting = self.costs(len(rows), context, columns).draft
        # Tokens of plain decoding in the time that drafting one more takes.
        step = max(0.0, drafting[-1] - drafting[1]) / (columns - 1) * self._plain_rate(len(rows), context, columns)
        prices = [self.speed * cost for cost in self._column_costs(len(rows), context, columns)]
        self._steering = Steering(len(rows), prices, self.speed * step, self.outlook.shares(columns))
        return self._steering

    def lengths(self, rows: Sequence[int], context: int, confidences: Any, limits: Sequence[int]) -> list[int]:
        if self._steering is None:
            return super().lengths(rows, context, confidences, limits)
        # The draft has ended where it should: its columns are worth verifying.
        steering, self._steering = self._steering, None
        lengths = list(limits) if steering.is_worth_verifying else [0] * len(rows)
        self._promised = steering.promised(lengths)
        return lengths

    def _choose(self, rows: Sequence[int], context: int, confidences: Any, survivals: Floats) -> Lengths:
        columns = survivals.shape[1]
        costs = self._column_costs(len(rows), context, columns)
        return schedule_columns(survivals, costs, self.speed, self.outlook.shares(columns))

    def _column_costs(self, rows: int, context: int, columns: int) -> list[float]:
        """For each column what verifying it costs, in the tokens that plain decoding writes in that time."""
        seconds = self.costs(rows, context, columns).verify
        rate = self._plain_rate(rows, context, columns)
        return [rate * (after - before) for before, after in zip(seconds, seconds[1:], strict=False)]

    def _plain_rate(self, rows: int, context: int, columns: int) -> float:
        """Tokens per second of plain decoding, over all rows."""
        return rows / self.costs(rows, context, columns).plain

    def _learn(self, lengths: Sequence[int], survived: Sequence[int]) -> None:
        self.outlook.record(lengths, survived)

    def _remember(self, brought: float, took: float) -> None:
        self._brought = self.memory * self._brought + brought
        self._took = self.memory * self._took + took


@dataclass
class EarlyStop(_Profiled):
    """Algorithm 1 of the paper, which counts tokens as if rows were not padded."""

    def _choose(self, rows: Sequence[int], context: int, confidences: Any, survivals: Floats) -> Lengths:
        count, drafted = survivals.shape
        costs = self.costs(count, context, drafted)
        return schedule_early_stop(survivals, self.curve(count, context), costs.draft[-1] + costs.rest)


@dataclass
class Asynchronous(_Profiled):
    """The asynchronous variant of section 5.2: a budget from the confidences of two rounds before, and its top K."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._history: History | None = None

    def wants_draft(self, rows: Sequence[int], context: int) -> bool:
        if self._history is not None and not self.gate.is_open:
            self._history.clear()
        return self.gate.is_open

    def _choose(self, rows: Sequence[int], context: int, confidences: Any, survivals: Floats) -> Lengths:
        count, drafted = survivals.shape
        if self._history is None:
            self._history = History(self.curve(count, context), warmup=drafted)
        self._history.curve = self.curve(count, context)
        costs = self.costs(count, context, drafted)
        self._history.draft_seconds = costs.draft[-1] + costs.rest
        # The history holds earlier rounds only: this draft is recorded after its budget is known.
        budget = self._history.budget(rows)
        self._history.record(rows, confidences)
        return top_k(survivals, budget)


SCHEDULERS: dict[str, type[_Profiled]] = {
    "hardware": Hardware,
    "early_stop": EarlyStop,
    "asynchronous": Asynchronous,
}
"""Schedulers that need a capacity profile and calibrated confidences, by the name that `dspark_scheduler` takes."""

SCHEDULER_NAMES = ("auto", *SCHEDULERS, "none")


def resolve_scheduler(choice: Any, target: PreTrainedModel, drafter: Drafter, limited: bool) -> Scheduler:
    """The scheduler that `dspark_scheduler` names.

    `auto` is `hardware` where it can be: for a calibrated drafter, with a profile of this target and drafter on this
    device (`dspark calibrate`, `dspark profile`), unless the call says itself how much to verify (`limited`, by a
    threshold or a budget). Elsewhere everything that is drafted is verified. So it is, too, for drafters without a
    confidence head, as recurrent ones are (EAGLE-3, MTP): the schedulers with a name need calibrated confidences.

    Raises:
        ValueError: for an unknown name, or a scheduler that lacks what it needs.
        TypeError: for what is neither a name nor a `Scheduler`.
    """
    if isinstance(choice, Scheduler):
        return choice
    if choice is not None and not isinstance(choice, str):
        raise TypeError(f"`dspark_scheduler` is {choice!r}; give one of {list(SCHEDULER_NAMES)}, or a `Scheduler`.")
    name = "auto" if choice is None else choice
    if name not in SCHEDULER_NAMES:
        raise ValueError(f"`dspark_scheduler` is {name!r}; give one of {list(SCHEDULER_NAMES)}, or a `Scheduler`.")
    if name == "none" or (name == "auto" and (limited or not drafter.is_calibrated)):
        return Scheduler()
    if drafter.confidence_head is None:
        raise ValueError(
            f"`dspark_scheduler` is {name!r}, but this drafter has no confidence head; give `dspark_num_draft_tokens` "
            "or `dspark_verify_budget` instead."
        )
    try:
        profile = find_profile(target, drafter)
    except (OSError, ValueError) as error:
        if name != "auto":
            raise
        logger.warning_once(f"Every drafted token is verified, as the capacity profile cannot be used: {error}")
        profile = None
    if profile is None or profile.draft is None:
        if name == "auto":
            return Scheduler()
        raise ValueError(
            f"`dspark_scheduler` is {name!r}, but what this target and drafter cost on this device, in this dtype and "
            "with this attention implementation and number of threads, has not been measured. Run `dspark profile "
            "--target ... --drafter ...`, or save a profile of `dspark_hf.generation.capacity.measure_capacity`."
        )
    return SCHEDULERS["hardware" if name == "auto" else name](profile)


__all__ = [
    "SCHEDULERS",
    "SCHEDULER_NAMES",
    "Asynchronous",
    "EarlyStop",
    "Fixed",
    "Hardware",
    "Plain",
    "Scheduler",
    "resolve_scheduler",
]
