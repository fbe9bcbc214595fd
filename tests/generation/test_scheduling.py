"""Which drafted tokens are verified: exact laws by enumeration, Algorithm 1 against brute force, budgets, skipping."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dspark_hf.generation.scheduling import (
    CapacityCurve,
    DraftingGate,
    History,
    Promise,
    everything,
    expected_tokens,
    global_budget,
    is_column_worth,
    schedule_columns,
    schedule_early_stop,
    static_threshold,
    survival,
    top_k,
    worth_drafting,
)
from dspark_hf.generation.verification import _next_distribution

APPENDIX_CURVE = CapacityCurve.from_steps_per_second([1, 2, 3], [1.0, 0.5, 0.45])
JAGGED = CapacityCurve([1, 2, 3, 4, 5, 8], [0.6, 1.0, 1.8, 1.85, 1.9, 2.0])
STAIRS = CapacityCurve([2, 3, 4, 5, 6, 8], [1.0, 1.2, 1.4, 1.4, 2.3, 2.3])
RISING = CapacityCurve([1, 2, 8], [1.0, 1.2, 3.5])


# --- The counterexample of the paper's appendix A ---


def probability_of_a(policy: Callable[[np.ndarray], np.ndarray]) -> float:
    """Chance that the first token is A: one request, two drafted tokens, whose second confidence tells the first."""
    p, q = (0.7, 0.3), (0.5, 0.5)
    residual = np.maximum(np.subtract(p, q), 0)
    residual /= residual.sum()
    total = 0.0
    for x1, second in ((0, 0.9), (1, 0.0)):
        if policy(survival([[0.8, second]]))[0] == 0:
            total += q[x1] * p[0]
        else:
            accept = min(1.0, p[x1] / q[x1])
            total += q[x1] * (accept * (x1 == 0) + (1 - accept) * residual[0])
    return total


def test_early_stop_passes_the_counterexample():
    assert probability_of_a(lambda a: schedule_early_stop(a, APPENDIX_CURVE)) == pytest.approx(0.7, abs=1e-12)


def test_global_search_over_the_current_draft_fails_the_counterexample():
    law = probability_of_a(lambda a: top_k(a, global_budget(a, APPENDIX_CURVE)))
    assert law == pytest.approx(0.85, abs=1e-12)


# --- Exact laws of two requests with three drafted tokens each ---

VOCAB, GAMMA, REQUESTS = 2, 3, 2
PATHS = list(itertools.product(range(VOCAB), repeat=GAMMA))
EMISSIONS = [ids for length in range(1, GAMMA + 2) for ids in itertools.product(range(VOCAB), repeat=length)]
EMISSION_INDEX = {ids: index for index, ids in enumerate(EMISSIONS)}

Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]


class World:
    """Two requests over a tiny vocabulary: target, drafter and confidences, each conditional on the tokens before.

    Attributes:
        p: `(request, last, next)`.
        q: `(request, position, last, next)`.
        confidences: `(request, anchor, path, position)`; the entry of a position depends on the tokens before it only.
    """

    def __init__(self, seed: int, levels: list[float] | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.p = rng.dirichlet([0.7] * VOCAB, size=(REQUESTS, VOCAB))
        self.q = rng.dirichlet([0.7] * VOCAB, size=(REQUESTS, GAMMA, VOCAB))
        self.confidences = np.zeros((REQUESTS, VOCAB, len(PATHS), GAMMA))
        for request, anchor, position in itertools.product(range(REQUESTS), range(VOCAB), range(GAMMA)):
            for prefix in itertools.product(range(VOCAB), repeat=position):
                value = self._confidence(rng, position) if levels is None else rng.choice(levels)
                same = [path[:position] == prefix for path in PATHS]
                self.confidences[request, anchor, same, position] = value

    @staticmethod
    def _confidence(rng: np.random.Generator, position: int) -> float:
        """After the first, either high or low, so that a draft tells much about what was drafted before."""
        if position == 0:
            return rng.uniform(0.6, 0.9)
        return rng.choice([rng.uniform(0, 0.3), rng.uniform(0.8, 1)])

    def draft_law(self, request: int, anchor: int) -> np.ndarray:
        """`(path, position)`: probability of each drafted token given those before."""
        return np.array(
            [
                [self.q[request, k, before, token] for k, (before, token) in enumerate(zip((anchor, *path), path))]
                for path in PATHS
            ]
        )

    def emission_law(self, request: int, anchor: int) -> np.ndarray:
        """`(path, length, emission)`: law of a round's new tokens where `length` tokens of `path` are verified."""
        law = np.zeros((len(PATHS), GAMMA + 1, len(EMISSIONS)))
        for number, path in enumerate(PATHS):
            before = (anchor, *path)
            q = torch.tensor(np.array([[self.q[request, k, before[k]] for k in range(GAMMA)]]))
            p = torch.tensor(np.array([[self.p[request, token] for token in before]]))
            accept = [min(1.0, float(p[0, k, token] / q[0, k, token])) for k, token in enumerate(path)]
            for length in range(GAMMA + 1):
                for kept in range(length + 1):
                    chance = np.prod(accept[:kept]) * (1 - accept[kept] if kept < length else 1)
                    following = _next_distribution(torch.tensor([kept]), q, p, torch.tensor([length]))[0]
                    for token in range(VOCAB):
                        index = EMISSION_INDEX[(*path[:kept], token)]
                        law[number, length, index] += chance * float(following[token])
        return law

    def text_law(self, request: int, anchor: int, length: int) -> np.ndarray:
        """The target's own law of the next `length` tokens."""
        texts = itertools.product(range(VOCAB), repeat=length)
        return np.array([np.prod([self.p[request, a, b] for a, b in zip((anchor, *t), t)]) for t in texts])

    def completion(self, request: int, length: int) -> np.ndarray:
        """`(emission, text)`: how an emission goes on under the target to a text of `length` tokens."""
        texts = list(itertools.product(range(VOCAB), repeat=length))
        matrix = np.zeros((len(EMISSIONS), len(texts)))
        for row, ids in enumerate(EMISSIONS):
            rest = max(0, length - len(ids))
            for extra, chance in zip(
                itertools.product(range(VOCAB), repeat=rest), self.text_law(request, ids[-1], rest), strict=True
            ):
                matrix[row, texts.index((*ids, *extra)[:length])] += chance
        return matrix

    def deviation(self, policy: Policy) -> float:
        """Largest error of the joint law of both requests' next four tokens, over all anchors, after one round."""
        worst = 0.0
        for anchors in itertools.product(range(VOCAB), repeat=REQUESTS):
            drafts = [self.draft_law(request, anchor) for request, anchor in enumerate(anchors)]
            emissions = [self.emission_law(request, anchor) for request, anchor in enumerate(anchors)]
            joint = np.zeros((len(EMISSIONS), len(EMISSIONS)))
            for first, second in itertools.product(range(len(PATHS)), repeat=2):
                confidences = np.stack(
                    [self.confidences[0, anchors[0], first], self.confidences[1, anchors[1], second]]
                )
                chosen = np.stack([drafts[0][first], drafts[1][second]])
                lengths = policy(confidences, chosen)
                joint += chosen.prod() * np.outer(emissions[0][first, lengths[0]], emissions[1][second, lengths[1]])
            law = self.completion(0, GAMMA + 1).T @ joint @ self.completion(1, GAMMA + 1)
            wanted = np.outer(*[self.text_law(r, a, GAMMA + 1) for r, a in enumerate(anchors)])
            worst = max(worst, float(np.abs(law - wanted).max()))
        return worst


