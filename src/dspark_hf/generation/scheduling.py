"""Which drafted tokens are verified: the hardware-aware prefix scheduler and simpler ways to cut a batch's proposals.

Verifying a token costs time, and a token that will be rejected costs it for nothing. A confidence head says how likely
each drafted token is to survive, a capacity curve what a verification of so many tokens takes, and the functions here
choose how many tokens of each request's proposal to verify (DSpark paper, section 4, Algorithm 1; its asynchronous
variant, section 5.2). They know nothing of models.

**Why the output's law stays the target's.** The acceptance rule is exact for proposals whose length was fixed before
their tokens were drawn, and also where the length is found on the way, as long as whether `x_k` is verified is never
decided with `x_k` in view: choices must be *non-anticipating*. A token's confidence, hence its survival, depends on
the tokens before it alone, and a later position of a request never ranks before an earlier one. So each function
that cuts a current draft (`schedule_early_stop`, `top_k`, `static_threshold`) decides on `x_k` from `x_<k` and from
other requests' tokens that it has decided on before. This holds under conditions that callers must keep:

- A budget is fixed before the current draft is drawn, also while a history is warming up (`History`).
- Ties are broken by position: the order is `(-survival, position, request)`. Sigmoids saturate at 1 in float32, so
  ties are common, and an order that may put a later token first would leak.
- What is not verified is thrown away. A discarded draft is never proposed again.
- No score looks at `q(x_k)` of the drafted token itself. Without a confidence head, take the entropy or the largest
  probability of the draft distribution.
- A proposal is cut after a drafted end of sequence, never before it. `survival(..., lengths)` does so.
- Measured times (the curve, `draft_seconds`) come from before the current draft.

Requests are coupled: the realisation of a sampled one may depend on its neighbours, its law does not. Greedy output
does not change at all.

Shape symbols: `R` requests, `γ` drafted tokens of each. Arrays of confidences may be nested lists, NumPy arrays or
tensors.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class CapacityCurve:
    """Seconds that the target takes for a verification of B tokens, over all requests together.

    Between measured sizes the seconds are interpolated linearly, so a convex curve stays convex. Below the smallest
    they are those of the smallest. Above the largest they go on along the last segment, or stay as they are where
    that falls or where only one size was measured; `flat_end` keeps them in any case. The curve may be jagged: on a
    CPU, two tokens often take nearly twice as long as one, and the next ones are almost free.

    Attributes:
        tokens: measured sizes, increasing, at least 1.
        seconds: time of one verification of each size.
        flat_end: whether sizes above the largest take as long as it.
    """

    tokens: Sequence[int]
    seconds: Sequence[float]
    flat_end: bool = False
    _sizes: Floats = field(init=False, repr=False, compare=False)
    _seconds: Floats = field(init=False, repr=False, compare=False)
    _table: Floats = field(default_factory=lambda: np.zeros(0), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes, seconds = np.asarray(self.tokens, np.float64), np.asarray(self.seconds, np.float64)
        if sizes.ndim != 1 or sizes.size == 0 or sizes.shape != seconds.shape:
            raise ValueError(
                f"A capacity curve needs as many times as sizes, and at least one; got {sizes.shape} sizes and "
                f"{seconds.shape} times."
            )
        if not (np.isfinite(sizes).all() and sizes[0] >= 1 and (np.diff(sizes) > 0).all()):
            raise ValueError(f"The sizes of a capacity curve increase from at least 1; got {list(self.tokens)}.")
        if not (np.isfinite(seconds).all() and (seconds > 0).all()):
            raise ValueError(f"The times of a capacity curve are positive and finite; got {list(self.seconds)}.")
        object.__setattr__(self, "_sizes", sizes)
        object.__setattr__(self, "_seconds", seconds)

    @classmethod
    def from_steps_per_second(
        cls, tokens: Sequence[int], steps_per_second: Sequence[float], flat_end: bool = False
    ) -> CapacityCurve:
        """The curve from `SPS(B)` as in Algorithm 1."""
        rates = np.asarray(steps_per_second, np.float64)
        if not (np.isfinite(rates).all() and (rates > 0).all()):
            raise ValueError(f"Steps per second are positive and finite; got {list(steps_per_second)}.")
        return cls(tokens, (1 / rates).tolist(), flat_end)

    def seconds_for(self, sizes: Any) -> Floats:
        """Seconds of verifications of `sizes` tokens, of any shape."""
        sizes = np.asarray(sizes, np.float64)
        return np.interp(sizes, self._sizes, self._seconds) + self._end_slope * np.maximum(sizes - self._sizes[-1], 0)

    def seconds_between(self, first: int, last: int) -> Floats:
        """Seconds of verifications of `first` to `last` tokens, both included; remembered from call to call."""
        if len(self._table) <= last:
            object.__setattr__(self, "_table", self.seconds_for(np.arange(2 * last + 1)))
        return self._table[first : last + 1]

    def steps_per_second(self, sizes: Any) -> Floats:
        """`SPS(B)` for `sizes` of any shape."""
        return 1 / self.seconds_for(sizes)

    @property
    def _end_slope(self) -> float:
        if self.flat_end or len(self._sizes) == 1:
            return 0.0
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        return max(0.0, float(slope))


def survival(confidences: Any, lengths: Any | None = None) -> Floats:
    """Probability that a token and all before it are kept: `a_{r,j} = Π_{i≤j} c_{r,i}`.

    Args:
        confidences: `(R, γ)`, probability of each token to be kept given that those before it are (equation 7).
        lengths: `(R,)`, how many tokens of each request could be kept at all; what follows gets survival 0, which is
            never verified. A length may end *after* a drafted end of sequence and where the text has no more room.

    Returns:
        `(R, γ)`, never increasing along a row.
    """
    confidences = _probabilities(confidences, "confidences")
    products = np.cumprod(confidences, axis=1)
    if lengths is None:
        return products
    counts = np.asarray(lengths)
    if counts.shape != confidences.shape[:1]:
        raise ValueError(f"`lengths` has shape {counts.shape}; give one for each of {len(confidences)} requests.")
    return np.where(np.arange(confidences.shape[1]) < counts[:, None], products, 0.0)


def everything(survivals: Any) -> Lengths:
    """Without a schedule: every token that could be kept. Shapes as for `top_k`."""
    return np.count_nonzero(_survivals(survivals), axis=1).astype(np.int64)


def static_threshold(confidences: Any, threshold: float) -> Lengths:
    """Cuts each proposal at its first token whose confidence is below `threshold`; 0 never cuts.

    Lossless, as the decision on `x_k` takes `c_1..c_k` of its own request, which depend on `x_<k`. Combines with a
    budget: `top_k(survival(confidences, static_threshold(confidences, threshold)), budget)`.

    Args:
        confidences: `(R, γ)`.
        threshold: a probability.

    Returns:
        `(R,)`, tokens of each request to verify.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"The confidence threshold is {threshold}; it is a probability, from 0 to 1.")
    confident = _probabilities(confidences, "confidences") >= threshold
    return np.logical_and.accumulate(confident, axis=1).sum(axis=1, dtype=np.int64)


