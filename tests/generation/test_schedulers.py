"""Schedulers in `generate`: the text stays the target's whatever they choose, and what they choose pays."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark_hf import DSparkConfig, custom_generate, get_drafter
from dspark_hf.generation import schedulers
from dspark_hf.generation.capacity import CapacityProfile, DraftProfile
from dspark_hf.generation.schedulers import Asynchronous, EarlyStop, Fixed, Hardware, Plain, Scheduler
from dspark_hf.generation.scheduling import Outlook

from ..tiny import tiny_prompt, tiny_target
from .noisy import Batch, make_noisy_copy

GAMMA = 4
NEW_TOKENS = 40


def profile(
    verify: list[float] | None = None, draft: float = 2.0, rows: tuple[int, ...] = (1, 8), lengths: int = 8
) -> CapacityProfile:
    """A profile whose verifications take `verify[n - 1]` for n tokens per row, whatever the rows."""
    verify = verify or [10.0, 13.0, 13.5, 14.0, 14.5, 15.0, 15.5, 16.0][:lengths]
    drafts = ((draft, draft * 1.5),) * len(rows)
    return CapacityProfile(
        measured_on={},
        contexts=(64,),
        rows=rows,
        lengths=tuple(range(1, len(verify) + 1)),
        verify_seconds=((tuple(verify),) * len(rows),),
        draft=DraftProfile({}, (1, 7), (drafts,)),
    )


# A further token takes three plain rounds: none is worth verifying.
STEEP = profile([10.0 + 30 * n for n in range(8)])
ALL = [Hardware, EarlyStop, Asynchronous]


@pytest.fixture(scope="module")
def target():
    model = tiny_target()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def drafter(target):
    """Random weights and confidences that vary from token to token."""
    torch.manual_seed(0)
    config = DSparkConfig(block_size=GAMMA, num_hidden_layers=1, markov_rank=8)
    drafter = get_drafter(target, config)
    torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=1.0)
    return drafter


@pytest.fixture
def calibrated(drafter):
    drafter.config.confidence_temperatures = [1.0] * GAMMA
    yield drafter
    drafter.config.confidence_temperatures = None


@pytest.fixture
def saved_profile(monkeypatch):
    """A profile that `generate` finds."""
    found = profile()
    monkeypatch.setattr(schedulers, "find_profile", lambda target, drafter: found)
    return found


def greedy(target, drafter, inputs, **options):
    return target.generate(**inputs, assistant_model=drafter, max_new_tokens=NEW_TOKENS, **options)


class Sure(Scheduler):
    """Notes what it is asked and told, and decides by the row's id."""

    needs_confidences = True

    def __init__(self) -> None:
        self.asked, self.told = [], []

    def wants_draft(self, rows, context):
        self.asked.append((tuple(rows), context))
        return len(self.asked) % 3 != 0

    def lengths(self, rows, context, confidences, limits):
        assert confidences.shape == (len(rows), GAMMA)
        assert ((confidences >= 0) & (confidences <= 1)).all()
        return [min(limit, 1 + row) for row, limit in zip(rows, limits, strict=True)]

    def record(self, rows, context, drafted, lengths, survived, emitted):
        self.told.append((tuple(rows), drafted, tuple(lengths), tuple(survived), emitted))


# --- what generation asks of a scheduler ---------------------------------------------------------------------------


def test_scheduler_sees_every_round(target, drafter):
    batch = Batch((5, 9, 12), target.config.vocab_size)
    scheduler = Sure()
    output = greedy(target, drafter, batch.inputs, dspark_scheduler=scheduler)
    assert torch.equal(output, target.generate(**batch.inputs, max_new_tokens=NEW_TOKENS))
    rounds = drafter.last_stats.rounds
    assert len(scheduler.told) == len(rounds)
    for entry, (rows, drafted, lengths, survived, emitted) in zip(rounds, scheduler.told, strict=True):
        assert (entry.rows, entry.drafted, entry.emitted) == (len(rows), drafted * len(rows), emitted)
        assert (lengths, survived) == (entry.verified_by_row, entry.survived_by_row)
        assert all(length <= 1 + row for row, length in zip(rows, entry.verified_by_row, strict=True))
    asked = [asked for asked in scheduler.asked]
    assert [rows for rows, _ in asked[: len(rounds)]] == [rows for rows, *_ in scheduler.told][: len(asked)]
    # Every third round was a plain one, in which each row got one token.
    assert all(entry.emitted == entry.rows for entry in rounds if not entry.drafted)
    assert sum(not entry.drafted for entry in rounds) >= len(asked) // 3
    assert asked[0][1] == 12 and sorted(context for _, context in asked) == [context for _, context in asked]


