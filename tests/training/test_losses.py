from __future__ import annotations

import math

import pytest
import torch

from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training.losses import LossWeights, compare_distributions, dspark_loss, slot_weights


def test_distance_and_cross_entropy_by_hand() -> None:
    draft, target = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    ce, distance = compare_distributions(draft, target, torch.tensor([1]))
    assert ce.item() == pytest.approx(math.log(4))
    assert distance.item() == pytest.approx(0.5)


def test_loss_by_hand() -> None:
    eval_mask = torch.tensor([[True, True], [True, False], [False, False]])
    ce = torch.tensor([[1.0, 2.0], [3.0, 100.0], [100.0, 100.0]])
    distance = torch.tensor([[0.0, 1.0], [2.0, 0.3], [0.3, 0.3]])
    confidence = torch.zeros(3, 2)
    result = dspark_loss(ce, distance, confidence, eval_mask, LossWeights(ce=1, tv=2, confidence=3, decay=2.0))
    w = math.exp(-0.5)
    total = 2 + w
    expected = (1 + 2 * w + 3) + 2 * (w + 2) + 3 * math.log(2) * total
    assert result.loss.item() == pytest.approx(expected / total, rel=1e-5)
    metrics = {name: value.item() for name, value in result.metrics.items()}
    assert metrics["accept_rate@0"] == pytest.approx(0.5)  # 1 and 0
    assert metrics["accept_rate@1"] == pytest.approx(0.5)
    # One block is accepted to 1 + 1 + 0.5, the other to the bonus token alone; the third has no slot.
    assert metrics["tau_probabilistic"] == pytest.approx((2.5 + 1) / 2)
    assert metrics["confidence_bias"] == pytest.approx((-0.5 + 0.5 + 0 * w) / total, abs=1e-6)


def test_confidence_does_not_train_the_distributions() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    ce, distance = compare_distributions(logits, torch.randn(1, 3, 5), torch.zeros(1, 3, dtype=torch.long))
    eval_mask = torch.ones(1, 3, dtype=torch.bool)
    dspark_loss(ce, distance, torch.zeros(1, 3), eval_mask, LossWeights(ce=0, tv=0, confidence=1)).loss.backward()
    assert logits.grad is not None and not logits.grad.any()


def test_nothing_that_counts_is_a_loss_of_zero() -> None:
    ce = torch.ones(2, 3, requires_grad=True)
    eval_mask = torch.zeros(2, 3, dtype=torch.bool)
    result = dspark_loss(ce, ce.detach(), None, eval_mask, LossWeights())
    result.loss.backward()
    assert result.loss.item() == 0 and ce.grad is not None and not ce.grad.any()


@pytest.mark.parametrize("decay", [None, 0])
def test_no_decay(decay: float | None) -> None:
    assert slot_weights(torch.ones(1, 4), decay).tolist() == [[1.0] * 4]


@pytest.mark.parametrize(
    "options, names",
    [
        ({"num_anchors": 0}, "num_anchors.*at least 1"),
        ({"max_length": 1}, "max_length.*at least 2"),
        ({"loss_chunk_size": 0}, "loss_chunk_size.*at least 1"),
        ({"tv_weight": -1.0}, "tv_weight.*at least 0"),
        ({"ce_weight": math.nan}, "ce_weight.*at least 0"),
        ({"ce_weight": 0.0, "tv_weight": 0.0}, "both 0"),
        ({"loss_decay": -4.0}, "loss_decay.*at least 0"),
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