SEEDS = range(3)
VISIBLE = 3e-3
LEVELS = [0.0, 0.5, 0.8, 1.0]  # many ties
LOSSLESS: dict[str, Policy] = {
    "early stop": lambda c, _: schedule_early_stop(survival(c), RISING),
    "early stop, jagged": lambda c, _: schedule_early_stop(survival(c), STAIRS),
    "early stop with drafting": lambda c, _: schedule_early_stop(survival(c), RISING, draft_seconds=0.7),
    "budget 1": lambda c, _: top_k(survival(c), 1),
    "budget 2": lambda c, _: top_k(survival(c), 2),
    "budget 3": lambda c, _: top_k(survival(c), 3),
    "threshold": lambda c, _: static_threshold(c, 0.6),
    "threshold and budget": lambda c, _: top_k(survival(c, static_threshold(c, 0.4)), 2),
    "room": lambda c, _: top_k(survival(c, [1, 3]), 2),
    "everything": lambda c, _: everything(survival(c)),
    "columns": lambda c, _: schedule_columns(survival(c), [0.5, 0.6, 0.9], 1.2),
    "columns with an outlook": lambda c, _: schedule_columns(survival(c), [1.3, 0.3, 0.3], 1.0, [0, 0.6, 0.6]),
    "columns with room": lambda c, _: schedule_columns(survival(c, [1, 3]), [0.2, 0.4, 0.4], 1.0),
}