def test_states_of_plain_rounds_reach_the_drafter(target):
    """After rounds without a draft, drafts are those of a run that drafted all the time."""
    prompt = tiny_prompt(6)
    text = target.generate(prompt, max_new_tokens=NEW_TOKENS)[0].tolist()
    copy = make_noisy_copy(target).follow([text])  # asserts that it is given each position once

    class EveryOther(Scheduler):
        def __init__(self):
            self.rounds = 0

        def wants_draft(self, rows, context):
            self.rounds += 1
            return self.rounds % 2 == 0

    output = greedy(target, copy, {"input_ids": prompt}, dspark_scheduler=EveryOther())
    assert output[0].tolist() == text
    assert any(entry.accepted for entry in copy.last_stats.rounds)


@pytest.mark.parametrize("name", ["plain", "none of each", "two of each", "hardware", "early_stop", "asynchronous"])
@pytest.mark.parametrize("lengths", [(7,), (4, 9, 6)])
def test_greedy_text_stays(target, drafter, name, lengths):
    simple = {"plain": Plain(), "none of each": Fixed(0), "two of each": Fixed(2)}
    scheduler = simple[name] if name in simple else schedulers.SCHEDULERS[name](profile())
    batch = Batch(lengths, target.config.vocab_size)
    output = greedy(target, drafter, batch.inputs, dspark_scheduler=scheduler)
    assert torch.equal(output, target.generate(**batch.inputs, max_new_tokens=NEW_TOKENS))


# --- what they choose ----------------------------------------------------------------------------------------------


def decide(scheduler, confidences, limits=None, rows=None):
    confidences = np.asarray(confidences)
    count, width = confidences.shape
    rows = list(range(count)) if rows is None else rows
    assert scheduler.wants_draft(rows, 30)
    lengths = scheduler.lengths(rows, 30, confidences, limits or [width] * count)
    return lengths


@pytest.mark.parametrize("kind", ALL)
def test_steep_curve_verifies_nothing(kind):
    scheduler = kind(STEEP)
    for _ in range(3):
        lengths = decide(scheduler, [[0.9, 0.8, 0.7, 0.6]])
    assert lengths == [0]


def test_hopeless_tokens_are_not_verified():
    # A further token costs 0.5 of 10 seconds, so that it and those after it must be worth 1 in 20 each.
    rising = profile([10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 13.5])

    def first_choice(*confidences):
        return decide(Hardware(rising, outlook=Outlook(0.0)), confidences)

    assert first_choice([0.9, 0.5, 0.1, 0.9, 0.9, 0.9, 0.9]) == [2]
    assert first_choice([0.9, 0.5, 0.2, 0.9, 0.9, 0.5, 0.5]) == [5]
    assert first_choice([0.01, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]) == [0]
    # With a neighbour the time of a column is shared: 0.1 of plain decoding's tokens for both.
    assert first_choice([0.9, 0.5, 0.1, 0.9], [0.9, 0.9, 0.9, 0.9]) == [4, 4]


def test_draft_ends_where_the_next_token_is_not_worth_it():
    # A verified token costs 0.05 of plain decoding, a drafted one (3 - 2) / 6 / 10 = 0.017.
    scheduler = Hardware(profile([10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 13.5]), outlook=Outlook(0.0))
    goes_on = scheduler.goes_on([0], 30)
    assert [goes_on([[confidence]]) for confidence in (0.9, 0.1, 0.7)] == [True, True, False]
    goes_on = scheduler.goes_on([0, 1], 30)
    assert [goes_on([confidences]) for confidences in ([0.9, 0.9], [0.07, 0.1], [0.0, 0.9])] == [True, True, False]


