from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dspark_hf import DSparkConfig, DSparkDrafter, get_drafter
from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training.losses import (
    Comparison,
    LossWeights,
    compare_blocks,
    compare_distributions,
    dspark_loss,
    slot_weights,
    slots_within,
)
from dspark_hf.training.normaliser import complete

from ..tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_target

BLOCKS, BLOCK = 6, 4


def test_distance_and_cross_entropy_by_hand() -> None:
    draft, target = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    ce, distance, gradient = compare_distributions(draft, target, torch.tensor([1]))
    assert ce.item() == pytest.approx(math.log(4))
    assert distance.item() == pytest.approx(0.5)
    assert gradient is None


def reduced(target: torch.Tensor, draft_ids: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the draft vocabulary, and what is known of the others."""
    if draft_ids is None:
        return target, {}
    known = torch.isin(target.argmax(-1), draft_ids)
    return target[..., draft_ids], {"log_sum": target.logsumexp(-1), "is_known": known}


def test_distance_of_a_reduced_vocabulary_by_hand() -> None:
    """The target's probabilities are not renormalised: what the drafter never proposes is never accepted."""
    draft, target = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.4, 0.1, 0.2, 0.3]]).log()
    logits, known = reduced(target + 7.0, torch.tensor([0, 2]))
    _, distance, _ = compare_distributions(draft, logits, torch.tensor([0]), **known)
    assert 1 - distance.item() / 2 == pytest.approx(0.4 + 0.2)


def test_soft_cross_entropy_by_hand() -> None:
    """Of a reduced vocabulary the target's probabilities are renormalised, where its likeliest token is in it."""
    draft, target = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.4, 0.1, 0.2, 0.3]).log()
    for draft_ids, expected in (([0, 2], math.log(2)), ([1, 3], 0.0)):
        logits, known = reduced(target[None] - 3.0, torch.tensor(draft_ids))
        ce, _, _ = compare_distributions(draft[None], logits, **known)
        assert ce.item() == pytest.approx(expected)
    draft = torch.tensor([0.25, 0.25, 0.25, 0.25]).log()
    assert compare_distributions(draft[None], target[None])[0].item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, 12, 2)], ids=["whole", "reduced"])
