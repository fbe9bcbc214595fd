"""Calibration error, Brier score and AUROC: values worked out by hand, and the definitions followed literally."""

from __future__ import annotations

import evaluate
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_hf.evaluation.metrics import metric_path
from dspark_hf.evaluation.scores import (
    auroc,
    brier_score,
    chance_calibration_error,
    expected_calibration_error,
    reliability,
)

PREDICTIONS = [0.1, 0.15, 0.6, 0.6, 0.9, 1.0]
LABELS = [0, 1, 1, 0, 1, 1]

# Few different values, so that ties are common.
CASES = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.77, 1.0]), st.booleans()), min_size=1, max_size=30)


def test_values_worked_out_by_hand():
    # Two bins: (0.1, 0.15) with one of two, (0.6, 0.6, 0.9, 1.0) with three of four.
    assert expected_calibration_error(PREDICTIONS, LABELS, bins=2) == pytest.approx(
        (2 * abs(0.125 - 0.5) + 4 * abs(0.775 - 0.75)) / 6
    )
    assert brier_score(PREDICTIONS, LABELS) == pytest.approx((0.01 + 0.7225 + 0.16 + 0.36 + 0.01 + 0) / 6)
    # Of eight pairs, those of the four that happened with 0.1 and 0.6: all above 0.1; 0.15 below and a tie at 0.6.
    assert auroc(PREDICTIONS, LABELS) == pytest.approx((4 + 0 + 0.5 + 1 + 1) / 8)


def test_reliability_puts_edges_into_the_bin_above_and_one_into_the_last():
    curve = reliability([0.0, 0.25, 0.5, 0.99, 1.0], [0, 0, 1, 1, 0], bins=4)
    assert curve.counts.tolist() == [1, 1, 1, 2]
    assert curve.predicted.tolist() == [0.0, 0.25, 0.5, 0.995]
    assert curve.observed.tolist() == [0.0, 0.0, 1.0, 0.5]
    empty = reliability([0.1], [1], bins=2)
    assert np.isnan([empty.predicted[1], empty.observed[1]]).all()


@pytest.mark.parametrize(
    ("labels", "ece", "brier", "area"), [([0, 1], 0, 0, 1), ([1, 0], 1, 1, 0)], ids=["right", "wrong"]
)
def test_extremes(labels, ece, brier, area):
    assert expected_calibration_error([0.0, 1.0], labels) == ece
    assert brier_score([0.0, 1.0], labels) == brier
    assert auroc([0.0, 1.0], labels) == area


@given(CASES, st.integers(1, 25))
def test_definitions(cases, bins):
    probs, labels = [prob for prob, _ in cases], [int(label) for _, label in cases]
    error = 0.0
    for index in range(bins):
        inside = [(p, y) for p, y in zip(probs, labels) if min(int(p * bins), bins - 1) == index]
        if inside:
            error += abs(sum(p for p, _ in inside) - sum(y for _, y in inside)) / len(cases)
    assert expected_calibration_error(probs, labels, bins) == pytest.approx(error)
    assert brier_score(probs, labels) == pytest.approx(sum((p - y) ** 2 for p, y in zip(probs, labels)) / len(cases))
    pairs = [(p, q) for p, y in zip(probs, labels) if y for q, z in zip(probs, labels) if not z]
    area = auroc(probs, labels)
    if pairs:
        assert area == pytest.approx(sum((p > q) + 0.5 * (p == q) for p, q in pairs) / len(pairs))
    else:
        assert np.isnan(area)


def test_auroc_looks_at_the_order_only():
    scores = np.array([-3.0, 2.0, 2.0, 7.0])
    assert auroc(scores, [0, 0, 1, 1]) == auroc(np.exp(scores), [0, 0, 1, 1]) == pytest.approx(3.5 / 4)


def test_chance_is_what_right_predictions_show():
    rng = np.random.default_rng(0)
    probs = rng.random(2000)
    seen = expected_calibration_error(probs, rng.random(2000) < probs)
    chance = chance_calibration_error(probs)
    assert chance == pytest.approx(seen, rel=0.5)
    assert chance > 2 * chance_calibration_error(rng.random(20_000), draws=20)
    assert chance_calibration_error([0.0, 1.0]) == 0
    assert chance_calibration_error(probs) == chance


@pytest.mark.parametrize("score", [expected_calibration_error, brier_score, auroc])
@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ([], [], "`predictions` is empty"),
        ([0.5], [0, 1], r"has the shape \(1,\) and `references` \(2,\)"),
        ([[0.5]], [[1]], "one list of the same length"),
        ([float("nan")], [1], "not finite"),
        ([0.5], [2], "other values than 0 and 1"),
    ],
)
def test_wrong_arguments(score, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        score(predictions, references)


def test_scores_of_probabilities_refuse_other_numbers():
    for score in (expected_calibration_error, brier_score):
        with pytest.raises(ValueError, match=r"`predictions` go from 0.5 to 1.5; give probabilities"):
            score([0.5, 1.5], [0, 1])
    with pytest.raises(ValueError, match="`bins` is 0"):
        expected_calibration_error([0.5], [1], bins=0)


# --- as metrics of `evaluate` --------------------------------------------------------------------------------------


SCORES = {"auroc": auroc, "brier_score": brier_score, "expected_calibration_error": expected_calibration_error}


@pytest.mark.parametrize("name", SCORES)
def test_metric_loads_from_its_folder(name):
    metric = evaluate.load(metric_path(name))
    result = metric.compute(predictions=PREDICTIONS, references=LABELS)
    assert result == {name: pytest.approx(SCORES[name](PREDICTIONS, LABELS))}
    assert metric.description


def test_metric_takes_batches_and_bins():
    metric = evaluate.load(metric_path("expected_calibration_error"))
    for start in (0, 3):
        metric.add_batch(predictions=PREDICTIONS[start : start + 3], references=LABELS[start : start + 3])
    result = metric.compute(bins=2)["expected_calibration_error"]
    assert result == pytest.approx(expected_calibration_error(PREDICTIONS, LABELS, bins=2))


def test_unknown_metric():
    with pytest.raises(ValueError, match="`name` is 'f1'; choose one of"):
        metric_path("f1")
