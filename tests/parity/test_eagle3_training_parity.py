"""The training-time test of EAGLE-3 against recorded values of DeepSpec: states, masks, losses, metrics, gradients.

Tolerances as in `test_training_parity.py`. The reference divides the sum of a step's losses by all positions of the
batch, ours by those that count; told to divide by the same, it is the same loss.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark_hf import Eagle3Drafter
from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training.losses import DSparkLoss, slot_weights
from dspark_hf.training.recurrent import Eagle3Objective, training_time_test
from dspark_hf.training.target_states import TargetStates, compute_target_states

from .fixtures import EAGLE3_CASE, load_drafter, load_json, load_target, load_tensors

pytestmark = pytest.mark.parity

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


class Case:
    """The drafter, its target and what was recorded, loaded once."""

    def __init__(self) -> None:
        self.drafter: Eagle3Drafter = load_drafter(EAGLE3_CASE)
        self.target = load_target(EAGLE3_CASE)
        self.drafter.bind_target(self.target)
        self.tensors, self.record = load_tensors(EAGLE3_CASE), load_json(EAGLE3_CASE)
        decay = self.record["model_args"]["step_loss_decay"]
        args = DSparkTrainingArguments(output_dir="unused", step_loss_decay=decay, use_cpu=True)
        self.objective = Eagle3Objective(self.drafter, args)
        self.batch = {name: self[name] for name in ("input_ids", "attention_mask", "loss_mask")}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[f"train.{name}"]

    def loss(self, **options: Any) -> DSparkLoss:
        states = TargetStates(self["target_hidden_states"], self["target_last_hidden_states"])
        return self.objective.loss(self.drafter, self.batch, states, **options)

    @property
    def total_weight(self) -> torch.Tensor:
        """What the reference divides by."""
        expected = self.record["train"]
        pairs = zip(expected["normalizers"], expected["step_weights"], strict=True)
        return torch.tensor(sum(count * weight for count, weight in pairs))


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(actual).float(), torch.as_tensor(expected).float(), **CLOSE)


def test_target_states(case: Case) -> None:
    layers = case.drafter.config.target_layer_ids
    states = compute_target_states(case.target, layers, case["input_ids"], case["attention_mask"])
    close(states.context, case["target_hidden_states"])
    close(states.last, case["target_last_hidden_states"])


def test_positions_that_count_and_weights_of_steps(case: Case) -> None:
    mask = case.objective.eval_mask(case.batch)
    assert torch.equal(mask[0].T, case["ttt_position_mask"].bool())
    expected = torch.tensor(case.record["train"]["step_weights"])
    weights = slot_weights(torch.ones(1, case.objective.steps), case.objective.weights.decay)[0]
    close(weights, expected)
    close(case.objective.weights.ce, expected.sum())


@torch.no_grad()
def test_draft_logits_of_every_step(case: Case) -> None:
    hidden = training_time_test(case.drafter, case.drafter, case["input_ids"], case["target_hidden_states"])
    logits = case.drafter.project(hidden)[0].transpose(0, 1)
    for step, expected in enumerate(case["ttt_draft_logits"]):
        # Behind these positions there are tokens to be read.
        close(logits[step, : -step - 1], expected[: -step - 1])


@torch.no_grad()
def test_loss_and_metrics(case: Case) -> None:
    expected = case.record["train"]
    close(case.loss(total_weight=case.total_weight).loss, expected["total_loss"])
    result = case.loss()
    counted = case["ttt_position_mask"].sum(dim=1)
    assert counted.unique().numel() == 1
    # With as many positions in every step ours is the sum over steps of each one's mean.
    close(result.loss, expected["total_loss"] * expected["normalizers"][0] / counted[0])
    close(result.metrics["loss"], result.loss)
    metrics = {name.removeprefix("train/"): value for name, value in expected["metrics"].items()}
    same = {name for name in metrics if name.startswith("accept_rate@")} | {"tau_probabilistic"}
    assert len(same) == 8
    for name in same:
        close(result.metrics[name], metrics[name])


@torch.no_grad()
def test_losses_of_single_steps(case: Case) -> None:
    """With the positions of one step only."""
    expected = case.record["train"]
    mask = case.objective.eval_mask
    for step, (value, count) in enumerate(zip(expected["step_losses"], expected["normalizers"], strict=True)):
        case.objective.eval_mask = lambda batch, step=step: mask(batch) & (torch.arange(7) == step)
        weight = expected["step_weights"][step]
        total = torch.tensor(count * sum(expected["step_weights"]))
        close(case.loss(total_weight=total).loss / weight, value)
    del case.objective.eval_mask


@pytest.mark.parametrize("memory", [512.0, 0.05])
def test_gradients(case: Case, memory: float) -> None:
    case.objective.args.loss_memory = memory
    is_chunked = case.objective.chunk_size < case["ttt_position_mask"].sum()
    assert is_chunked == (memory < 1)
    drafter = case.drafter
    drafter.zero_grad()
    for copied in (drafter.embed_tokens, drafter.lm_head):
        copied.requires_grad_(False)
    case.loss(total_weight=case.total_weight).loss.backward()
    grads = {name: parameter.grad for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    norms = case.record["train"]["grad_l2"]
    assert set(grads) == set(norms)
    for name, norm in norms.items():
        close(grads[name].norm(), norm)
    prefix = "train.grad."
    recorded = {name.removeprefix(prefix): grad for name, grad in case.tensors.items() if name.startswith(prefix)}
    assert recorded
    for name, grad in recorded.items():
        close(grads[name], grad)
