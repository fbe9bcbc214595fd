"""Sequential Temperature Scaling, and what is collected for it in real decoding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.evaluation import Observations, collect_observations, fit_temperatures
from dspark_hf.evaluation.calibration import GRID, mean_over_positions, report
from dspark_hf.evaluation.plots import plot_reliability
from dspark_hf.evaluation.scores import expected_calibration_error

from ..parity.fixtures import load_drafter, load_target, load_tensors

CASE = "qwen3-dspark-vanilla"
GAMMA = 7
TEMPERATURES = [2.0, 0.5, 1.5]


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def synthetic(temperatures: list[float], rounds: int = 6000, seed: int = 0, censored: bool = False) -> Observations:
    """Rounds in which logits divided by `temperatures` are exactly right, whole or cut at random before the end."""
    rng = np.random.default_rng(seed)
    right = rng.normal(1.2, 1.0, (rounds, len(temperatures)))
    accepted = rng.random(right.shape) < sigmoid(right)
    verified = rng.integers(0, len(temperatures) + 1, rounds) if censored else np.full(rounds, len(temperatures))
    survived = np.minimum(np.cumprod(accepted, axis=1).sum(axis=1), verified)
    return Observations(right * np.asarray(temperatures), verified, survived)


# --- which rounds say what -----------------------------------------------------------------------------------------


def test_labels_of_rounds():
    #                  three verified, none accepted; one of three; all of two; all of three; nothing verified
    rounds = Observations(np.zeros((5, 3)), np.array([3, 3, 2, 3, 0]), np.array([0, 1, 2, 3, 0]))
    reached = [rounds.reached(position).tolist() for position in range(3)]
    # Only where all before it survived does a token's own fate show, and only if it was verified.
    assert reached == [
        [True, True, True, True, False],
        [False, True, True, True, False],
        [False, False, False, True, False],
    ]
    # A prefix's fate is known wherever it was verified, also when it ended earlier.
    verified = [rounds.was_verified(position).tolist() for position in range(3)]
    assert verified == [[True] * 4 + [False], [True] * 4 + [False], [True, True, False, True, False]]
    assert [rounds.survives(position).sum() for position in range(3)] == [3, 2, 1]
    token, prefix = zip(*((entry.token, entry.prefix) for entry in report(rounds)))
    assert [(entry.cases, entry.share) for entry in token] == [(4, 0.75), (3, pytest.approx(2 / 3)), (1, 1.0)]
    assert [(entry.cases, entry.share) for entry in prefix] == [(4, 0.75), (4, 0.5), (3, pytest.approx(1 / 3))]
    # c = 1/2 everywhere: products are 1/2, 1/4, 1/8.
    assert [entry.ece for entry in prefix] == pytest.approx([0.25, 0.25, 1 / 3 - 1 / 8])
    assert token[2].auroc is None


def test_joining():
    parts = [synthetic(TEMPERATURES, rounds=4, seed=seed) for seed in range(3)]
    joined = Observations.join(parts)
    assert joined.logits.shape == (12, 3)
    assert joined.survived.tolist() == [count for part in parts for count in part.survived]
    assert joined.block_size == 3


# --- fitting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("censored", [False, True])
def test_known_temperatures_are_found(censored):
    fitted = fit_temperatures(synthetic(TEMPERATURES, rounds=20_000, censored=censored))
    assert fitted == pytest.approx(TEMPERATURES, rel=0.15)


@pytest.fixture(scope="module")
def fitted():
    return fit_temperatures(synthetic(TEMPERATURES))


def test_error_falls_to_what_chance_gives(fitted):
    fresh = synthetic(TEMPERATURES, seed=1)
    before, after = report(fresh), report(fresh, fitted)
    assert mean_over_positions(before) > 0.05
    assert mean_over_positions(after) < 1.5 * mean_over_positions(after, score="chance_ece")
    for old, new in zip(before, after):
        assert new.token.ece < old.token.ece
        assert new.token.brier < old.token.brier
        assert new.prefix.ece < old.prefix.ece
        # The order within a position is the same, so what only looks at order is too.
        assert new.token.auroc == old.token.auroc
        assert 0.5 < new.token.auroc < 1


def test_order_within_a_position_stays(fitted):
    fresh = synthetic(TEMPERATURES, rounds=200, seed=2)
    raw, calibrated = fresh.confidences(), fresh.confidences(fitted)
    assert (raw.argsort(axis=0) == calibrated.argsort(axis=0)).all()
    assert not np.allclose(raw, calibrated)


def test_each_temperature_is_the_best_with_those_before_it_fixed(fitted):
    rounds = synthetic(TEMPERATURES)
    product = np.ones(len(rounds.logits))
    for position, temperature in enumerate(fitted):
        logits = rounds.logits[:, position]
        # Every fifth will do.
        errors = [
            expected_calibration_error(product * sigmoid(logits / other), rounds.survived > position)
            for other in (temperature, *GRID[::5])
        ]
        assert errors[0] == pytest.approx(min(errors))
        product = product * sigmoid(logits / temperature)
    # What comes later changes nothing before.
    first = Observations(rounds.logits[:, :2], np.minimum(rounds.verified, 2), np.minimum(rounds.survived, 2))
    assert fit_temperatures(first) == fitted[:2]


def test_calibrated_confidences_keep_temperature_one():
    # All bins are right at any temperature: the one nearest to 1 is taken.
    rounds = Observations(np.zeros((4, 2)), np.full(4, 2), np.array([0, 0, 1, 2]))
    assert fit_temperatures(rounds) == [1.0, 1.0]


def test_position_that_was_never_verified():
    rounds = synthetic(TEMPERATURES, rounds=300)
    cut = Observations(rounds.logits, np.minimum(rounds.verified, 2), np.minimum(rounds.survived, 2))
    assert fit_temperatures(cut)[2] == 1.0
    assert report(cut)[2].token is report(cut)[2].prefix is None


def test_large_logits():
    assert Observations(np.array([[-1e4, 1e4]]), np.array([2]), np.array([0])).confidences().tolist() == [[0, 1]]


# --- collecting ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    model = load_target(CASE)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def drafter():
    return load_drafter(CASE)


@pytest.fixture(scope="module")
def prompt():
    return load_tensors(CASE)["input_ids"]


def test_labels_are_those_of_the_text(target, drafter, prompt):
    """Followed by hand: which drafted tokens are those of the greedy text, and what the head said about them."""
    seen = []

    embedded = []

    def embed(previous_ids):
        embedded.append(previous_ids)
        return type(drafter).embed_previous(drafter, previous_ids)

    def watch(hidden, embedding):
        logits = type(drafter).confidence_logits(drafter, hidden, embedding)
        seen.append((embedded[-1][0].tolist(), logits[0].tolist()))
        return logits

    drafter.embed_previous, drafter.confidence_logits = embed, watch
    options = {"max_new_tokens": 40, "do_sample": False}
    rounds = collect_observations(target, drafter, [prompt], **options)
    text = target.generate(input_ids=prompt, **options)[0].tolist() + [-1] * GAMMA
    assert rounds.logits.tolist() == [logits for _, logits in seen]
    assert len(set(rounds.survived.tolist())) > 3
    stats = drafter.last_stats.rounds
    for (anchor_and_drafts, _), entry, verified, survived in zip(seen, stats, rounds.verified, rounds.survived):
        start = entry.anchors[0]
        assert anchor_and_drafts[0] == text[start]
        # The last drafted token is not among what the head saw.
        right = [drafted == text[start + 1 + index] for index, drafted in enumerate(anchor_and_drafts[1:])]
        count = len(list(itertools.takewhile(bool, right)))
        assert min(survived, GAMMA - 1) == min(verified, count)
    assert not drafter.record_confidence


def test_whole_blocks_are_verified_whatever_the_confidence(target, drafter, prompt, monkeypatch):
    monkeypatch.setattr(target.generation_config, "dspark_confidence_threshold", 1.0, raising=False)
    monkeypatch.setattr(target.generation_config, "dspark_num_draft_tokens", 2, raising=False)
    rounds = collect_observations(target, drafter, [prompt], max_new_tokens=20, do_sample=False)
    assert rounds.block_size == rounds.verified[0] == GAMMA
    # Near the end there is room for fewer.
    assert rounds.verified[-1] < GAMMA
    assert (rounds.survived <= rounds.verified).all()


def test_sampled_rows(target, drafter, prompt):
    torch.manual_seed(0)
    rounds = collect_observations(
        target, drafter, [prompt, prompt[:, :5]], max_new_tokens=16, do_sample=True, num_return_sequences=3
    )
    alone = drafter.last_stats.rounds
    assert len(rounds.logits) > sum(entry.rows for entry in alone) > 3
    assert rounds.logits.dtype == float
    assert len(rounds.logits) == len(rounds.verified) == len(rounds.survived)


def test_temperatures_in_the_config_change_nothing_that_is_collected(target, drafter, prompt):
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = collect_observations(target, drafter, [prompt], **options)
    drafter.config.confidence_temperatures = [3.0] * GAMMA
    assert collect_observations(target, drafter, [prompt], **options).logits.tolist() == expected.logits.tolist()


def test_nothing_is_recorded_unless_asked_for(target, drafter, prompt):
    target.generate(input_ids=prompt, assistant_model=drafter, max_new_tokens=10, do_sample=False)
    assert {entry.confidence_logits for entry in drafter.last_stats.rounds} == {None}
    target.generate(
        input_ids=prompt, assistant_model=drafter, max_new_tokens=10, do_sample=False, dspark_confidence_threshold=0.5
    )
    assert {entry.confidence_logits for entry in drafter.last_stats.rounds} == {None}


def test_recording_ends_with_an_error(target, drafter, prompt):
    with pytest.raises(ValueError, match="beam search"):
        collect_observations(target, drafter, [prompt], max_new_tokens=4, num_beams=2, do_sample=False)
    assert not drafter.record_confidence


def test_nothing_to_collect(target, drafter, prompt):
    for prompts, options in (([], {}), ([prompt], {"max_new_tokens": 1}), ([prompt], {"max_new_tokens": 2})):
        with pytest.raises(ValueError, match="No drafted token was verified"):
            collect_observations(target, drafter, prompts, do_sample=False, **options)
    config = DSparkConfig(block_size=3, num_hidden_layers=1, enable_confidence_head=False)
    with pytest.raises(ValueError, match="no confidence head"):
        collect_observations(target, get_drafter(target, config), [prompt])


# --- using ---------------------------------------------------------------------------------------------------------


def test_threshold_cuts_by_calibrated_confidence(target, drafter, prompt):
    options = {"input_ids": prompt, "max_new_tokens": 30, "do_sample": False}

    def proposed(threshold):
        output = target.generate(assistant_model=drafter, dspark_confidence_threshold=threshold, **options)
        return output.tolist(), [entry.proposed for entry in drafter.last_stats.rounds]

    text, plain = proposed(0.8)
    drafter.config.confidence_temperatures = [2.0] * GAMMA
    # σ(z) >= 4/5 is σ(z / 2) >= 2/3.
    assert proposed(2 / 3) == (text, plain)
    other = proposed(0.8)
    assert other[0] == text
    assert sum(other[1]) / len(other[1]) < sum(plain) / len(plain)
    # Only the first position: nothing passes it.
    drafter.config.confidence_temperatures = [1e6, *[1.0] * (GAMMA - 1)]
    assert set(proposed(0.51)[1]) == {0}


def test_confidences_are_divided_by_position(drafter):
    logits = torch.tensor([[2.0, -4.0], [0.0, 6.0]])
    assert drafter.confidence_probs(logits).tolist() == logits.sigmoid().tolist()
    drafter.config.confidence_temperatures = [2.0, 4.0, *[1.0] * (GAMMA - 2)]
    expected = torch.tensor([[1.0, -1.0], [0.0, 1.5]]).sigmoid()
    torch.testing.assert_close(drafter.confidence_probs(logits), expected)
    torch.testing.assert_close(drafter.confidence_probs(logits[None]), expected[None])
    assert drafter.confidence_probs(logits.bfloat16()).dtype == torch.float32


# --- figure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [1, 3, 7])
def test_figure(tmp_path, positions):
    pytest.importorskip("matplotlib")
    rounds = synthetic([1.0] * positions, rounds=50)
    last = Observations(rounds.logits, np.minimum(rounds.verified, max(positions - 1, 1)), rounds.survived)
    plot_reliability(last, [2.0] * positions, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
