"""Blocks, loss, metrics and gradients of one training step against recorded values of DeepSpec.

Tolerance is 1e-4 absolute for values of the order of one. Logits reach 30 and losses sum up hundreds of them, so
where a value is larger the same bound is relative to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from dspark_hf import AutoDrafter, DSparkDrafter
from dspark_hf.training.anchors import (
    Anchors,
    Blocks,
    anchor_candidates,
    block_attention_mask,
    make_blocks,
    sample_anchors,
)
from dspark_hf.training.blockwise import blockwise_loss
from dspark_hf.training.losses import DSparkLoss, LossWeights, slot_weights
from dspark_hf.training.target_states import TargetStates, compute_target_states

pytestmark = pytest.mark.parity

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspec"
CASES = ("qwen3-dspark-vanilla", "qwen3-dspark-rnn", "qwen3-dflash", "gemma4-dspark-vanilla")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@dataclass
class Case:
    drafter: DSparkDrafter
    target: PreTrainedModel
    tensors: dict[str, torch.Tensor]
    record: dict[str, Any]
    anchors: Anchors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[f"train.{name}"]

    @property
    def weights(self) -> LossWeights:
        args = self.record["loss_args"]
        return LossWeights(
            ce=args["ce_loss_alpha"],
            tv=args["l1_loss_alpha"],
            confidence=args["confidence_head_alpha"],
            decay=args["loss_decay_gamma"],
        )

    def states(self) -> TargetStates:
        return TargetStates(self["target_features"], self["target_last_hidden"])

    def blocks(self) -> Blocks:
        config = self.drafter.config
        return make_blocks(self["input_ids"], self["loss_mask"], self.anchors, config.block_size, config.mask_token_id)

    def hidden(self) -> torch.Tensor:
        """`(batch, blocks, block, d)`, the backbone's output."""
        blocks, size = self.blocks(), self.drafter.config.block_size
        mask = block_attention_mask(self.anchors, self["input_ids"].shape[1], size)
        output = self.drafter(blocks.input_ids, self["target_features"], blocks.position_ids, mask)
        return output.last_hidden_state.unflatten(1, (-1, size))

    def loss(self, **options: Any) -> DSparkLoss:
        return blockwise_loss(
            self.drafter,
            self.drafter,
            self["input_ids"],
            self["loss_mask"],
            self.anchors,
            self.states(),
            self.weights,
            **options,
        )


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    folder = FIXTURES / request.param
    drafter = AutoDrafter.from_pretrained(folder / "drafter")
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    drafter.bind_target(target)
    tensors = load_file(folder / "expected.safetensors")
    record = json.loads((folder / "expected.json").read_text())
    anchors = Anchors(tensors["train.anchor_positions"], tensors["train.block_keep_mask"].bool())
    return Case(drafter, target, tensors, record, anchors)


def close(actual: torch.Tensor | float, expected: torch.Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(actual).float(), torch.as_tensor(expected).float(), **CLOSE)


def test_target_states(case: Case) -> None:
    ids = case["input_ids"]
    states = compute_target_states(case.target, case.drafter.config.target_layer_ids, ids, torch.ones_like(ids))
    close(states.context, case["target_features"])
    close(states.last, case["target_last_hidden"])


def test_anchors_and_blocks(case: Case) -> None:
    ids, loss_mask = case["input_ids"], case["loss_mask"]
    candidates = anchor_candidates(loss_mask)
    assert torch.equal(candidates, case["anchor_candidate_mask"].bool())
    drawn = sample_anchors(ids, torch.ones_like(ids), loss_mask, num_anchors=512, seed=0, step=0)
    assert drawn.keep.all() and torch.equal(drawn.positions[0], candidates[0].nonzero().squeeze(-1))

    blocks, kept = case.blocks(), case.anchors.keep
    assert torch.equal(blocks.eval_mask, case["eval_mask"].bool())
    assert torch.equal(blocks.labels[kept], case["target_ids"][kept])
    close(slot_weights(blocks.eval_mask, case.weights.decay), case["loss_weight_mask"])

    size = case.drafter.config.block_size
    mask = block_attention_mask(case.anchors, ids.shape[1], size)
    rows = kept.repeat_interleave(size, dim=1)
    assert torch.equal(mask[0, 0][rows[0]], case["dense_attention_mask"].bool()[0, 0][rows[0]])
    assert mask.any(dim=-1).all(), "a dummy block that sees nothing would give NaN"


def test_logits_and_confidence(case: Case) -> None:
    drafter, blocks, kept = case.drafter, case.blocks(), case.anchors.keep
    counted = blocks.eval_mask  # past the end of the sequence the target has nothing to say
    with torch.no_grad():
        hidden = case.hidden()
        assert hidden.isfinite().all()
        logits = drafter.sequential_logits(drafter.project(hidden), hidden, blocks.previous_ids)
        target_logits = drafter.project(case["target_last_hidden"][0][blocks.slots])
        close(logits[kept], case["draft_logits"][kept])
        close(target_logits[counted], case["aligned_target_logits"][counted])
        accept = 1 - (logits.softmax(-1) - target_logits.softmax(-1)).abs().sum(-1) / 2
        close(accept[counted], case["accept_rate"][counted])
        confidence = drafter.confidence_logits(hidden, drafter.embed_previous(blocks.previous_ids))
        if confidence is None:
            assert "train.confidence_pred" not in case.tensors
        else:
            close(confidence[kept], case["confidence_pred"][kept])


def test_loss_terms_and_metrics(case: Case) -> None:
    expected = case.record["train"]
    with torch.no_grad():
        result = case.loss()
    close(result.loss, expected["total_loss"])
    for name, value in expected["terms"].items():
        close(result.terms.get(name, torch.zeros(())), value)
    metrics = {name.removeprefix("train/"): value for name, value in expected["metrics"].items()}
    assert set(metrics) == set(result.metrics)
    for name, value in metrics.items():
        close(result.metrics[name], value)


@pytest.mark.parametrize("chunk_size", [None, 10])
def test_gradients(case: Case, chunk_size: int | None) -> None:
    drafter = case.drafter
    drafter.zero_grad()
    for own in (drafter.get_input_embeddings(), drafter.get_output_embeddings()):
        own.requires_grad_(False)
    case.loss(chunk_size=chunk_size).loss.backward()
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