@pytest.mark.parametrize("levels", [None, LEVELS], ids=["distinct", "ties"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_one_round_has_the_targets_law(name, levels):
    for seed in SEEDS:
        assert World(seed, levels).deviation(LOSSLESS[name]) < 1e-8


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name not in ("budget 1", "everything")])
def test_what_is_verified_differs_from_draft_to_draft(name):
    """Else its law would show nothing."""
    chosen = []
    for world in map(World, SEEDS):
        drafts = [
            world.confidences[range(REQUESTS), 0, paths] for paths in itertools.product(range(len(PATHS)), repeat=2)
        ]
        chosen.append({tuple(LOSSLESS[name](confidences, confidences)) for confidences in drafts})
    assert max(map(len, chosen)) > 1


def later_position_first(survivals: np.ndarray, budget: int) -> np.ndarray:
    """A planted fault: of equal survivals, the later position ranks first."""
    order = sorted(np.ndindex(*survivals.shape), key=lambda rj: (-survivals[rj], -rj[1], rj[0]))
    return np.bincount([request for request, _ in order[:budget]], minlength=len(survivals))


def position_first(survivals: np.ndarray, budget: int) -> np.ndarray:
    """The right order, written out."""
    order = sorted(np.ndindex(*survivals.shape), key=lambda rj: (-survivals[rj], rj[1], rj[0]))
    return np.bincount([request for request, _ in order[:budget]], minlength=len(survivals))