def test_outlook_comes_from_the_rounds_before():
    # The first drafted token costs 0.9 of a plain round, the next ones nothing.
    jump = profile([10.0, 19.0, 19.0, 19.0, 19.0, 19.0, 19.0, 19.0])
    scheduler = Hardware(jump)
    sure, lost = [[0.7, *[0.95] * 6]], [[0.7, *[0.05] * 6]]
    assert decide(scheduler, sure) == decide(scheduler, lost) == [7]
    for _ in range(30):
        scheduler.outlook.record([7], [1])
    assert decide(scheduler, sure) == [0]
    for _ in range(30):
        scheduler.outlook.record([7], [7])
    assert decide(scheduler, lost) == [7]


def test_confidences_are_asked_for_where_history_leaves_a_doubt(target, drafter):
    rising = profile([10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 13.5])
    # On average 0.5, 0.25, 0.125, ... survive, and a column costs 0.05 and 0.017 of drafting: three are sure.
    steering = Hardware(rising, outlook=Outlook(0.5)).goes_on([0, 1], 30)
    assert steering.sure == 3
    assert not steering.columns and steering.promised([4, 2]) == pytest.approx(0.9375 + 0.75)
    assert not steering([[0.1, 0.1]] * 4)
    assert steering.promised([4, 2]) == pytest.approx(0.1111 + 0.11)
    # With no doubt there are no confidences at all, and with nothing else every one.
    asked = []
    heads = drafter.confidence_logits
    drafter.confidence_logits = lambda hidden, previous: asked.append(hidden.shape[1]) or heads(hidden, previous)
    try:
        for first, expected in ((0.99, set()), (0.0, {1})):
            asked.clear()
            hardware = Hardware(rising, outlook=Outlook(first, weight=1e9))
            output = greedy(target, drafter, {"input_ids": tiny_prompt(7)}, dspark_scheduler=hardware)
            assert torch.equal(output, target.generate(tiny_prompt(7), max_new_tokens=NEW_TOKENS))
            assert set(asked) == expected
    finally:
        del drafter.confidence_logits


def test_drafts_are_shorter(target, drafter):
    """In `generate`, too: some drafts end before γ, and the text stays."""
    prompt = tiny_prompt(7)
    costly = profile([10.0, 11.0, 12.0, 13.0, 14.0], draft=1.0)
    output = greedy(target, drafter, {"input_ids": prompt}, dspark_scheduler=Hardware(costly))
    assert torch.equal(output, target.generate(prompt, max_new_tokens=NEW_TOKENS))
    drafted = {entry.drafted for entry in drafter.last_stats.rounds if entry.drafted}
    assert len(drafted) > 1 and max(drafted) == GAMMA


def test_time_is_worth_more_where_drafting_pays():
    rising = profile([10.0 + n for n in range(8)], draft=1.0)
    scheduler = Hardware(rising)
    confidences = [[0.9, 0.3, 0.9, 0.9]]
    assert decide(scheduler, confidences) == [4]
    for _ in range(30):
        scheduler.record([0], 30, 4, [4], [4], emitted=5)
    assert scheduler.speed == pytest.approx(5 / (14 + 1.25) * 10, rel=0.05)
    assert decide(scheduler, confidences) == [1]
    for _ in range(60):
        scheduler.record([0], 30, 0, [0], [0], emitted=1)
    assert scheduler.speed == pytest.approx(1, abs=0.02)


def test_everything_else_counts_to_a_round():
    """What every round takes makes further tokens relatively cheap, and drafting pay where it would not."""
    rising = profile([10.0, 12.0, 14.0, 16.0, 18.0], draft=1.0)
    rest = replace(rising, draft=replace(rising.draft, plain_seconds=(((20.0,),) * len(rising.rows),)))
    confidences = [[0.5, 0.3, 0.9, 0.9]]
    assert decide(Hardware(rising, outlook=Outlook(0.0)), confidences) == [1]
    assert decide(Hardware(rest, outlook=Outlook(0.0)), confidences) == [4]
    # Three tokens a round, in 18 + 1.25 seconds against 10, and in 20 more of both.
    for costs, speed in ((rising, 3 / 1.925), (rest, 3 / (39.25 / 30))):
        scheduler = Hardware(costs)
        for _ in range(60):
            scheduler._promised = 2.0
            scheduler.record([0], 30, 4, [4], [2], emitted=3)
        assert scheduler.speed == pytest.approx(speed, rel=0.01)


