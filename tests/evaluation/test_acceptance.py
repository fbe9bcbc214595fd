"""Accepted length, acceptance by position and wasted tokens: by hand, by definition, and of real decoding."""

from __future__ import annotations

import math

import evaluate
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_hf.embedded import load_embedded_pair, load_prompts
from dspark_hf.evaluation import Rounds, metric_path
from dspark_hf.evaluation.acceptance import predicted_length, rounds_by_row
from dspark_hf.evaluation.bootstrap import confidence_interval
from dspark_hf.evaluation.comparison import timed_generate
from dspark_hf.generation import GenerationStats, RoundStats

# Three verified and none kept; one of three kept; two of two; all three; nothing verified; an end after one of three
# that survived.
VERIFIED = [3, 3, 2, 3, 0, 3]
SURVIVED = [0, 1, 2, 3, 0, 3]
EMITTED = [1, 2, 3, 4, 1, 1]


def rounds(verified=VERIFIED, survived=SURVIVED, emitted=EMITTED):
    return Rounds(verified, survived, emitted)


def test_values_worked_out_by_hand():
    found = rounds()
    assert found.accepted_length == pytest.approx(12 / 6)
    assert found.conditional_acceptance() == pytest.approx([4 / 5, 3 / 4, 2 / 2])
    assert found.prefix_acceptance() == pytest.approx([4 / 5, 3 / 5, 2 / 4])
    assert found.predicted_length == pytest.approx(1 + 4 / 5 + 4 / 5 * 3 / 4 + 4 / 5 * 3 / 4)
    assert found.kept.tolist() == [0, 1, 2, 3, 0, 1]
    assert found.wasted.tolist() == [3, 2, 0, 0, 0, 2]
    assert found.acceptance_rate == pytest.approx(7 / 14)
    assert found.positions == 3 and len(found) == 6


def test_nothing_verified_and_nothing_at_all():
    found = rounds([0, 0], [0, 0], [1, 1])
    assert (found.accepted_length, found.predicted_length, found.positions) == (1, 1, 0)
    assert math.isnan(found.acceptance_rate) and found.conditional_acceptance() == []
    empty = Rounds.join([])
    assert len(empty) == 0 and math.isnan(empty.accepted_length)
    # A position that was verified and never reached has no conditional acceptance, and adds nothing.
    never = rounds([3], [0], [1])
    assert never.conditional_acceptance()[0] == 0 and np.isnan(never.conditional_acceptance()[1:]).all()
    assert never.prefix_acceptance() == [0, 0, 0] and never.predicted_length == 1


CASES = st.lists(
    st.integers(0, 5).flatmap(
        lambda verified: st.integers(0, verified).flatmap(
            lambda survived: st.tuples(st.just(verified), st.just(survived), st.integers(1, survived + 1))
        )
    ),
    min_size=1,
    max_size=25,
)


@given(CASES)
def test_definitions(cases):
    found = rounds(*zip(*cases))
    assert found.accepted_length == pytest.approx(sum(emitted for _, _, emitted in cases) / len(cases))
    expected = 1.0
    product = 1.0
    for position, share in enumerate(found.conditional_acceptance()):
        reached = [survived for verified, survived, _ in cases if verified > position and survived >= position]
        if not reached:
            assert math.isnan(share)
            break
        assert share == pytest.approx(sum(survived > position for survived in reached) / len(reached))
        product *= share
        expected += product
    assert found.predicted_length == pytest.approx(expected)
    kept = sum(min(survived, emitted) for _, survived, emitted in cases)
    assert int(found.wasted.sum()) == sum(verified for verified, _, _ in cases) - kept


@given(st.lists(st.integers(0, 4), min_size=1, max_size=25))
def test_prediction_is_exact_where_whole_blocks_are_verified(survived):
    found = rounds([4] * len(survived), survived, [count + 1 for count in survived])
    assert found.predicted_length == pytest.approx(found.accepted_length)


def test_counts_of_parts_add_up():
    found = rounds()
    parts = [
        Rounds(*(getattr(found, name)[piece] for name in ("verified", "survived", "emitted")))
        for piece in (slice(2), slice(2, 6))
    ]
    assert sum(part.position_counts(4) for part in parts).tolist() == found.position_counts(4).tolist()
    assert Rounds.join(parts).emitted.tolist() == EMITTED
    assert predicted_length([[0.5, 0.5], [1.0, np.nan]]) == pytest.approx([1.75, 2.0])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"verified": [1.5] * 6}, "`verified` has the shape .* and the type float64; give one list of whole numbers"),
        ({"survived": [0, 1]}, r"`survived` has the shape \(2,\)"),
        ({"verified": [[3]]}, "give one list"),
        ({"survived": [0, 1, 2, 3, 1, 3]}, "`survived` is more than `verified`"),
        ({"emitted": [2, 2, 3, 4, 1, 1]}, "`emitted` is more than `survived` and the bonus token"),
        ({"emitted": [-1, 2, 3, 4, 1, 1]}, "`emitted` has a negative number"),
    ],
)
def test_what_cannot_be(fields, says):
    with pytest.raises(ValueError, match=says):
        rounds(**fields)


# --- of real decoding ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    return load_embedded_pair()