FAULTS: dict[str, Policy] = {
    "budget from the current draft": lambda c, _: top_k(survival(c), global_budget(survival(c), JAGGED)),
    "score of the drafted token": lambda c, q: top_k(survival(q), 2),
    "threshold on the drafted token": lambda c, q: static_threshold(q, 0.5),
    "columns that survive worth their time, by the drafted tokens": lambda c, q: schedule_columns(
        survival(q), [0.5, 0.6, 0.9], 1.2
    ),
    "confidences of the next position": lambda c, _: top_k(survival(np.roll(c, -1, axis=1)), 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_shows(name):
    assert max(World(seed).deviation(FAULTS[name]) for seed in SEEDS) > VISIBLE


def test_planted_order_of_ties_shows():
    worlds = [World(seed, [0.5, 1.0]) for seed in range(6)]
    assert max(world.deviation(lambda c, _: later_position_first(survival(c), 1)) for world in worlds) > VISIBLE
    assert max(world.deviation(lambda c, _: position_first(survival(c), 1)) for world in worlds) < 1e-8


# --- Exact laws over many rounds: budgets from a history, requests that end at different times ---

LIMITS = (3, 4)  # tokens that each request generates before it leaves
TEXTS = [[t for n in range(limit + 1) for t in itertools.product(range(VOCAB), repeat=n)] for limit in LIMITS]
ACTIVE = [(), (0,), (1,), (0, 1)]
# Budgets for each set of requests that may be active in the round they are for.
Budgets = tuple[int, ...]


class Rounds:
    """The joint law of both requests' texts after whole generations.

    The state after a round is both texts, and the budgets that the confidences of the last two rounds would give, for
    whichever requests are active when they are asked for.
    """

    def __init__(self, world: World, curve: CapacityCurve, fault: bool = False) -> None:
        self.world, self.curve, self.fault = world, curve, fault
        self.drafts = [[world.draft_law(r, a).prod(axis=1) for a in range(VOCAB)] for r in range(REQUESTS)]
        self.laws = [[world.emission_law(r, a) for a in range(VOCAB)] for r in range(REQUESTS)]
        self.appended = [self._append_table(r) for r in range(REQUESTS)]
        self.used: set[int] = set()
        self._cache: dict = {}

    def _append_table(self, request: int) -> np.ndarray:
        index = {text: number for number, text in enumerate(TEXTS[request])}
        limit = LIMITS[request]
        return np.array([[index[(*text, *ids)[:limit]] for ids in EMISSIONS] for text in TEXTS[request]])

    def history(self, past: list[tuple[tuple[int, ...], np.ndarray]]) -> Budgets:
        """What a history with these rounds gives the next one, for each set of active requests."""
        history = History(self.curve, warmup=1)
        for rows, confidences in past:
            history.record(rows, confidences)
        return tuple(history.budget(rows) for rows in ACTIVE)

    def round(self, rows: tuple[int, ...], anchors: tuple[int, ...], budget: int) -> dict[Budgets, np.ndarray]:
        """Joint law of the new tokens of the active requests, split by the budgets that their confidences give."""
        key = (rows, anchors, budget)
        if key not in self._cache:
            laws: dict[Budgets, np.ndarray] = {}
            for paths in itertools.product(range(len(PATHS)), repeat=len(rows)):
                inputs = list(zip(rows, anchors, paths, strict=True))
                confidences = np.stack([self.world.confidences[entry] for entry in inputs])
                now = global_budget(survival(confidences), self.curve) if self.fault else budget
                self.used.add(now)
                lengths = top_k(survival(confidences), now)
                law = np.ones(())
                for (row, anchor, path), length in zip(inputs, lengths, strict=True):
                    law = np.multiply.outer(law, self.drafts[row][anchor][path] * self.laws[row][anchor][path, length])
                # Whatever follows it: the round after next takes the older of two.
                later = self.history([(rows, confidences), (rows, confidences * 0)])
                laws[later] = laws.get(later, 0) + law
            self._cache[key] = laws
        return self._cache[key]

    def run(self) -> np.ndarray:
        """`(text, text)`: the law after all rounds, starting from anchors 0 and 1."""
        warmup = self.history([])
        assert warmup == self.history([((0, 1), np.ones((2, GAMMA)))])
        start = np.zeros([len(texts) for texts in TEXTS])
        start[0, 0] = 1
        states = {(warmup, warmup): start}
        final = np.zeros_like(start)
        for _ in range(max(LIMITS)):
            states = self._advance(states, final)
        assert not states
        return final

    def _advance(self, states: dict, final: np.ndarray) -> dict:
        following: dict = {}
        for (budgets, next_budgets), mass in states.items():
            for first, second in np.argwhere(mass > 0):
                texts = (TEXTS[0][first], TEXTS[1][second])
                rows = tuple(r for r in range(REQUESTS) if len(texts[r]) < LIMITS[r])
                if not rows:
                    final[first, second] += mass[first, second]
                    continue
                anchors = tuple(texts[r][-1] if texts[r] else r for r in rows)
                for later, law in self.round(rows, anchors, budgets[ACTIVE.index(rows)]).items():
                    new = following.setdefault((next_budgets, later), np.zeros_like(mass))
                    to_first = self.appended[0][first] if 0 in rows else np.array([first])
                    to_second = self.appended[1][second] if 1 in rows else np.array([second])
                    law = law.reshape(len(to_first), len(to_second))
                    np.add.at(new, (to_first[:, None], to_second), mass[first, second] * law)
        for mass in following.values():
            for first, second in np.argwhere(mass > 0):
                if len(TEXTS[0][first]) == LIMITS[0] and len(TEXTS[1][second]) == LIMITS[1]:
                    final[first, second] += mass[first, second]
                    mass[first, second] = 0
        return {key: mass for key, mass in following.items() if mass.any()}

    def deviation(self) -> float:
        law = self.run()
        wanted = np.zeros_like(law)
        complete = [
            [number for number, text in enumerate(TEXTS[r]) if len(text) == LIMITS[r]] for r in range(REQUESTS)
        ]
        wanted[np.ix_(*complete)] = np.outer(*[self.world.text_law(r, r, LIMITS[r]) for r in range(REQUESTS)])
        return float(np.abs(law - wanted).max())


@pytest.mark.parametrize("seed", range(2))
def test_rounds_with_a_history_have_the_targets_law(seed):
    rounds = Rounds(World(seed), JAGGED)
    assert rounds.deviation() < 1e-8
    assert len(rounds.used) >= 3


def test_rounds_with_a_budget_from_the_current_draft_do_not():
    assert Rounds(World(0), JAGGED, fault=True).deviation() > VISIBLE


# --- Non-anticipation: nothing after a token decides on it ---

matrices = st.integers(1, 4).flatmap(
    lambda rows: st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), min_size=width, max_size=width),
            min_size=rows,
            max_size=rows,
        )
    )
)
NON_ANTICIPATING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "early stop": lambda c: schedule_early_stop(survival(c), CapacityCurve([1, 4, 20], [1.0, 1.1, 4.0])),
    "jagged": lambda c: schedule_early_stop(survival(c), CapacityCurve([1, 2, 4, 5, 20], [1.0, 0.9, 1.4, 1.2, 3.0])),
    "top 3": lambda c: top_k(survival(c), 3),
    "threshold": lambda c: static_threshold(c, 0.5),
    "columns": lambda c: schedule_columns(survival(c), np.linspace(0.3, 0.6, c.shape[1]), 1.3),
}


@pytest.mark.parametrize("name", NON_ANTICIPATING)
@given(confidences=matrices, data=st.data())
@settings(deadline=None, max_examples=100)
def test_no_token_decides_on_itself(name, confidences, data):
    before = np.array(confidences)
    request = data.draw(st.integers(0, before.shape[0] - 1))
    position = data.draw(st.integers(0, before.shape[1] - 1))
    after = before.copy()
    after[request, position + 1 :] = data.draw(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=after.shape[1] - position - 1, max_size=after.shape[1])
    )[: after.shape[1] - position - 1]
    admitted = [NON_ANTICIPATING[name](values)[request] > position for values in (before, after)]
    assert admitted[0] == admitted[1]