def test_jump_at_the_first_token_is_no_barrier():
    jagged = profile([10.0, 18.0, 18.2, 18.4, 18.6, 18.8, 19.0, 19.2], draft=0.1)
    assert decide(Hardware(jagged), [[0.7] * 7])[0] > 4
    assert decide(EarlyStop(jagged), [[0.7] * 7]) == [0]


def test_budget_comes_from_the_rounds_before():
    scheduler = Asynchronous(profile())
    high, low = [[0.95] * 7], [[0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert decide(scheduler, low) == [1]  # warm-up: all that may survive
    decide(scheduler, low)
    assert decide(scheduler, high) == [0]
    assert decide(scheduler, high) == [0]
    assert decide(scheduler, high) == [7]


def test_shorter_context_and_more_rows_are_looked_up():
    by_context = CapacityProfile({}, (64, 640), (1, 2), (1, 2), (((1.0, 9.0), (1.0, 9.0)), ((1.0, 1.1), (1.0, 1.1))))
    by_context = CapacityProfile(
        **{**vars(by_context), "draft": DraftProfile({}, (1, 7), (((1.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 1.0))))}
    )
    scheduler = Hardware(by_context)
    assert scheduler.lengths([0], 64, [[0.5]], [1]) == [0]
    assert scheduler.lengths([0], 640, [[0.5]], [1]) == [1]


def test_drafter_that_is_always_wrong_is_skipped(target):
    prompt = tiny_prompt(5)
    plain = target.generate(prompt, max_new_tokens=200)
    wrong = [(token + 1) % target.config.vocab_size for token in plain[0].tolist()]
    copy = make_noisy_copy(target).follow([wrong])
    copy._proposal = lambda position, anchor, block: [0] * block
    scheduler = Hardware(profile())
    scheduler.needs_confidences, scheduler.goes_on = False, lambda rows, context: None
    scheduler.lengths = lambda rows, context, confidences, limits: list(limits)
    output = target.generate(prompt, assistant_model=copy, max_new_tokens=200, dspark_scheduler=scheduler)
    assert torch.equal(output, plain)
    drafted = sum(entry.drafted > 0 for entry in copy.last_stats.rounds)
    assert 0 < drafted < 0.15 * len(copy.last_stats.rounds)


def test_schedules_are_the_same_for_the_same_seed(target, calibrated, saved_profile):
    """Nothing that is measured on the way decides."""
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(greedy(target, calibrated, {"input_ids": tiny_prompt(6)}, do_sample=True))
    assert torch.equal(*texts)


# --- what the option takes -----------------------------------------------------------------------------------------


def resolved(target, drafter, choice=None, limited=False):
    return type(schedulers.resolve_scheduler(choice, target, drafter, limited))


def test_auto_is_hardware_where_it_can_be(target, calibrated, saved_profile):
    assert resolved(target, calibrated) is Hardware
    assert resolved(target, calibrated, "auto") is Hardware
    assert resolved(target, calibrated, "auto", limited=True) is Scheduler
    assert resolved(target, calibrated, "none") is Scheduler
    assert resolved(target, calibrated, "hardware", limited=True) is Hardware
    assert resolved(target, calibrated, "early_stop") is EarlyStop
    assert resolved(target, calibrated, "asynchronous") is Asynchronous


def test_auto_needs_calibration(target, drafter, saved_profile):
    assert resolved(target, drafter) is Scheduler
    assert resolved(target, drafter, "hardware") is Hardware


def test_auto_needs_a_profile_with_drafts(target, calibrated, monkeypatch):
    without = CapacityProfile({}, (64,), (1,), (1,), (((1.0,),),))
    for found in (None, without):
        monkeypatch.setattr(schedulers, "find_profile", lambda target, drafter, found=found: found)
        assert resolved(target, calibrated) is Scheduler
        with pytest.raises(ValueError, match=r"`dspark_scheduler` is 'hardware'.*dspark profile"):
            resolved(target, calibrated, "hardware")


def test_profile_that_cannot_be_used_is_said_by_name_only(target, calibrated, monkeypatch):
    def damaged(target, drafter):
        raise ValueError("it is damaged")

    monkeypatch.setattr(schedulers, "find_profile", damaged)
    assert resolved(target, calibrated) is Scheduler
    with pytest.raises(ValueError, match="it is damaged"):
        resolved(target, calibrated, "hardware")


def test_auto_is_the_default_of_generate(target, calibrated, saved_profile, monkeypatch):
    used = []
    monkeypatch.setattr(Hardware, "record", lambda self, *args: used.append(args))
    greedy(target, calibrated, {"input_ids": tiny_prompt(6)})
    assert used
    used.clear()
    greedy(target, calibrated, {"input_ids": tiny_prompt(6)}, dspark_verify_budget=3)
    assert not used


def test_custom_generate_takes_the_options(target, drafter):
    scheduler = Sure()
    target.generate(
        tiny_prompt(6),
        custom_generate=custom_generate(drafter),
        max_new_tokens=12,
        dspark_scheduler=scheduler,
        dspark_verify_budget=1,
    )
    assert scheduler.told
    assert max(entry.verified for entry in drafter.last_stats.rounds) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dspark_scheduler": "greedy"}, ValueError, r"`dspark_scheduler` is 'greedy'; give one of \['auto'"),
        ({"dspark_scheduler": 3}, TypeError, r"`dspark_scheduler` is 3"),
        ({"dspark_verify_budget": 0}, ValueError, r"`dspark_verify_budget` is 0; it must be at least 1"),
        ({"dspark_verify_budget": 2.5}, TypeError, r"`dspark_verify_budget` is 2.5"),
        ({"dspark_verify_budget": True}, TypeError, r"`dspark_verify_budget` is True"),
    ],
)
def test_bad_options_are_named(target, drafter, options, error, message):
    with pytest.raises(error, match=message):
        greedy(target, drafter, {"input_ids": tiny_prompt(6)}, **options)


def test_scheduler_without_confidence_head_is_refused(target):
    copy = make_noisy_copy(target)
    with pytest.raises(ValueError, match="no confidence head"):
        greedy(target, copy, {"input_ids": tiny_prompt(6)}, dspark_scheduler="hardware")
    assert resolved(target, copy) is Scheduler


# --- budgets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 7, 100])
@pytest.mark.parametrize("head", [True, False])
def test_budget_holds_over_the_batch(target, drafter, budget, head):
    if not head:
        torch.manual_seed(0)
        config = DSparkConfig(block_size=GAMMA, num_hidden_layers=1, markov_rank=8, enable_confidence_head=False)
        drafter = get_drafter(target, config)
    batch = Batch((4, 9, 6), target.config.vocab_size)
    plain = target.generate(**batch.inputs, max_new_tokens=NEW_TOKENS)
    assert torch.equal(greedy(target, drafter, batch.inputs, dspark_verify_budget=budget), plain)
    rounds = drafter.last_stats.rounds
    assert max(entry.verified for entry in rounds) == min(budget, 3 * GAMMA)


def test_budget_takes_the_likeliest(target, drafter):
    """Which tokens are verified follows the confidences of the drafter, across rows."""
    drafter.record_confidence = True
    try:
        batch = Batch((4, 9, 6), target.config.vocab_size)
        greedy(target, drafter, batch.inputs, dspark_verify_budget=4)
    finally:
        drafter.record_confidence = False
    entry = drafter.last_stats.rounds[0]
    survivals = np.cumprod(1 / (1 + np.exp(-np.array(entry.confidence_logits))), axis=1)
    best = sorted(itertools.product(range(3), range(GAMMA)), key=lambda rj: -survivals[rj])[:4]
    assert list(entry.verified_by_row) == [sum(row == index for row, _ in best) for index in range(3)]
