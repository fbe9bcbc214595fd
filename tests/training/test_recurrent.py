"""Losses of recurrent drafters: the same as if each position drafted on its own, in the way that generation does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from dspark_hf.models import RecurrentDrafter
from dspark_hf.training import DSparkTrainer, TargetStates, compute_target_states
from dspark_hf.training.objective import Objective
from dspark_hf.training.recurrent import Eagle3Objective, MTPObjective, ahead, training_time_test

from ..recurrent import make_recurrent
from ..tiny import VOCAB_SIZE, tiny_prompt, tiny_target
from .test_trainer import make_args, make_drafter

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3"},
    "mtp": {"kind": "mtp"},
    "mtp-one-step": {"kind": "mtp", "block_size": 1},
    "eagle3-two-layers": {"kind": "eagle3", "num_hidden_layers": 2},
    "eagle3-sliding": {"kind": "eagle3", "layer_types": ["sliding_attention"], "sliding_window": 3},
    "eagle3-gemma4": {"kind": "eagle3", "family": "gemma4"},
    "eagle3-reduced": {"kind": "eagle3", "draft_vocab_size": VOCAB_SIZE // 2},
    "eagle3-own-head": {"kind": "eagle3", "draft_vocab_size": VOCAB_SIZE // 2, "share_target_head": False},
    "mtp-reduced": {"kind": "mtp", "draft_vocab_size": VOCAB_SIZE // 2},
}


def make_case(
    folder: Path, kind: str, family: str = "qwen3", **fields: Any
) -> tuple[RecurrentDrafter, PreTrainedModel, Objective]:
    """A drafter with random weights, its target and its objective, with so many logits at a time as 5 slots have.

    Those of a reduced vocabulary have half as many.
    """
    target = tiny_target(family).requires_grad_(False)
    tokens = range(0, VOCAB_SIZE, 2) if "draft_vocab_size" in fields else None
    drafter = make_recurrent(target, kind, tokens, **{"block_size": STEPS, **fields}).train()
    args = make_args(folder, step_loss_decay=0.7, loss_memory=5 * 5 * 4 * VOCAB_SIZE / 2**20)
    objective = {"eagle3": Eagle3Objective, "mtp": MTPObjective}[kind](drafter, args)
    assert objective.chunk_size == (5 if tokens is None else 10)
    return drafter, target, objective


def make_batch() -> dict[str, torch.Tensor]:
    """Two rows, one of them padded, with a hole in what is trained on."""
    attention_mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1], [1] * 9])
    return {"input_ids": tiny_prompt(9, batch=2), "attention_mask": attention_mask, "loss_mask": loss_mask}


def states_of(target: PreTrainedModel, drafter: RecurrentDrafter, batch: dict[str, torch.Tensor]) -> TargetStates:
    layers: Any = drafter.config.target_layer_ids
    return compute_target_states(target, layers, batch["input_ids"], batch["attention_mask"])


def draft_alone(drafter: RecurrentDrafter, ids: torch.Tensor, states: torch.Tensor, position: int) -> torch.Tensor:
    """Logits `(steps, vocab)` of the tokens drafted behind `ids[: position + 2]`, step by step through a cache."""
    cache, logits = drafter.make_cache(), []
    place = torch.arange(position + 1)[None]
    output = drafter(ids[None, 1 : position + 2], drafter.fuse(states[None, : position + 1]), place, cache=cache)
    for step in range(drafter.config.block_size):
        logits.append(output.logits[0, -1])
        following = position + step + 2
        if following >= len(ids):
            break
        place = torch.tensor([[position + step + 1]])
        output = drafter(ids[None, following : following + 1], output.features[:, -1:], place, cache=cache)
    return torch.stack(logits)


def loss_alone(drafter: RecurrentDrafter, target: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of the batch from its definition: position by position, with whole distributions and autograd."""
    is_eagle3 = drafter.config.model_type == "dspark_eagle3"
    steps, tokens = drafter.config.block_size, drafter.draft_ids
    weights = [0.7**step if is_eagle3 else 1 / steps for step in range(steps)]
    losses: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    states = states_of(target, drafter, batch)
    for row, mask in enumerate(batch["loss_mask"]):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        probs = target(ids[None]).logits[0].softmax(-1)
        for position in range(length - 1):
            for step, logits in enumerate(draft_alone(drafter, ids, states.context[row], position)):
                log_q, place = logits.log_softmax(-1), position + step
                if is_eagle3 and mask[place] and place + 1 < length:
                    p = probs[place + 1, tokens]
                    is_known = probs[place + 1].argmax() in tokens
                    losses[step].append(-(p / p.sum() * log_q).sum() if is_known else log_q[0] * 0)
                if not is_eagle3 and place + 2 < length and mask[place + 2]:
                    label = (tokens == ids[place + 2]).nonzero().flatten()
                    losses[step].append(-log_q[label].sum())
    total = sum(weight * sum(each) for weight, each in zip(weights, losses, strict=True))
    count = sum(weight * len(each) for weight, each in zip(weights, losses, strict=True)) / sum(weights)
    return total / count


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradients_are_those_of_positions_that_draft_alone(case: dict[str, Any], tmp_path: Path) -> None:
    drafter, target, objective = make_case(tmp_path, **case)
    batch = make_batch()
    expected = loss_alone(drafter, target, batch)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    assert ("lm_head.weight" in gradients) == ("share_target_head" in case)
    drafter.zero_grad()
    states = states_of(target, drafter, batch)
    result = objective.loss(drafter, batch, states)
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.metrics["loss"], expected.detach(), atol=1e-5, rtol=1e-5)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4, msg=name)
    known = objective.with_normaliser(states, batch)
    assert (known.normaliser is None) == ("draft_vocab_size" not in case)
    torch.testing.assert_close(objective.loss(drafter, batch, known).loss, result.loss, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_logits_of_one_chunk_at_a_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, target, objective = make_case(tmp_path, kind)
    batch = make_batch()
    states = states_of(target, drafter, batch)
    sizes: list[int] = []
    logits = drafter._logits
    monkeypatch.setattr(drafter, "_logits", lambda head, hidden: sizes.append(len(hidden)) or logits(head, hidden))
    objective.loss(drafter, batch, states).loss.backward()
    assert max(sizes) <= 5 and sum(sizes) == 2 * objective.eval_mask(batch).sum()


def test_positions_that_count_by_hand(tmp_path: Path) -> None:
    """EAGLE-3 asks whether the token at t + s is trained on, MTP whether the predicted one at t + s + 2 is."""
    batch = make_batch()
    _, _, eagle3 = make_case(tmp_path, "eagle3")
    assert eagle3.eval_mask(batch)[0].T.int().tolist() == [
        [0, 0, 1, 1, 1, 0, 1, 1, 0],
        [0, 1, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 1, 0, 0, 0],
    ]
    # No state of the target stands behind the last token of a padded row either.
    assert eagle3.eval_mask(batch)[1].sum(dim=0).tolist() == [6, 5, 4]
    _, _, mtp = make_case(tmp_path, "mtp")
    assert mtp.eval_mask(batch)[0].T.int().tolist() == [
        [1, 1, 1, 0, 1, 1, 1, 0, 0],
        [1, 1, 0, 1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 1, 0, 0, 0, 0],
    ]
    assert mtp.eval_mask(batch)[1].sum(dim=0).tolist() == [5, 4, 3]


def test_sequences_shorter_than_the_block(tmp_path: Path) -> None:
    drafter, target, objective = make_case(tmp_path, "eagle3", block_size=7)
    ids = tiny_prompt(2)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}
    states = states_of(target, drafter, batch)
    result = objective.loss(drafter, batch, states)
    assert result.loss.isfinite() and objective.eval_mask(batch).sum() == 1
    batch["loss_mask"] = torch.zeros_like(ids)
    nothing = objective.loss(drafter, batch, states)
    nothing.loss.backward()
    assert nothing.loss == 0
    # Every process must reach every parameter, also where its batch has nothing to say.
    assert all(parameter.grad is not None for parameter in drafter.parameters())
    assert ahead(ids, 3).tolist() == [[0, 0]]