# --- Algorithm 1 ---


def convex_curve(start: float, steps: list[float]) -> CapacityCurve:
    seconds = start + np.concatenate([[0], np.cumsum(sorted(steps))])
    return CapacityCurve(list(range(1, len(seconds) + 1)), seconds.tolist())


def best_rate(survivals: np.ndarray, curve: CapacityCurve, draft_seconds: float) -> float:
    rows, width = survivals.shape
    return max(
        expected_tokens(survivals, lengths) / (draft_seconds + float(curve.seconds_for(rows + sum(lengths))))
        for lengths in itertools.product(range(width + 1), repeat=rows)
    )


@given(
    confidences=st.integers(1, 3).flatmap(
        lambda rows: st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=rows, max_size=rows)
    ),
    start=st.floats(0.1, 5),
    steps=st.lists(st.one_of(st.just(0.0), st.floats(0, 2)), min_size=1, max_size=12),
    draft_seconds=st.sampled_from([0.0, 0.5]),
)
@settings(deadline=None, max_examples=300)
def test_early_stop_is_the_best_choice_on_a_convex_curve(confidences, start, steps, draft_seconds):
    curve, survivals = convex_curve(start, steps), survival(confidences)
    lengths = schedule_early_stop(survivals, curve, draft_seconds)
    rate = expected_tokens(survivals, lengths) / (
        draft_seconds + float(curve.seconds_for(len(survivals) + lengths.sum()))
    )
    assert rate == pytest.approx(best_rate(survivals, curve, draft_seconds), rel=1e-9)
    budget = global_budget(survivals, curve, draft_seconds)
    budgeted = top_k(survivals, budget)
    assert expected_tokens(survivals, budgeted) / (
        draft_seconds + float(curve.seconds_for(len(survivals) + budget))
    ) == pytest.approx(rate, rel=1e-9)


@given(confidences=matrices, budget=st.integers(0, 25))
@settings(deadline=None, max_examples=200)
def test_admits_prefixes_likeliest_first(confidences, budget):
    survivals = survival(confidences)
    lengths = top_k(survivals, budget)
    assert lengths.sum() == min(budget, np.count_nonzero(survivals))
    admitted = np.arange(survivals.shape[1]) < lengths[:, None]
    assert survivals[admitted].min(initial=1) >= survivals[~admitted].max(initial=0)
    if lengths.sum() == budget:
        np.testing.assert_array_equal(lengths, position_first(survivals, budget))


def written_out(survivals: np.ndarray, curve: CapacityCurve) -> list[int]:
    """Algorithm 1 line by line."""
    rows = len(survivals)
    lengths, batch, tokens = [0] * rows, rows, float(rows)
    best = tokens * float(curve.steps_per_second(batch))
    for request, position in sorted(np.ndindex(*survivals.shape), key=lambda rj: (-survivals[rj], rj[1], rj[0])):
        batch, tokens = batch + 1, tokens + survivals[request, position]
        rate = tokens * float(curve.steps_per_second(batch))
        if rate <= best:
            break
        assert lengths[request] == position, "a token before its predecessor"
        best, lengths[request] = rate, position + 1
    return lengths


@given(confidences=matrices, seconds=st.lists(st.sampled_from([0.7, 1.0, 1.3, 1.9, 2.6, 4.1]), min_size=1, max_size=9))
@settings(deadline=None, max_examples=200)
def test_early_stop_follows_the_algorithm(confidences, seconds):
    survivals = survival(confidences)
    curve = CapacityCurve(list(range(1, len(seconds) + 1)), np.maximum.accumulate(seconds).tolist())
    assert schedule_early_stop(survivals, curve).tolist() == written_out(survivals, curve)


def test_steep_curve_verifies_nothing():
    survivals = survival(np.ones((3, 7)))
    steep = CapacityCurve([1, 64], [1.0, 64.0])
    assert schedule_early_stop(survivals, steep).tolist() == [0, 0, 0]
    assert global_budget(survivals, steep) == 0
    assert not worth_drafting(survivals, steep, draft_seconds=0.1)


def test_flat_curve_verifies_everything_that_may_survive():
    flat = CapacityCurve([1], [1.0])
    assert schedule_early_stop(survival([[0.5, 0.1], [0.9, 0.0]]), flat).tolist() == [2, 1]


def test_jagged_curve_needs_the_global_search():
    survivals = survival(np.full((1, 7), 0.9))
    curve = CapacityCurve([1, 2, 8], [104.0, 202.0, 212.0])
    assert schedule_early_stop(survivals, curve).tolist() == [0]
    assert global_budget(survivals, curve) == 7
    assert worth_drafting(survivals, curve, draft_seconds=20.0)
    assert not worth_drafting(survival(np.full((1, 7), 0.3)), curve, draft_seconds=20.0)


