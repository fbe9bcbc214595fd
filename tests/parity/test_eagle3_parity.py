"""The EAGLE-3 drafter computes what DeepSpec's reference code computes: prefill, two drafts, the training's steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark_hf import Eagle3Drafter

from .fixtures import EAGLE3_CASE, load_drafter, load_target, load_tensors
from .test_forward_parity import assert_close, capture

pytestmark = pytest.mark.parity

BLOCKS = ("block1", "block2")
EXPECTED = load_tensors(EAGLE3_CASE)
PROMPT = 40


@pytest.fixture(scope="module")
def drafter() -> Eagle3Drafter:
    return load_drafter(EAGLE3_CASE)


@torch.no_grad()
def read_prompt(drafter: Eagle3Drafter, shift: int = 0) -> tuple[Any, torch.Tensor]:
    """The cache after the prompt, and the features right before the first anchor."""
    cache = drafter.make_cache()
    features = drafter.fuse(EXPECTED["prefill.target_features"])
    positions = torch.arange(PROMPT)[None] + shift
    return cache, drafter(EXPECTED["prefill.draft_input_ids"], features, positions, cache=cache).features[:, -1:]


@torch.no_grad()
def commit(drafter: Eagle3Drafter, cache: Any, block: str, position: int) -> torch.Tensor:
    """Reads what a block left of its verified tokens; the features right before the next anchor."""
    tokens = EXPECTED[f"{block}.committed_tokens"]
    features = drafter.fuse(EXPECTED[f"{block}.committed_features"])
    positions = torch.arange(position, position + tokens.shape[1])[None]
    return drafter(tokens, features, positions, cache=cache).features[:, -1:]


def start_of(drafter: Eagle3Drafter, block: str) -> tuple[Any, torch.Tensor, int]:
    """Cache, features and anchor position at the beginning of a block."""
    cache, features = read_prompt(drafter)
    if block == "block1":
        return cache, features, PROMPT
    return cache, commit(drafter, cache, "block1", PROMPT), PROMPT + EXPECTED["block1.committed_tokens"].shape[1]


def test_target_states_of_the_prompt(drafter: Eagle3Drafter) -> None:
    target = load_target(EAGLE3_CASE)
    states = capture(target, drafter.config.target_layer_ids, EXPECTED["input_ids"])
    assert_close(states, EXPECTED["prefill.target_features"], "target_features")
    logits = target(EXPECTED["input_ids"]).logits[:, -1]
    assert_close(logits, EXPECTED["prefill.last_logits"], "last_logits")
    # Each position goes with the token after it, the last one with the first anchor.
    following = torch.cat([EXPECTED["input_ids"][:, 1:], logits.argmax(dim=-1)[:, None]], dim=1)
    assert torch.equal(following, EXPECTED["prefill.draft_input_ids"])


@torch.no_grad()
def test_prefill(drafter: Eagle3Drafter) -> None:
    fused = drafter.fuse(EXPECTED["prefill.target_features"])
    assert_close(fused, EXPECTED["prefill.projected_features"], "projected_features")
    cache, features = read_prompt(drafter)
    assert_close(features, EXPECTED["prefill.draft_hidden_last"], "draft_hidden_last")
    assert cache.get_seq_length() == PROMPT


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_forced_path(drafter: Eagle3Drafter, block: str) -> None:
    cache, features, anchor = start_of(drafter, block)
    path, hidden = EXPECTED[f"{block}.forced_path"], [features]
    for step in range(path.shape[1] - 1):
        output = drafter(path[:, step : step + 1], hidden[-1], torch.tensor([[anchor + step]]), cache=cache)
        hidden.append(output.features)
    states = torch.cat(hidden, dim=1)
    assert_close(states, EXPECTED[f"{block}.forced_hidden"], "forced_hidden")
    assert_close(drafter.project(drafter.norm(states)), EXPECTED[f"{block}.forced_logits"], "forced_logits")


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_greedy_path(drafter: Eagle3Drafter, block: str) -> None:
    cache, features, anchor = start_of(drafter, block)
    logits = drafter.project(drafter.norm(features[:, -1]))
    tokens = EXPECTED[f"{block}.greedy_tokens"]
    for step in range(tokens.shape[1]):
        assert_close(logits, EXPECTED[f"{block}.greedy_logits"][:, step], f"greedy_logits {step}")
        token = logits.argmax(dim=-1, keepdim=True)
        assert torch.equal(token, tokens[:, step : step + 1])
        logits, features = drafter.advance(token, features, torch.tensor([[anchor + step]]), None, cache)


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_next_draft_begins_with_states_of_the_target(drafter: Eagle3Drafter, block: str) -> None:
    """What a draft cached is removed, and read again from the states of the verification."""
    cache, features, anchor = start_of(drafter, block)
    path = EXPECTED[f"{block}.forced_path"]
    for step in range(path.shape[1] - 1):
        positions = torch.tensor([[anchor + step]])
        features = drafter(path[:, step : step + 1], features, positions, cache=cache).features
    cache.crop(-(path.shape[1] - 1))
    assert_close(commit(drafter, cache, block, anchor), EXPECTED[f"{block}.next_draft_hidden"], "next_draft_hidden")


@torch.no_grad()
def test_steps_of_the_training(drafter: Eagle3Drafter) -> None:
    """Each step takes the features of the one before, ids and positions one further; it sees its own of later ones."""
    ids, expected = EXPECTED["train.ttt_input_ids"], EXPECTED["train.ttt_draft_logits"]
    steps, length = ids.shape
    features, cache = drafter.fuse(EXPECTED["train.target_hidden_states"]), drafter.make_cache()
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for step in range(steps):
        output = drafter(ids[step : step + 1], features, torch.arange(length)[None] + step, mask[None, None], cache)
        # Past the end of the text the reference masks everything.
        assert_close(output.logits[0, : length - step], expected[step, : length - step], f"ttt_draft_logits {step}")
        features = output.features
        mask = torch.cat([mask, torch.eye(length, dtype=torch.bool)], dim=1)


@torch.no_grad()
def test_target_distribution_of_the_training(drafter: Eagle3Drafter) -> None:
    probs = drafter.target_logits(EXPECTED["train.target_last_hidden_states"]).softmax(dim=-1)
    expected = EXPECTED["train.ttt_target_probs_step0"]
    shifted = torch.cat([probs[:, 1:], torch.zeros_like(probs[:, :1])], dim=1)
    assert_close(shifted[:, :-1], expected[:, :-1], "ttt_target_probs_step0")


@pytest.mark.parametrize("shift", [-1, 1])
@torch.no_grad()
def test_trap_positions_off_by_one(drafter: Eagle3Drafter, shift: int) -> None:
    """Only distances count in a rotary embedding, so the drafted tokens have to be the ones that are shifted."""
    cache, features = read_prompt(drafter)
    path = EXPECTED["block1.forced_path"]
    output = drafter(path[:, :1], features, torch.tensor([[PROMPT + shift]]), {}, cache)
    assert (output.features - EXPECTED["block1.forced_hidden"][:, 1:2]).abs().max() > 1e-3


@torch.no_grad()
def test_trap_token_of_the_same_position(drafter: Eagle3Drafter) -> None:
    features = drafter.fuse(EXPECTED["prefill.target_features"])
    output = drafter(EXPECTED["input_ids"], features, torch.arange(PROMPT)[None])
    assert (output.features[:, -1:] - EXPECTED["prefill.draft_hidden_last"]).abs().max() > 1e-2