def top_k(survivals: Any, budget: int) -> Lengths:
    """Verifies at most `budget` drafted tokens over all requests, those likeliest to survive first.

    With a constant budget this is a plain limit per round; with the budget of a `History` it is the asynchronous
    scheduler of section 5.2. Lossless under the conditions at the top of this module: reveal candidates in descending
    survival; `a_{r,k}` uses `x_{r,<k}`, later positions of r rank no higher, so whether (r, k) is among the first
    `budget` never depends on `x_{r,k}`. That needs a budget which does not depend on this draft.

    Args:
        survivals: `(R, γ)`, from `survival`.
        budget: fixed before this draft was drawn.

    Returns:
        `(R,)`, tokens of each request to verify.
    """
    survivals = _survivals(survivals)
    budget = operator.index(budget)
    if budget < 0:
        raise ValueError(f"The budget is {budget}; it is a number of tokens, at least 0.")
    _, requests = _ranked(survivals)
    return _counts(requests[:budget], len(survivals))


def schedule_columns(survivals: Any, costs: Any, speed: float, outlook: Any | None = None) -> Lengths:
    """Verifies columns, the k-th drafted tokens of all requests, while that is worth its time.

    For verifications that pad every request to the longest, so that time is bought by the column. A column is worth
    the tokens that are expected to survive in it, and its time the tokens that other rounds write in it: the choice
    with the most tokens per second in the long run is the one that gains most over that rate in each round. Column by
    column the search goes on while `is_column_worth`.

    Lossless: whether column k is verified is decided by survivals of the columns up to it, which depend on the tokens
    before it alone, and by numbers from before the draft.

    Args:
        survivals: `(R, γ)`, from `survival`.
        costs: `(γ,)`, the time of each further column, as tokens of plain decoding over all requests.
        speed: what the rounds before this one have brought, in tokens of plain decoding in the same time.
        outlook: `(γ,)`, the share of a column's tokens that survive if those of the column before it did, as rounds
            before this one had it; entry 0 does not count. Without it no column counts on those after it.

    Returns:
        `(R,)`, tokens of each request to verify.
    """
    survivals = _survivals(survivals)
    costs = np.asarray(costs, np.float64)
    shares = np.zeros_like(costs) if outlook is None else np.asarray(outlook, np.float64)
    if not costs.shape == shares.shape == survivals.shape[1:]:
        raise ValueError(
            f"`costs` and `outlook` have shapes {costs.shape} and {shares.shape}; give one entry for each of "
            f"{survivals.shape[1]} columns."
        )
    if not 0 < speed < math.inf:
        raise ValueError(f"`speed` is {speed}; it is a ratio, above 0.")
    prices, ratios = (speed * costs).tolist(), shares.tolist()
    columns = survivals.sum(axis=0).tolist()
    longest = next(
        (k for k, alive in enumerate(columns) if not is_column_worth(alive, prices[k:], ratios[k:])), len(columns)
    )
    return np.minimum(np.count_nonzero(survivals, axis=1), longest)