# --- Columns ---


def column_rate(survivals: np.ndarray, seconds: np.ndarray, longest: int, speed: float) -> float:
    """What a round gains over rounds that bring `speed` times plain decoding's tokens per second."""
    rows = len(survivals)
    return survivals[:, :longest].sum() - speed * rows * (seconds[longest] - seconds[0]) / seconds[0]


@given(
    confidences=matrices,
    steps=st.lists(st.floats(0, 2), min_size=5, max_size=5),
    speed=st.floats(1, 4),
)
@settings(deadline=None, max_examples=200)
def test_columns_are_the_best_choice_on_a_convex_curve(confidences, steps, speed):
    survivals = survival(confidences)
    width = survivals.shape[1]
    seconds = 1 + np.concatenate([[0], np.cumsum(sorted(steps[:width]))])
    costs = np.diff(seconds) * len(survivals) / seconds[0]
    lengths = schedule_columns(survivals, costs, speed)
    gains = [column_rate(survivals, seconds, longest, speed) for longest in range(width + 1)]
    assert gains[int(lengths.max(initial=0))] == pytest.approx(max(gains), abs=1e-9)


def test_columns_are_verified_for_all_requests():
    survivals = survival([[0.9, 0.9, 0.1], [0.5, 0.0, 0.9]])
    assert schedule_columns(survivals, [0.2, 0.2, 0.2], 1.0).tolist() == [2, 1]
    assert schedule_columns(survivals, [2.0, 2.0, 2.0], 1.0).tolist() == [0, 0]
    assert schedule_columns(survivals, [0.2, 0.2, 0.2], 6.0).tolist() == [1, 1]


def test_dear_column_opens_the_way_to_cheap_ones():
    survivals, costs = survival([[0.6, 0.9, 0.9, 0.9]]), [0.9, 0.02, 0.02, 0.02]
    assert schedule_columns(survivals, costs, 1.0).tolist() == [0]
    assert schedule_columns(survivals, costs, 1.0, outlook=[0, 0.9, 0.9, 0.9]).tolist() == [4]
    assert schedule_columns(survivals, costs, 1.0, outlook=[0, 0.2, 0.2, 0.2]).tolist() == [0]


@given(
    alive=st.floats(0, 8),
    prices=st.lists(st.floats(0, 2), min_size=1, max_size=6),
    share=st.floats(0, 1),
)
@settings(deadline=None)
def test_column_is_worth_it_where_the_best_of_all_ends_is(alive, prices, share):
    expected = max(sum(alive * share**k - prices[k] for k in range(end)) for end in range(1, len(prices) + 1))
    assume(abs(expected) > 1e-9)
    assert is_column_worth(alive, prices, [share] * len(prices)) == (expected > 0)


def test_draft_seconds_make_verification_relatively_cheap():
    survivals, curve = survival([[0.5, 0.5, 0.5]]), CapacityCurve([1, 2], [1.0, 1.6])
    assert schedule_early_stop(survivals, curve).tolist() == [0]
    assert schedule_early_stop(survivals, curve, draft_seconds=1.0).tolist() == [1]


def test_ties_go_to_the_earlier_position_then_request():
    assert top_k(np.ones((3, 3)), 4).tolist() == [2, 1, 1]


def test_lengths_limit_what_may_be_verified():
    survivals = survival([[0.9, 0.9, 0.9], [0.5, 0.5, 0.5]], lengths=[1, 3])
    assert everything(survivals).tolist() == [1, 3]
    assert top_k(survivals, 3).tolist() == [1, 2]
    assert expected_tokens(survivals, [1, 2]) == pytest.approx(2 + 0.9 + 0.5 + 0.25)


def test_threshold_cuts_at_the_first_below():
    confidences = torch.tensor([[0.9, 0.4, 0.9], [0.6, 0.7, 0.8]])
    assert static_threshold(confidences, 0.5).tolist() == [1, 3]
    assert static_threshold(confidences, 0).tolist() == [3, 3]
    assert static_threshold(confidences, 1).tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_schedule(shape):
    survivals = survival(np.ones(shape))
    for lengths in (schedule_early_stop(survivals, RISING), top_k(survivals, 5), everything(survivals)):
        assert lengths.tolist() == [0] * shape[0]
    assert global_budget(survivals, RISING) == 0


def test_bfloat16_tensors_are_taken():
    confidences = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16, requires_grad=True)
    assert survival(confidences).tolist() == [[1.0, 0.5]]


# --- The curve ---