@pytest.mark.parametrize("is_soft", [False, True], ids=["hard", "soft"])
def test_formed_gradient(draft_ids: torch.Tensor | None, is_soft: bool) -> None:
    """Of both terms at once, against autograd."""
    torch.manual_seed(0)
    tokens = torch.arange(12) if draft_ids is None else draft_ids
    draft, target = torch.randn(9, len(tokens), requires_grad=True), torch.randn(9, 12)
    labels = None if is_soft else torch.randint(len(tokens), (9,))
    weights = torch.rand(2, 9)
    p, log_q = target.softmax(-1), draft.log_softmax(-1)
    inside = p[:, tokens]
    known = torch.isin(p.argmax(-1), tokens)
    assert known.all() == (draft_ids is None) and known.any()
    if labels is None:
        ce = -(inside / inside.sum(-1, keepdim=True) * log_q).sum(-1) * known
    else:
        ce = -log_q.gather(-1, labels[:, None])[:, 0]
    distance = (log_q.exp() - inside).abs().sum(-1) + 1 - inside.sum(-1)
    (expected,) = torch.autograd.grad((weights * torch.stack([ce, distance])).sum(), draft)
    logits, known = reduced(target, draft_ids)
    found = compare_distributions(draft, logits, labels, weights=weights, **known)
    for actual, wanted in zip(found, (ce.detach(), distance.detach(), expected), strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def test_loss_by_hand() -> None:
    eval_mask = torch.tensor([[True, True], [True, False], [False, False]])
    ce = torch.tensor([[1.0, 2.0], [3.0, 100.0], [100.0, 100.0]])
    distance = torch.tensor([[0.0, 1.0], [2.0, 0.3], [0.3, 0.3]])
    w = math.exp(-0.5)
    of_tokens = (1 + 2 * w + 3) + 2 * (w + 2)
    compared = Comparison(torch.tensor(of_tokens), ce, distance)
    result = dspark_loss(compared, torch.zeros(3, 2), eval_mask, LossWeights(ce=1, tv=2, confidence=3, decay=2.0))
    total = 2 + w
    expected = of_tokens + 3 * math.log(2) * total
    assert result.loss.item() == pytest.approx(expected / total, rel=1e-5)
    metrics = {name: value.item() for name, value in result.metrics.items()}
    assert metrics["loss"] == pytest.approx(expected / total, rel=1e-5)
    assert metrics["ce_loss"] == pytest.approx((1 + 2 * w + 3) / total)
    assert metrics["l1_loss"] == pytest.approx((w + 2) / total)
    assert metrics["accept_rate@0"] == pytest.approx(0.5)  # 1 and 0
    assert metrics["accept_rate@1"] == pytest.approx(0.5)
    # One block is accepted to 1 + 1 + 0.5, the other to the bonus token alone; the third has no slot.
    assert metrics["tau_probabilistic"] == pytest.approx((2.5 + 1) / 2)
    assert metrics["confidence_bias"] == pytest.approx((-0.5 + 0.5 + 0 * w) / total, abs=1e-6)


# --- chunks against full logits --------------------------------------------------------------------------------------


def make_drafter(family: str = "qwen3", own_head: bool = False, reduced: bool = False, **options: Any) -> Any:
    """A drafter whose sequential head does something, and the target that it is bound to."""
    target = tiny_target(family).requires_grad_(False)
    if reduced:
        options["draft_vocab_size"] = VOCAB_SIZE // 2
    config = DSparkConfig(num_hidden_layers=1, block_size=BLOCK, **{"markov_rank": 8, **options})
    drafter = get_drafter(target, config, draft_tokens=range(0, VOCAB_SIZE, 2) if reduced else None)
    if own_head:
        drafter.copy_target_embeddings()
    if drafter.markov_head is not None:
        torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    return drafter, target


def make_slots() -> tuple[torch.Tensor, ...]:
    """Hidden states, tokens before, the target's states, tokens after, and the slots that count."""
    torch.manual_seed(1)
    hidden, target_hidden = torch.randn(2, BLOCKS, BLOCK, HIDDEN_SIZE)
    previous_ids, labels = torch.randint(VOCAB_SIZE, (2, BLOCKS, BLOCK))
    eval_mask = torch.arange(BLOCK) < torch.tensor([4, 4, 2, 4, 0, 3]).unsqueeze(1)
    return hidden.requires_grad_(), previous_ids, target_hidden, labels, eval_mask


def full_logits(
    drafter: DSparkDrafter,
    hidden: torch.Tensor,
    previous_ids: torch.Tensor,
    target_hidden: torch.Tensor,
    labels: torch.Tensor,
    eval_mask: torch.Tensor,
    weights: LossWeights,
) -> Comparison:
    """What `compare_blocks` computes, all at once and with nothing but autograd."""
    logits = drafter.over_vocabulary(drafter.sequential_logits(drafter.project(hidden), hidden, previous_ids))
    draft = logits.float().log_softmax(-1)
    ce = -draft.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    ce = ce.where(ce.isfinite() & eval_mask, 0)
    with torch.no_grad():
        target = drafter.target_logits(target_hidden).float().softmax(-1)
    distance = (draft.exp() - target).abs().sum(-1).where(eval_mask, 0)
    loss = (slot_weights(eval_mask, weights.decay) * (weights.ce * ce + weights.tv * distance)).sum()
    return Comparison(loss, ce.detach(), distance.detach())


def gradients(loss: torch.Tensor, hidden: torch.Tensor, drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    """Of what the loss reaches; a factor stands for what comes after it."""
    hidden.grad = None
    drafter.zero_grad()
    (loss * 0.3).backward()
    named = {"hidden": hidden, **dict(drafter.named_parameters())}
    return {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"markov_rank": 0},
        {"family": "gemma4"},
        {"own_head": True},
        {"reduced": True},
        {"family": "gemma4", "own_head": True, "reduced": True, "markov_head_type": "rnn"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "vanilla",
)
@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(ce=1.0, tv=0.0)], ids=["dspark", "dflash"])
def test_chunks_equal_full_logits(options: dict[str, Any], weights: LossWeights) -> None:
    drafter, target = make_drafter(**options)
    hidden, *rest = make_slots()
    if drafter.lm_head is not None:
        drafter.lm_head.requires_grad_(True)
    expected = full_logits(drafter, hidden, *rest, weights)
    expected_gradients = gradients(expected.loss, hidden, drafter)
    for chunk_size in (1, 5, None):
        actual = compare_blocks(drafter, hidden, *rest, weights, chunk_size=chunk_size)
        torch.testing.assert_close(actual.__dict__, expected.__dict__, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradients(actual.loss, hidden, drafter), expected_gradients, atol=1e-5, rtol=1e-5)
    assert ("lm_head.weight" in expected_gradients) == ("own_head" in options)
    with torch.no_grad():
        scored = compare_blocks(drafter, hidden, *rest, weights, chunk_size=5)
    torch.testing.assert_close(scored.__dict__, expected.__dict__, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"family": "gemma4", "own_head": True}], ids=["shared", "own"])
