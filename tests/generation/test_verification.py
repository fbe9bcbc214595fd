"""The acceptance rule by itself: against reference cases, and its exact law by enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch

from dspark_hf.generation.verification import _next_distribution, sample, verify_greedy, verify_sampled

from ..parity.fixtures import SAMPLING_CASE, load_json, load_tensors


@pytest.mark.parity
def test_reference_cases():
    tensors = load_tensors(SAMPLING_CASE)
    for unit in load_json(SAMPLING_CASE)["verify_unit"]:
        x1, x2, x3 = unit["draft"]
        draft_probs = torch.stack(
            [
                tensors["draft_probs_pos1"],
                tensors["draft_probs_pos2_given_x1"][x1],
                tensors["draft_probs_pos3_given_x2"][x2],
            ]
        )[None]
        target_probs = torch.stack(
            [
                tensors["target_probs_pos1"],
                tensors["target_probs_pos2_given_x1"][x1],
                tensors["target_probs_pos3_given_x1x2"][x1, x2],
                tensors["target_probs_pos4_given_x1x2x3"][x1, x2, x3],
            ]
        )[None]
        drafts = torch.tensor([unit["draft"]])
        verdict = verify_sampled(drafts, draft_probs, target_probs, torch.tensor([unit["uniforms"]]))
        assert verdict.accepted.tolist() == [unit["accepted"]]
        following = _next_distribution(verdict.accepted, draft_probs, target_probs)
        torch.testing.assert_close(following[0], torch.tensor(unit["next_token_dist"]), atol=1e-6, rtol=1e-5)


def random_distributions(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(2 * torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def law_of_two_tokens(q: list[torch.Tensor], p: list[torch.Tensor], draft_law: list[torch.Tensor]) -> torch.Tensor:
    """Exact law `(vocab, vocab)` of the first two tokens out of one round with two drafted tokens and the round after.

    `q[k]`, `p[k]` and `draft_law[k]` are conditional distributions given the k tokens before; drafts are drawn from
    `draft_law` and the rule is told `q`, so that the two differ where a fault is planted.
    """
    vocab = p[0].shape[0]
    law = torch.zeros(vocab, vocab, dtype=torch.float64)
    for x1, x2 in itertools.product(range(vocab), repeat=2):
        drafted = draft_law[0][x1] * draft_law[1][x1, x2]
        accept = [min(1.0, float(p[0][x1] / q[0][x1])), min(1.0, float(p[1][x1, x2] / q[1][x1, x2]))]
        draft_probs = torch.stack([q[0], q[1][x1]])[None]
        target_probs = torch.stack([p[0], p[1][x1], p[0]])[None]
        after_none = _next_distribution(torch.tensor([0]), draft_probs, target_probs)[0]
        after_one = _next_distribution(torch.tensor([1]), draft_probs, target_probs)[0]
        # The first was rejected: the second token comes from a later round, whose law is p by induction.
        law += drafted * (1 - accept[0]) * after_none[:, None] * p[1]
        law[x1] += drafted * accept[0] * (1 - accept[1]) * after_one
        law[x1, x2] += drafted * accept[0] * accept[1]
    return law


@pytest.fixture
def distributions():
    p = [random_distributions(5, seed=0), random_distributions(5, 5, seed=1)]
    q = [random_distributions(5, seed=2), random_distributions(5, 5, seed=3)]
    return p, q


def test_law_is_the_targets(distributions):
    p, q = distributions
    torch.testing.assert_close(law_of_two_tokens(q, p, draft_law=q), p[0][:, None] * p[1], atol=1e-12, rtol=0)


def test_law_shows_a_planted_bias(distributions):
    p, q = distributions
    sharper = [torch.softmax(q[0].log() * 2, -1), torch.softmax(q[1].log() * 2, -1)]
    assert (law_of_two_tokens(q, p, draft_law=sharper) - p[0][:, None] * p[1]).abs().max() > 1e-2


def test_sampled_rule_draws_what_the_enumeration_says(distributions):
    p, q = distributions
    torch.manual_seed(0)
    count = 200_000
    x1 = torch.multinomial(q[0].expand(count, -1), 1)
    x2 = torch.multinomial(q[1][x1[:, 0]], 1)
    drafts = torch.cat([x1, x2], dim=1)
    draft_probs = torch.stack([q[0].expand(count, -1), q[1][x1[:, 0]]], dim=1)
    target_probs = torch.stack([p[0].expand(count, -1), p[1][x1[:, 0]], p[0].expand(count, -1)], dim=1)
    verdict = verify_sampled(drafts, draft_probs, target_probs)
    first = torch.where(verdict.accepted > 0, drafts[:, 0], verdict.next_ids)
    observed = torch.bincount(first, minlength=5).double() / count
    assert (observed - p[0]).abs().max() < 5 * (0.25 / count) ** 0.5


def test_rows_are_independent():
    scores = torch.zeros(2, 3, 4)
    scores[0, :, 1] = 1
    scores[1, :, 2] = 1
    verdict = verify_greedy(torch.tensor([[1, 1], [2, 3]]), scores)
    assert verdict.accepted.tolist() == [2, 1]
    assert verdict.next_ids.tolist() == [1, 2]


def test_equal_distributions_never_reject():
    probs = torch.softmax(torch.randn(1, 4, 50), -1)
    drafts = torch.multinomial(probs[0, :3], 1).T
    verdict = verify_sampled(drafts, probs[:, :3], probs, uniforms=torch.full((1, 3), 1 - 1e-7))
    assert verdict.accepted.tolist() == [3]


def test_token_impossible_for_the_target_is_rejected():
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    verdict = verify_sampled(torch.tensor([[0]]), torch.tensor([[[0.9, 0.1]]]), target, torch.zeros(1, 1))
    assert verdict.accepted.tolist() == [0]
    assert verdict.next_ids.tolist() == [1]


@pytest.mark.parametrize("vocab", [5, 300_000])
def test_sample_follows_the_distribution(vocab):
    torch.manual_seed(0)
    count = 400 if vocab > 1000 else 100_000
    probs = torch.zeros(vocab)
    places = torch.tensor([1, vocab // 2, vocab - 2])
    probs[places] = torch.tensor([0.2, 0.5, 0.3])
    drawn = sample(probs.expand(count, -1))
    shares = torch.stack([(drawn == place).float().mean() for place in places])
    assert shares.sum() == 1, "a token of probability zero"
    assert (shares - probs[places]).abs().max() < 5 * (0.25 / count) ** 0.5
    assert sample(torch.tensor([[0.5, torch.nan], [0.0, 1.0]])).tolist() == [-1, 1]