def test_rounds_of_each_row_are_those_of_the_row_alone(pair):
    """Rows of different lengths, one of which ends at once; statistics of a batch do not say which rows took part."""
    target, tokenizer, drafter = pair
    texts = [prompt.text for prompt in load_prompts()[::40]] + ["\n"]
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False, "dspark_scheduler": "none"}
    whole = timed_generate(target, batch.input_ids, drafter, attention_mask=batch.attention_mask, **options)
    first = [text[0] for text in whole.texts]
    options |= {"eos_token_id": [first[3], whole.texts[0][9], whole.texts[1][16]], "pad_token_id": 0}
    run = timed_generate(target, batch.input_ids, drafter, attention_mask=batch.attention_mask, **options)
    assert len(set(run.tokens)) > 2 and run.tokens[3] == 1
    found = rounds_by_row(run.stats, run.tokens)
    assert len(found[3]) == 0
    for text, mine, tokens in zip(texts, found, run.tokens, strict=True):
        alone = timed_generate(target, tokenizer(text, return_tensors="pt").input_ids, drafter, **options)
        expected = Rounds.of(alone.stats)
        for name in ("verified", "survived", "emitted"):
            assert getattr(mine, name).tolist() == getattr(expected, name).tolist()
        assert mine.emitted.sum() == tokens - 1
    together = Rounds.of(run.stats)
    assert together.accepted_length == pytest.approx(run.stats.mean_accepted_length)
    assert together.acceptance_rate == pytest.approx(run.stats.acceptance_rate)
    assert together.verified.sum() == run.stats.total("verified") and together.kept.sum() == run.stats.total(
        "accepted"
    )


def test_statistics_of_another_call_are_refused():
    entry = RoundStats(1, 4, 4, 4, 1, 2, 0.1, 0.1, emitted_by_row=(2,), verified_by_row=(4,), survived_by_row=(1,))
    stats = GenerationStats([entry])
    assert rounds_by_row(stats, [3])[0].emitted.tolist() == [2]
    with pytest.raises(ValueError, match="a round of 1 rows where 2 are left"):
        rounds_by_row(stats, [3, 3])
    with pytest.raises(ValueError, match="another number of tokens"):
        rounds_by_row(stats, [4])


# --- as metrics of `evaluate` ----------------------------------------------------------------------------------------


def test_metric_of_accepted_length():
    metric = evaluate.load(metric_path("accepted_length"))
    result = metric.compute(verified=VERIFIED, survived=SURVIVED, emitted=EMITTED)
    assert result == {
        "accepted_length": pytest.approx(2.0),
        "predicted_accepted_length": pytest.approx(3.0),
        "conditional_acceptance": pytest.approx([0.8, 0.75, 1.0]),
        "prefix_acceptance": pytest.approx([0.8, 0.6, 0.5]),
    }


def test_metric_of_wasted_tokens():
    metric = evaluate.load(metric_path("wasted_tokens"))
    for piece in (slice(2), slice(2, 6)):
        metric.add_batch(verified=VERIFIED[piece], survived=SURVIVED[piece], emitted=EMITTED[piece])
    assert metric.compute() == {"wasted_tokens": 7, "verified_tokens": 14, "acceptance_rate": pytest.approx(0.5)}


# --- intervals -------------------------------------------------------------------------------------------------------


def ratio(sums):
    return sums[..., 0] / sums[..., 1]


def test_interval_is_the_percentile_bootstrap():
    """The same ends as drawing questions one by one, as far as draws can tell."""
    rng = np.random.default_rng(3)
    values = np.stack([rng.poisson(30, 40), rng.poisson(10, 40)], axis=1)
    low, high = confidence_interval(values, ratio, draws=20_000)
    draws = values[rng.integers(0, 40, (20_000, 40))].sum(axis=1)
    assert (low, high) == pytest.approx(tuple(np.quantile(ratio(draws), [0.025, 0.975])), rel=0.01)
    assert low < ratio(values.sum(axis=0)) < high
    assert confidence_interval(values, ratio).tolist() == confidence_interval(values, ratio).tolist()
    narrow = confidence_interval(values, ratio, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_interval_covers_the_truth():
    """In 95 of a hundred experiments, give or take what 400 of them can tell."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        lengths = rng.gamma(4.0, 1.0, 50)
        low, high = confidence_interval(lengths, lambda sums: sums / 50, draws=400)
        covered += low <= 4.0 <= high
    assert 0.90 < covered / 400 < 0.98


def test_interval_without_variation_without_questions_and_without_cases():
    assert confidence_interval(np.array([[3.0, 1.0]] * 5), ratio).tolist() == [3.0, 3.0]
    assert confidence_interval(np.array([[3.0, 1.0]]), ratio) is None
    # One of two figures exists in some draws only, and a third never.
    values = np.array([[[1, 2, 0], [1, 2, 0]], [[0, 0, 0], [2, 0, 0]]])
    with np.errstate(invalid="ignore"):
        ends = confidence_interval(values, lambda sums: sums[..., 0, :] / sums[..., 1, :])
        nothing = confidence_interval(np.zeros((3, 2)), ratio)
    assert ends[:, 0].tolist() == [0, 1] and ends[:, 1].tolist() == [1, 1]
    assert np.isnan(ends[:, 2]).all() and np.isnan(nothing).all()
