"""The drafter computes what DeepSpec's reference code computes, tensor by tensor, for two consecutive blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from dspark_hf import DSparkDrafter, DSparkOutput
from dspark_hf._compat import capture_kwargs, captured_states

from .fixtures import CASES, SAMPLING_CASE, load_drafter, load_json, load_target, load_tensors

pytestmark = pytest.mark.parity

BLOCKS = ("block1", "block2")


@dataclass
class Case:
    """A case, loaded once."""

    name: str
    target: PreTrainedModel
    drafter: DSparkDrafter
    expected: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    name = request.param
    return Case(name, load_target(name), load_drafter(name), load_tensors(name))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, atol=1e-4, rtol=1e-4, check_dtype=False, msg=lambda text: f"{what}: {text}"
    )


@torch.no_grad()
def capture(target: PreTrainedModel, layers: list[int], input_ids: torch.Tensor) -> torch.Tensor:
    """Captured states `(1, n, m * d)` in the way that generation takes them."""
    outputs = target(input_ids, use_cache=False, **capture_kwargs(layers))
    return captured_states(outputs.hidden_states, layers)


@torch.no_grad()
def run_blocks(case: Case, shift: int = 0, mask_anchor: bool = False) -> dict[str, tuple[DSparkOutput, list]]:
    """Both blocks with one cache; `shift` and `mask_anchor` break what their tests say must matter."""
    cache = case.drafter.make_cache()
    results = {}
    for block in BLOCKS:
        input_ids = case.expected[f"{block}.draft_input_ids"].clone()
        if mask_anchor:
            input_ids[:, 0] = case.drafter.config.mask_token_id
        position_ids = case.expected[f"{block}.position_ids"].clone()
        position_ids[:, -input_ids.shape[1] :] += shift
        output = case.drafter(input_ids, case.expected[f"{block}.context_features"], position_ids, cache=cache)
        layer = cache.layers[0]
        results[block] = (output, [layer.keys[:, :, -4:].clone(), layer.values[:, :, -4:].clone()])
    return results


def test_target_states_of_the_prompt(case: Case) -> None:
    states = capture(case.target, case.drafter.config.target_layer_ids, case.expected["input_ids"])
    assert_close(states, case.expected["prefill.target_features"], "target_features")


@torch.no_grad()
def test_last_target_state_is_what_the_head_sees(case: Case) -> None:
    outputs = case.target(case.expected["input_ids"], output_hidden_states=True, use_cache=False)
    assert_close(outputs.hidden_states[-1], case.expected["prefill.target_last_hidden"], "target_last_hidden")
    assert_close(outputs.logits[:, -1], case.expected["prefill.last_logits"], "last_logits")


@torch.no_grad()
def test_shared_head_gives_the_targets_logits(case: Case) -> None:
    drafter = load_drafter(case.name)
    drafter.embed_tokens, drafter.lm_head = None, None
    drafter.bind_target(case.target)
    logits = drafter.project(case.expected["prefill.target_last_hidden"][:, -1])
    assert_close(logits, case.expected["prefill.last_logits"], "last_logits")


@torch.no_grad()
def test_embedding_output_is_layer_minus_one(case: Case) -> None:
    input_ids = case.expected["input_ids"]
    states = capture(case.target, [-1, 0], input_ids)
    embeddings = case.target.get_input_embeddings()(input_ids)
    assert_close(states[..., : embeddings.shape[-1]], embeddings, "layer -1")
    # What the target does to its embeddings, the drafter does too.
    assert_close(case.drafter.embed(input_ids), embeddings, "drafter's embeddings")


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_block_input_is_anchor_then_masks(case: Case, block: str) -> None:
    expected = case.expected[f"{block}.draft_input_ids"]
    assert torch.equal(case.drafter.block_input_ids(expected[:, :1]), expected)


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_fused_context(case: Case, block: str) -> None:
    fused = case.drafter.fuse(case.expected[f"{block}.context_features"])
    assert_close(fused, case.expected[f"{block}.fused_context"], "fused_context")


@pytest.mark.parametrize("block", BLOCKS)
def test_parallel_stage_and_cache(case: Case, block: str) -> None:
    output, (keys, values) = run_blocks(case)[block]
    assert_close(output.last_hidden_state, case.expected[f"{block}.hidden"], "hidden")
    assert_close(output.logits, case.expected[f"{block}.base_logits"], "base_logits")
    assert_close(keys, case.expected[f"{block}.draft_cache_after.k0_last4"], "k0_last4")
    assert_close(values, case.expected[f"{block}.draft_cache_after.v0_last4"], "v0_last4")


@torch.no_grad()
def test_cache_grows_by_the_context_only(case: Case) -> None:
    cache = case.drafter.make_cache()
    length = 0
    for block in BLOCKS:
        features = case.expected[f"{block}.context_features"]
        case.drafter(
            case.expected[f"{block}.draft_input_ids"], features, case.expected[f"{block}.position_ids"], cache=cache
        )
        length += features.shape[1]
        assert all(cache.get_seq_length(index) == length for index in range(case.drafter.config.num_hidden_layers))


@torch.no_grad()
def test_second_block_without_cache_agrees(case: Case) -> None:
    """The whole context at once gives what the cache gives: training and inference see the same logits."""
    features = torch.cat([case.expected[f"{block}.context_features"] for block in BLOCKS], dim=1)
    first, second = (case.expected[f"{block}.position_ids"] for block in BLOCKS)
    positions = torch.cat([first[:, : case.expected["block1.context_features"].shape[1]], second], dim=1)
    output = case.drafter(case.expected["block2.draft_input_ids"], features, positions)
    assert_close(output.logits, case.expected["block2.base_logits"], "base_logits")


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_teacher_forced_heads(case: Case, block: str) -> None:
    hidden, previous = case.expected[f"{block}.hidden"], case.expected[f"{block}.forced_prev"]
    logits = case.drafter.sequential_logits(case.expected[f"{block}.base_logits"], hidden, previous)
    assert_close(logits, case.expected[f"{block}.forced_logits"], "forced_logits")
    confidence = case.drafter.confidence_logits(hidden, case.drafter.embed_previous(previous))
    if confidence is None:
        assert f"{block}.forced_confidence_logits" not in case.expected
    else:
        assert_close(confidence, case.expected[f"{block}.forced_confidence_logits"], "forced_confidence_logits")


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_greedy_draft_step_by_step(case: Case, block: str) -> None:
    output, _ = run_blocks(case)[block]
    previous, state = case.expected[f"{block}.draft_input_ids"][:, 0], None
    for position in range(case.drafter.config.block_size):
        hidden = output.last_hidden_state[:, position]
        confidence = case.drafter.confidence_logits(hidden, case.drafter.embed_previous(previous))
        logits, state = case.drafter.draft_step(
            output.logits[:, position], hidden, case.drafter.embed_previous(previous), state
        )
        previous = logits.argmax(dim=-1)
        assert_close(logits, case.expected[f"{block}.greedy_logits"][:, position], f"greedy_logits {position}")
        assert torch.equal(previous, case.expected[f"{block}.greedy_tokens"][:, position])
        if confidence is not None:
            expected = case.expected[f"{block}.greedy_confidence_logits"][:, position]
            assert_close(confidence, expected, f"greedy_confidence_logits {position}")


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_verification_logits(case: Case, block: str) -> None:
    """Logits of the anchor and the forced path; the sequence before the second anchor is prompt and first path."""
    verified = case.expected[f"{block}.verify_input_ids"]
    text = [case.expected["input_ids"]]
    if block == "block2":
        accepted = case.expected["block2.context_features"].shape[1]
        text.append(case.expected["block1.verify_input_ids"][:, :accepted])
    logits = case.target(torch.cat([*text, verified], dim=1), use_cache=False).logits[:, -verified.shape[1] :]
    assert_close(logits, case.expected[f"{block}.verify_logits"], "verify_logits")


def test_trap_first_slot_must_be_the_anchor(case: Case) -> None:
    for block, (output, _) in run_blocks(case, mask_anchor=True).items():
        difference = (output.logits - case.expected[f"{block}.base_logits"]).abs().amax(dim=-1)
        assert difference[:, 0].min() > 1e-2, f"{block}: the anchor's slot does not see the anchor"
        assert difference.min() > 1e-4, f"{block}: some slot does not see the anchor"


@pytest.mark.parametrize("shift", [-1, 1])
def test_trap_positions_off_by_one(case: Case, shift: int) -> None:
    for block, (output, _) in run_blocks(case, shift=shift).items():
        difference = (output.logits - case.expected[f"{block}.base_logits"]).abs().amax()
        assert difference > 1e-3, f"{block}: positions shifted by {shift} change nothing"


@torch.no_grad()
def test_sampling_case_distributions() -> None:
    """Draft distributions at temperature 1 and confidences, for every token that may come before."""
    drafter, target, expected = load_drafter(SAMPLING_CASE), load_target(SAMPLING_CASE), load_tensors(SAMPLING_CASE)
    states = capture(target, drafter.config.target_layer_ids, expected["input_ids"])
    assert_close(states, expected["prefill.target_features"], "target_features")
    anchor = torch.tensor([[load_json(SAMPLING_CASE)["anchor_token"]]])
    block = drafter.block_input_ids(anchor)
    output = drafter(block, states, torch.arange(states.shape[1] + block.shape[1])[None])
    assert_close(output.last_hidden_state, expected["block1.hidden"], "hidden")
    assert_close(output.logits, expected["block1.base_logits"], "base_logits")

    everything = torch.arange(drafter.config.vocab_size)
    names = ("pos1", "pos2_given_x1", "pos3_given_x2")
    for position, (name, previous) in enumerate(zip(names, (anchor[0], everything, everything), strict=True)):
        hidden = output.last_hidden_state[:, position].expand(len(previous), -1)
        embedding = drafter.embed_previous(previous)
        logits, _ = drafter.draft_step(output.logits[:, position], hidden, embedding, None)
        probabilities, confidence = logits.softmax(dim=-1), drafter.confidence_logits(hidden, embedding)
        assert_close(probabilities.view_as(expected[f"draft_probs_{name}"]), expected[f"draft_probs_{name}"], name)
        assert_close(
            confidence.view_as(expected[f"confidence_logit_{name}"]), expected[f"confidence_logit_{name}"], name
        )