def is_column_worth(alive: float, prices: Sequence[float], shares: Sequence[float]) -> bool:
    """Whether a column, with any number of those after it, is expected to bring more than its price.

    The columns after it count, as a first column that is dear may open the way to cheap ones: on many machines two
    tokens take much longer than one, and eight hardly longer than two.

    Args:
        alive: expected tokens of the column over all requests.
        prices: of the column and those after it, in tokens.
        shares: of a column's tokens, those that survive in the next; the first entry does not count.
    """
    gain = alive - prices[0]
    for price, share in zip(prices[1:], shares[1:], strict=True):
        if gain > 0:
            break
        alive *= share
        gain += alive - price
    return gain > 0


def schedule_early_stop(survivals: Any, curve: CapacityCurve, draft_seconds: float = 0.0) -> Lengths:
    """Algorithm 1: admits tokens while that raises the expected tokens per second.

    Starts from plain decoding's batch of `B = R` tokens with `τ = R` expected ones. Candidates are visited in
    descending survival, ties by position and then request; admitting one adds 1 to B and its survival to τ, and is
    kept while `Θ = τ / (draft_seconds + seconds(B))` strictly rises. The first that does not raise it ends the search.

    Lossless, with any curve measured before: the decision on (r, k) takes survivals of tokens admitted before it and
    its own, none of which depends on `x_{r,k}`. It is the early stop that keeps it so; a search that goes on looks at
    survivals after `x_{r,k}` to decide on it (appendix A). Where `seconds` is convex and does not fall, the early stop
    finds the best of all choices; on a jagged curve it stops too early, often at 0, and `History` is the better way.

    Args:
        survivals: `(R, γ)`, from `survival`.
        curve: the target's capacity.
        draft_seconds: `T_draft` of equation 1, which Algorithm 1 leaves out; the draft has been paid for, but a round
            with it must bring more. From earlier rounds, not from this draft.

    Returns:
        `(R,)`, tokens of each request to verify.
    """
    survivals = _survivals(survivals)
    ranked, requests = _ranked(survivals)
    rates = _rates(ranked, len(survivals), curve, draft_seconds)
    falls = np.flatnonzero(rates[1:] <= rates[:-1])
    admitted = falls[0] if falls.size else len(ranked)
    return _counts(requests[:admitted], len(survivals))


def global_budget(survivals: Any, curve: CapacityCurve, draft_seconds: float = 0.0) -> int:
    """The number K of drafted tokens with the highest expected tokens per second, wherever on the curve (section 5.2).

    The least K where several are best. **The survivals must be those of earlier rounds.** To cut the draft that they
    come from would bias the output: whether a token is verified would depend on survivals after it, which it decides
    (appendix A of the paper: a token of probability 0.7 comes out with 0.85).

    Args:
        survivals: `(R, γ)`, of an earlier round.
        curve: the target's capacity; may be jagged.
        draft_seconds: `T_draft`, paid whatever K is.
    """
    return _best_budget(_survivals(survivals), curve, draft_seconds)