def test_curve_between_and_past_its_points():
    curve = CapacityCurve([2, 4, 8], [1.0, 2.0, 3.0])
    assert curve.seconds_for([1, 2, 3, 8, 12]).tolist() == [1.0, 1.0, 1.5, 3.0, 4.0]
    assert CapacityCurve([2, 4, 8], [1.0, 2.0, 3.0], flat_end=True).seconds_for(12) == 3.0
    assert CapacityCurve([1, 2], [2.0, 1.0]).seconds_for(9) == 1.0
    assert CapacityCurve([3], [2.0]).seconds_for([1, 9]).tolist() == [2.0, 2.0]
    assert curve.steps_per_second(4) == 0.5
    np.testing.assert_array_equal(curve.seconds_between(3, 30), curve.seconds_for(np.arange(3, 31)))
    np.testing.assert_array_equal(curve.seconds_between(1, 5), curve.seconds_for(np.arange(1, 6)))


# --- History ---


def test_budget_comes_from_two_rounds_before():
    curve = CapacityCurve([1, 2, 8], [1.0, 1.2, 2.4])
    history, rounds = History(curve, warmup=3), [np.full((1, 3), c) for c in (0.1, 0.95, 0.6, 0.2)]
    budgets = []
    for confidences in rounds:
        budgets.append(history.budget([0]))
        history.record([0], confidences)
    wanted = [global_budget(survival(confidences), curve) for confidences in rounds]
    assert len(set(wanted)) > 2
    assert budgets == [3, 3, *wanted[:2]]
    # Asked for after the round was recorded, it still knows nothing of that round.
    assert history.budget([0]) == wanted[2]


def test_history_counts_the_requests_present():
    curve = CapacityCurve([1, 2, 3, 4, 5, 6], [1.0, 1.0, 1.1, 1.3, 1.8, 2.5])
    history = History(curve, warmup=2)
    confidences = np.array([[0.9, 0.9], [0.2, 0.1], [0.6, 0.5]])
    history.record([4, 7, 9], confidences)
    history.record([4, 7, 9], confidences * 0)
    assert history.budget([4, 7, 9]) == global_budget(survival(confidences), curve)
    assert history.budget([9, 4]) == global_budget(survival(confidences[[2, 0]]), curve)
    mean = survival(confidences[:1])
    assert history.budget([4, 11]) == global_budget(np.concatenate([mean, mean]), curve)
    assert history.budget([11, 12, 13]) == 6
    history.keep([7])
    assert history.budget([7, 4]) == global_budget(survival(confidences[[1, 1]]), curve)
    history.clear()
    assert history.budget([7]) == 2


# --- Skipping drafts ---


def play(gate: DraftingGate, tokens: Callable[[int], float], cost: float, plain_rounds: int) -> tuple[float, int]:
    """Seconds per token against plain decoding's 1.0, and rounds with a draft, over about `plain_rounds` tokens."""
    seconds = text = 0.0
    drafted = 0
    while text < plain_rounds:
        if gate.is_open:
            new = tokens(int(text))
            gate.record_drafted(new, 1, cost, 1.0)
            seconds, text, drafted = seconds + cost, text + new, drafted + 1
        else:
            gate.record_plain()
            seconds, text = seconds + 1, text + 1
    return seconds / text, drafted


@pytest.mark.parametrize("cost", [1.2, 1.7, 2.4, 10.0])
def test_always_wrong_drafter_costs_a_few_percent(cost):
    for plain_rounds, most in ((500, 1.08 if cost == 10 else 1.04), (4000, 1.04)):
        assert play(DraftingGate(), lambda _: 1.0, cost, plain_rounds)[0] < most


def test_gaps_grow_up_to_a_cap():
    gate, gaps = DraftingGate(first_gap=4, max_gap=32, max_overhead=1.0), []
    while len(gaps) < 6:
        while gate.is_open:
            gate.record_drafted(1.0, 1, 1.5, 1.0)
        gap = 0
        while not gate.is_open:
            gate.record_plain()
            gap += 1
        gaps.append(gap)
    assert gaps == [4, 8, 16, 32, 32, 32]


def test_good_drafter_is_rarely_stopped():
    rng = np.random.default_rng(0)
    lengths = rng.choice([1, 2, 3, 5, 8], size=100_000)
    rate, drafted = play(DraftingGate(), lambda position: float(lengths[position]), 2.0, 20_000)
    assert rate < 1.03 * 2.0 / lengths.mean()
    assert drafted > 0.95 * 20_000 / lengths.mean()


def test_drafter_that_becomes_good_is_found_again():
    gate = DraftingGate()
    play(gate, lambda _: 1.0, 2.4, 1000)
    rate, _ = play(gate, lambda _: 4.0, 2.4, 2000)
    assert rate < 0.75