def test_what_comes_later_is_not_seen(tmp_path: Path) -> None:
    drafter, target, _ = make_case(tmp_path, "eagle3")
    ids, other = tiny_prompt(9), tiny_prompt(9)
    other[0, 6:] = 5

    @torch.no_grad()
    def hidden(ids: torch.Tensor) -> torch.Tensor:
        states = states_of(target, drafter, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        return training_time_test(drafter, drafter, ids, states.context)[0]

    differs = (hidden(ids) - hidden(other)).abs().amax(dim=-1) > 1e-6
    # Step s at position t reads the token at t + 1 + s.
    expected = torch.arange(9)[:, None] + torch.arange(STEPS) + 1 >= 6
    assert torch.equal(differs[:-STEPS], expected[:-STEPS])


def test_an_own_head_is_trained_and_a_copy_is_not(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    own = make_drafter(target, kind="eagle3", share_target_head=False)
    copied = make_drafter(target, kind="eagle3")
    copied.copy_target_embeddings()
    for drafter, is_trained in ((own, True), (copied, False)):
        before = drafter.lm_head.weight.detach().clone()
        DSparkTrainer(drafter, target, make_args(tmp_path, max_steps=1, warmup_steps=0), dataset).train()
        assert torch.equal(drafter.lm_head.weight, before) != is_trained
    own.copy_target_embeddings()
    embeddings = own.embed_tokens.weight.clone()
    DSparkTrainer(own, target, make_args(tmp_path, max_steps=1, warmup_steps=0), dataset).train()
    assert torch.equal(own.embed_tokens.weight, embeddings)


def test_half_precision_and_adapters(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    """Arithmetic in bfloat16 through all steps and their cache, the weights in float32; an adapter, and it alone."""
    drafter = make_drafter(target, kind="eagle3")
    trainer = DSparkTrainer(drafter, target, make_args(tmp_path, bf16=True, max_steps=20), dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.97 * losses[0]
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    adapted = get_peft_model(drafter, LoraConfig(r=4, target_modules=["q_proj", "fc"]))
    DSparkTrainer(adapted, target, make_args(tmp_path, max_steps=2), dataset).train()
    for name, weight in before.items():
        stem, _, kind = name.rpartition(".")
        after = adapted.get_base_model().state_dict()
        assert torch.equal(after.get(name, after.get(f"{stem}.base_layer.{kind}")), weight), f"{name} was trained"
    assert any(weight.any() for name, weight in adapted.named_parameters() if "lora_B" in name)


def test_checkpointing_is_refused(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    for kind in ("eagle3", "mtp"):
        args = make_args(tmp_path, gradient_checkpointing=True)
        with pytest.raises(ValueError, match="`gradient_checkpointing` is True, which a .* does not support.*False"):
            DSparkTrainer(make_drafter(target, kind=kind), target, args, dataset)


def test_nothing_to_read_is_an_error(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="`features` and `target_states` are both None"):
        make_drafter(target, kind="mtp")(torch.tensor([[3]]), None, torch.tensor([[0]]))