def worth_drafting(survivals: Any, curve: CapacityCurve, draft_seconds: float) -> bool:
    """Whether drafting and verifying at best beats plain decoding in expected tokens per second.

    With the survivals of earlier rounds, for which see `global_budget`. It trusts the confidences; `DraftingGate`
    goes by what was really kept, and knows when to try again.
    """
    survivals = _survivals(survivals)
    rows = len(survivals)
    if rows == 0:
        return False
    ranked, _ = _ranked(survivals)
    return bool(_rates(ranked, rows, curve, draft_seconds).max() > rows / curve.seconds_for(rows))


def expected_tokens(survivals: Any, lengths: Any) -> float:
    """Expected tokens τ of a round that verifies `lengths (R,)`, one of the target's own per request included."""
    survivals = _survivals(survivals)
    return len(survivals) + float(survivals[np.arange(survivals.shape[1]) < np.asarray(lengths)[:, None]].sum())


@dataclass
class History:
    """Confidences of the last two rounds with a draft, which give the budget of the next one (section 5.2).

    For each round: `budget(rows)`, then draft, then `top_k` under that budget, then `record`. The budget is the global
    search over the survivals from two rounds earlier, so that it is ready before the draft and nothing waits for it.
    Fewer than two rounds give `warmup` tokens per request.

    It stays non-anticipating because it is a function of earlier rounds and of which requests are active, which the
    text so far has decided. That holds where requests come and go as well: the search is made anew for the requests
    present, with the survivals that those had; requests that have left are not counted, and one that has none yet
    counts as the mean of those that have. It holds too where `record` comes before `budget`: the older of two rounds
    is never the current one.

    A budget of 0 does not stop drafts, else no confidences would come in any more. Leave that to a `DraftingGate`, and
    `clear` the history when it opens again, as what it holds is old.

    Attributes:
        curve: the target's capacity.
        warmup: drafted tokens to verify per request, on average, in rounds without a history.
        draft_seconds: `T_draft`; may be set between rounds.
    """

    curve: CapacityCurve
    warmup: int
    draft_seconds: float = 0.0
    _rounds: deque[tuple[dict[int, int], Floats]] = field(default_factory=lambda: deque(maxlen=2), repr=False)

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"`warmup` is {self.warmup}; it is a number of tokens per request, at least 0.")
        _check_seconds(self.draft_seconds)

    def budget(self, rows: Sequence[int]) -> int:
        """Drafted tokens that the next round may verify in all, with `rows` the ids of the requests in it."""
        past, survivals = self._rounds[0] if len(self._rounds) == 2 else ({}, np.zeros((0, 0)))
        known = [past[row] for row in rows if row in past]
        if not known:
            return self.warmup * len(rows)
        survivals = survivals[known]
        if len(known) < len(rows):
            mean = survivals.mean(axis=0, keepdims=True)
            survivals = np.concatenate([survivals, mean.repeat(len(rows) - len(known), axis=0)])
        return _best_budget(survivals, self.curve, self.draft_seconds)

    def record(self, rows: Sequence[int], confidences: Any) -> None:
        """Takes the confidences `(R, γ)` of a round's whole draft, also of what was not verified."""
        survivals = survival(confidences)
        index = {row: number for number, row in enumerate(rows)}
        if len(rows) != len(survivals) or len(index) != len(rows):
            raise ValueError(f"Rows {list(rows)} do not name the {len(survivals)} requests of `confidences`.")
        self._rounds.append((index, survivals))

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all requests but `rows`, so that their ids may be used for others."""
        kept = set(rows)
        for past, _ in self._rounds:
            for row in set(past) - kept:
                del past[row]

    def clear(self) -> None:
        """Starts anew: the next two rounds are warm-up."""
        self._rounds.clear()


@dataclass
class Promise:
    """What became of the tokens that confidences promised: an account that tells a drafter which is wrong from luck.

    Expected tokens vary much less than those that are kept, so a choice made by them is steadier; but they are worth
    only what the confidences are. `share` is the ratio of the two over the rounds so far, and 1 before the first.

    Attributes:
        prior: tokens that are taken to have been promised and kept before the first round.
        memory: share of the past that counts on from round to round.
    """

    prior: float = 1.0
    memory: float = 0.98
    _promised: float = field(default=0.0, init=False, repr=False)
    _kept: float = field(default=0.0, init=False, repr=False)

    @property
    def share(self) -> float:
        """Kept tokens per promised token."""
        return (self._kept + self.prior) / (self._promised + self.prior)

    def record(self, promised: float, kept: float) -> None:
        """After a round, in drafted tokens over all requests; a round without drafts has none of either."""
        if not (_is_amount(promised) and _is_amount(kept)):
            raise ValueError(f"Not a round: {promised} tokens promised and {kept} kept; give amounts, at least 0.")
        self._promised = self.memory * self._promised + promised
        self._kept = self.memory * self._kept + kept


@dataclass
class Outlook:
    """What share of a column's tokens survives, if those before them did, counted over the rounds so far.

    Counts, not confidences: known before a draft and for nothing.

    Attributes:
        first: the share before any round has shown one.
        weight: tokens that this is worth.
        memory: share of the past that counts on from round to round.
    """

    first: float = 0.7
    weight: float = 4.0
    memory: float = 0.98
    _tried: list[float] = field(default_factory=list, init=False, repr=False)
    _kept: list[float] = field(default_factory=list, init=False, repr=False)

    def shares(self, columns: int) -> list[float]:
        """The shares in the first `columns` columns."""
        shown = [kept / tried for kept, tried in zip(self._kept, self._tried, strict=True)]
        return (shown + [self.first] * columns)[:columns]

    def record(self, lengths: Sequence[int], survived: Sequence[int]) -> None:
        """After a round that verified `lengths` tokens of the requests, of which `survived` were kept."""
        reached = [min(length, kept + 1) for length, kept in zip(lengths, survived, strict=True)]
        for column in range(max(reached)):
            if column == len(self._tried):
                self._tried.append(self.weight)
                self._kept.append(self.first * self.weight)
            self._tried[column] = self.memory * self._tried[column] + sum(each > column for each in reached)
            self._kept[column] = self.memory * self._kept[column] + sum(each > column for each in survived)


@dataclass
class DraftingGate:
    """Skips drafts while they do not pay, and tries again now and then.

    It keeps an account in rounds of plain decoding: a round with a draft earns `tokens / requests` of them and spends
    `seconds / plain_seconds`, so the account falls where the expected tokens per second of drafting and verifying are
    below those of plain decoding. Drafting stops when it has lost more than the allowance. After a gap of plain
    rounds it is tried anew with a smaller allowance; each failure doubles the gap up to `max_gap`, and the gap is
    always so long that what the trial lost is at most `max_overhead` of it. Gains are kept up to `bank`, so that a
    drafter which has proved itself may fail for a while on what it has earned.

    A drafter that is always wrong therefore costs about the allowance once and `max_overhead` of the rest. All of it
    is known before the current draft, so skipping leaves the output's law alone. The target's states of skipped rounds
    must still reach the drafter's context.

    Attributes:
        allowance: what drafting may lose at the start, for one request; less by the root of their number for more.
        probe_allowance: what each later trial may lose, likewise.
        bank: most that the account holds.
        first_gap: rounds without drafts after the first failure.
        max_gap: longest gap, unless `max_overhead` asks for more.
        max_overhead: share of the time that trials may cost.
    """

    allowance: float = 1.5
    probe_allowance: float = 1.0
    bank: float = 12.0
    first_gap: int = 16
    max_gap: int = 256
    max_overhead: float = 0.02
    _balance: float = field(default=0.0, init=False, repr=False)
    _net: float = field(default=0.0, init=False, repr=False)
    _next_gap: int = field(default=0, init=False, repr=False)
    _wait: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        positive = (self.allowance, self.probe_allowance, self.bank, self.first_gap, self.max_gap, self.max_overhead)
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise ValueError(f"The numbers of a drafting gate are positive and finite; got {self}.")
        if self.first_gap > self.max_gap:
            raise ValueError(f"`first_gap` is {self.first_gap}, above `max_gap` {self.max_gap}.")

    @property
    def is_open(self) -> bool:
        """Whether the next round should draft."""
        return self._wait == 0

    def record_plain(self) -> None:
        """After a round without a draft."""
        self._wait = max(0, self._wait - 1)

    def record_drafted(self, tokens: float, requests: int, seconds: float, plain_seconds: float) -> None:
        """After a round with a draft.

        Args:
            tokens: what it brought over all requests, the target's own included; or `expected_tokens`, of which the
                drafted ones are multiplied with `Promise.share`. These vary less, so luck does not close the gate.
            requests: requests in it.
            seconds: time of drafting and verifying.
            plain_seconds: time of a plain round with as many requests, such as `curve.seconds_for(requests)`.
        """
        if not (_is_amount(tokens) and _is_amount(seconds) and requests > 0 and 0 < plain_seconds < math.inf):
            raise ValueError(
                f"Not a round: {tokens} tokens of {requests} requests in {seconds} seconds, plainly {plain_seconds}."
            )
        # A mean over many requests tells as much as many rounds of one.
        limit = (self.probe_allowance if self._next_gap else self.allowance) / math.sqrt(requests)
        gain = tokens / requests - seconds / plain_seconds
        self._net += gain
        self._balance = min(self.bank, self._balance + gain)
        if self._balance <= -limit:
            self._close()
        elif self._balance == self.bank and self._next_gap:
            self._next_gap = self.first_gap

    def _close(self) -> None:
        repaid = math.ceil(-self._net / self.max_overhead) if self._next_gap else 0
        gap = self._next_gap or self.first_gap
        self._wait = max(gap, repaid)
        self._next_gap = min(2 * gap, self.max_gap)
        self._balance = self._net = 0.0


def _ranked(survivals: Floats) -> tuple[Floats, Lengths]:
    """Survivals of all candidates in order of admission, and whose they are, both `(n,)`; without those of 0."""
    # Position by position and stable, so that ties go to the earlier position.
    by_position = survivals.T.ravel()
    order = np.argsort(-by_position, kind="stable")[: np.count_nonzero(by_position)]
    return by_position[order], order % max(1, len(survivals))


def _rates(ranked: Floats, requests: int, curve: CapacityCurve, draft_seconds: float) -> Floats:
    """Expected tokens per second Θ after admitting the first 0, 1, ..., n candidates, `(n + 1,)`."""
    _check_seconds(draft_seconds)
    tokens = np.full(len(ranked) + 1, float(requests))
    # One after the other, so that a sum knows nothing of what follows.
    np.cumsum(ranked, out=tokens[1:])
    tokens[1:] += requests
    rates: Floats = tokens / (draft_seconds + curve.seconds_between(requests, requests + len(ranked)))
    return rates


def _best_budget(survivals: Floats, curve: CapacityCurve, draft_seconds: float) -> int:
    ranked, _ = _ranked(survivals)
    return int(_rates(ranked, len(survivals), curve, draft_seconds).argmax())


def _counts(requests: Lengths, count: int) -> Lengths:
    """How often each of `count` requests occurs: its admitted tokens, which are its first ones."""
    return np.bincount(requests, minlength=count).astype(np.int64, copy=False)


def _probabilities(values: Any, name: str) -> Floats:
    """`(R, γ)` as float64, checked."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    array = np.asarray(values, np.float64)
    if array.ndim != 2:
        raise ValueError(f"`{name}` has shape {array.shape}; it is (requests, drafted tokens).")
    # NaN fails the comparison.
    if array.size and not (array.min() >= 0 and array.max() <= 1):
        raise ValueError(f"`{name}` holds values that are no probabilities, from 0 to 1.")
    return array


def _survivals(values: Any) -> Floats:
    array = _probabilities(values, "survivals")
    if (array[:, 1:] > array[:, :-1]).any():
        raise ValueError("`survivals` rise along a row; they are products of confidences, made by `survival`.")
    return array


def _check_seconds(seconds: float) -> None:
    if not _is_amount(seconds):
        raise ValueError(f"`draft_seconds` is {seconds}; it is a time, at least 0.")


def _is_amount(value: float) -> bool:
    return 0 <= value < math.inf


__all__ = [
    "CapacityCurve",
    "DraftingGate",
    "History",
    "Outlook",
    "Promise",
    "everything",
    "expected_tokens",
    "global_budget",
    "is_column_worth",
    "schedule_columns",
    "schedule_early_stop",
    "static_threshold",
    "survival",
    "top_k",
    "worth_drafting",
]