def test_promises_are_judged_by_what_was_kept():
    promise = Promise()
    assert promise.share == 1
    for _ in range(4):
        promise.record(2.5, 0)
    assert promise.share < 0.12
    for _ in range(200):
        promise.record(0, 0)
    assert promise.share > 0.8  # long ago
    for _ in range(50):
        promise.record(2.0, 2.4)
    assert promise.share == pytest.approx(1.2, abs=0.02)


def test_many_requests_tell_sooner():
    def rounds_until_closed(requests: int) -> int:
        gate = DraftingGate()
        rounds = 0
        while gate.is_open:
            gate.record_drafted(requests, requests, 1.5, 1.0)
            rounds += 1
        return rounds

    assert [rounds_until_closed(requests) for requests in (1, 2, 9)] == [3, 3, 1]


# --- Errors ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: survival([0.5, 0.5]), "shape"),
        (lambda: survival([[1.5]]), "no probabilities"),
        (lambda: survival([[-0.1]]), "no probabilities"),
        (lambda: survival([[0.5, float("nan")]]), "no probabilities"),
        (lambda: survival([[0.5]], lengths=[1, 1]), "lengths"),
        (lambda: static_threshold([[float("nan")]], 0.5), "no probabilities"),
        (lambda: static_threshold([[0.5]], 1.5), "threshold"),
        (lambda: static_threshold([[0.5]], float("nan")), "threshold"),
        (lambda: schedule_columns([[0.5, 0.5]], [0.1], 1.0), "`costs` and `outlook` have shapes"),
        (lambda: schedule_columns([[0.5]], [0.1], 0.0), "`speed` is 0.0"),
        (lambda: top_k([[0.5, 0.6]], 1), "rise"),
        (lambda: top_k([[0.5]], -1), "budget"),
        (lambda: schedule_early_stop([[0.5, 0.6]], RISING), "rise"),
        (lambda: schedule_early_stop([[0.5]], RISING, draft_seconds=-1.0), "draft_seconds"),
        (lambda: global_budget([[0.5]], RISING, draft_seconds=float("nan")), "draft_seconds"),
        (lambda: CapacityCurve([], []), "at least one"),
        (lambda: CapacityCurve([1, 2], [1.0]), "as many"),
        (lambda: CapacityCurve([2, 1], [1.0, 1.0]), "increase"),
        (lambda: CapacityCurve([0, 1], [1.0, 1.0]), "at least 1"),
        (lambda: CapacityCurve([1], [0.0]), "positive"),
        (lambda: CapacityCurve([1], [float("nan")]), "positive"),
        (lambda: CapacityCurve.from_steps_per_second([1], [0.0]), "Steps per second"),
        (lambda: History(RISING, warmup=-1), "warmup"),
        (lambda: History(RISING, warmup=1, draft_seconds=-1.0), "draft_seconds"),
        (lambda: History(RISING, warmup=1).record([0], np.ones((2, 3))), "do not name"),
        (lambda: History(RISING, warmup=1).record([0, 0], np.ones((2, 3))), "do not name"),
        (lambda: Promise().record(-1.0, 0.0), "Not a round"),
        (lambda: DraftingGate(first_gap=0), "positive"),
        (lambda: DraftingGate(first_gap=64, max_gap=32), "above"),
        (lambda: DraftingGate().record_drafted(1.0, 0, 1.0, 1.0), "Not a round"),
        (lambda: DraftingGate().record_drafted(1.0, 1, float("nan"), 1.0), "Not a round"),
        (lambda: DraftingGate().record_drafted(1.0, 1, 1.0, 0.0), "Not a round"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- Time ---


def median_seconds(call: Callable[[], object]) -> float:
    """Best of several medians, as other processes may take the processor meanwhile."""
    medians = []
    for _ in range(5):
        times = []
        for _ in range(60):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return min(medians)


@pytest.mark.timing
def test_a_round_costs_little():
    confidences = np.random.default_rng(0).uniform(0.5, 1, (64, 7)).astype(np.float32)
    curve = CapacityCurve([1, 2, 4, 8, 16, 64, 128, 512], [1.0, 1.8, 1.9, 2.0, 2.2, 4.0, 7.0, 30.0])
    history, rows = History(curve, warmup=2), list(range(64))

    def round_with_history() -> None:
        budget = history.budget(rows)
        top_k(survival(confidences), budget)
        history.record(rows, confidences)

    costs = np.linspace(2, 8, 7)
    assert median_seconds(lambda: schedule_early_stop(survival(confidences), curve)) < 2e-4
    assert median_seconds(lambda: schedule_columns(survival(confidences), costs, 1.5)) < 2e-4
    assert median_seconds(round_with_history) < 2e-4