def test_whole_head_is_spared(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the normaliser given, the target's LM head runs for the draft vocabulary only, and nothing else changes."""
    drafter, target = make_drafter(reduced=True, **options)
    hidden, *rest = make_slots()
    _, target_hidden, _, eval_mask = rest
    expected = compare_blocks(drafter, hidden, *rest, LossWeights())
    expected_gradients = gradients(expected.loss, hidden, drafter)
    known = complete(None, eval_mask, drafter.target_logits, target_hidden, chunk_size=3)
    assert torch.equal(known.log_sum.isnan(), ~eval_mask)
    monkeypatch.setattr(drafter, "target_logits", None)
    target.get_output_embeddings().register_forward_hook(lambda *_: pytest.fail("the whole LM head was run"))
    actual = compare_blocks(drafter, hidden, *rest, LossWeights(), known, 5)
    torch.testing.assert_close(actual.__dict__, expected.__dict__)
    torch.testing.assert_close(gradients(actual.loss, hidden, drafter), expected_gradients)


def test_each_position_is_normalised_once() -> None:
    torch.manual_seed(0)
    last, head = torch.randn(2, 7, 5), torch.randn(5, 11)
    sizes = []

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden @ head

    used = torch.rand(2, 7) < 0.6
    first = complete(None, used, logits_of, last, chunk_size=4)
    assert max(sizes) <= 4 and sum(sizes) == used.sum()
    logits = last @ head
    torch.testing.assert_close(first.log_sum[used], logits.logsumexp(-1)[used])
    assert torch.equal(first.likeliest[used], logits.argmax(-1)[used])
    kept = first.log_sum.clone()
    sizes.clear()
    second = complete(first, torch.ones_like(used), logits_of, last, chunk_size=4)
    assert sum(sizes) == (~used).sum() and not second.log_sum.isnan().any()
    torch.testing.assert_close(first.log_sum, kept, equal_nan=True)
    sizes.clear()
    assert complete(second, used, logits_of, last, chunk_size=4) is second and not sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Under autocast, or all of the model in bfloat16: the same up to its rounding, gradients in their dtype."""
    drafter, target = make_drafter(own_head=True)
    drafter.lm_head.requires_grad_(True)
    hidden, *rest = make_slots()
    exact = gradients(full_logits(drafter, hidden, *rest, LossWeights()).loss, hidden, drafter)
    drafter.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        compared = compare_blocks(drafter, hidden, *rest, LossWeights(), chunk_size=5)
    rounded = gradients(compared.loss, hidden, drafter)
    assert compared.loss.dtype == torch.float32 and set(rounded) == set(exact)
    for name, gradient in rounded.items():
        assert gradient.dtype == (torch.float32 if name == "hidden" else dtype)
        assert (gradient - exact[name]).norm() < 0.05 * exact[name].norm()


def test_logits_of_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, target = make_drafter()
    hidden, *rest = make_slots()
    sizes = []
    project = drafter._logits
    monkeypatch.setattr(drafter, "_logits", lambda *inputs: sizes.append(len(inputs[1])) or project(*inputs))
    loss = compare_blocks(drafter, hidden, *rest, LossWeights(), chunk_size=5).loss
    assert max(sizes) <= 5 and sum(sizes) == 2 * rest[-1].sum(), "slots that do not count are left out"
    sizes.clear()
    loss.backward()
    assert sizes == [], "nothing is computed again"
    assert drafter.markov_head.markov_w2.weight.grad.any()


def test_slots_within() -> None:
    assert slots_within(1.0, vocab_size=2**10) == 2**20 // (5 * 2**12)
    assert slots_within(1e-6, vocab_size=2**10) == 1


def test_confidence_does_not_train_the_distributions() -> None:
    drafter, target = make_drafter()
    hidden, *rest = make_slots()
    weights = LossWeights(ce=0, tv=0, confidence=1)
    compared = compare_blocks(drafter, hidden, *rest, weights)
    result = dspark_loss(compared, torch.zeros(BLOCKS, BLOCK), rest[-1], weights)
    assert result.loss.item() > 0
    found = gradients(result.loss, hidden, drafter)
    assert {"hidden", "markov_head.markov_w2.weight"} <= set(found)
    assert not any(gradient.any() for gradient in found.values())


def test_nothing_that_counts_is_a_loss_of_zero() -> None:
    drafter, target = make_drafter()
    hidden, *rest, eval_mask = make_slots()
    eval_mask = torch.zeros_like(eval_mask)
    compared = compare_blocks(drafter, hidden, *rest, eval_mask, LossWeights())
    result = dspark_loss(compared, None, eval_mask, LossWeights())
    found = gradients(result.loss, hidden, drafter)
    assert result.loss.item() == 0
    # Every process must reach every parameter, also where its batch has nothing to say.
    assert {"hidden", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} == set(found)
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("decay", [None, 0])
def test_no_decay(decay: float | None) -> None:
    assert slot_weights(torch.ones(1, 4), decay).tolist() == [[1.0] * 4]


@pytest.mark.parametrize(
    "options, names",
    [
        ({"num_anchors": 0}, "num_anchors.*at least 1"),
        ({"max_length": 1}, "max_length.*at least 2"),
        ({"loss_memory": 0.0}, "loss_memory.*positive"),
        ({"tv_weight": -1.0}, "tv_weight.*at least 0"),
        ({"ce_weight": math.nan}, "ce_weight.*at least 0"),
        ({"ce_weight": 0.0, "tv_weight": 0.0}, "both 0"),
        ({"loss_decay": -4.0}, "loss_decay.*at least 0"),
        ({"step_loss_decay": 0.0}, "step_loss_decay.*above 0 and at most 1"),
        ({"step_loss_decay": 1.1}, "step_loss_decay.*above 0 and at most 1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size.*at least 1"),
        ({"learning_rate": 0.0}, "learning_rate.*positive"),
        ({"num_train_epochs": 0}, "num_train_epochs.*positive"),
        ({"logging_steps": 0}, "logging_steps.*positive"),
        ({"save_steps": -1}, "save_steps.*positive"),
        ({"seed": -1}, "seed.*from 0 to"),
        ({"output_dir": ""}, "output_dir.*empty"),
        ({"output_dir": __file__}, "output_dir.*is a file; give a folder"),
        ({"output_dir": f"{__file__}/drafter"}, "output_dir.*is a file; give a folder"),
        ({"remove_unused_columns": True}, "remove_unused_columns.*loss_mask"),
    ],
)
def test_bad_arguments(options: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        DSparkTrainingArguments(**{"output_dir": "unused", **options})


def test_steps_that_are_not_used_may_be_anything() -> None:
    DSparkTrainingArguments(
        output_dir="unused", logging_strategy="no", logging_steps=0, save_strategy="no", save_steps=0
    )
