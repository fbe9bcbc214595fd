"""`DSparkDrafter` as a Transformers model: saving, loading, binding, its heads, its dtypes."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, PreTrainedModel

from dspark_hf import DSparkConfig, DSparkDrafter, get_drafter

from ..tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_prompt, tiny_target


def build(target: PreTrainedModel, draft_tokens: Any = None, **fields: Any) -> DSparkDrafter:
    """A drafter of `target` whose every weight is random, so that nothing is hidden by a zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = DSparkConfig(**{"markov_rank": 8, "num_hidden_layers": 2, **fields})
        drafter = get_drafter(target, config, draft_tokens=draft_tokens)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.2
            parameter.add_(noise.to(device=parameter.device, dtype=parameter.dtype))
    return drafter


@torch.no_grad()
def run(drafter: DSparkDrafter, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draft logits of one block after a random context."""
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    states = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    block = drafter.block_input_ids(torch.tensor([[7]]))
    output = drafter(block, states, torch.arange(5 + block.shape[1])[None])
    previous = tiny_prompt(drafter.config.block_size)
    return drafter.sequential_logits(output.logits, output.last_hidden_state, previous)


def rewrite_weights(folder: Path, change: Any) -> None:
    """Applies `change` to the tensors of a saved drafter."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# --- saving and loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4", "llama"])
def test_reload_is_exact(tmp_path: Path, family: str) -> None:
    target = tiny_target(family)
    drafter = build(target)
    drafter.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is DSparkDrafter
    assert not loaded.training
    loaded.bind_target(target)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(run(loaded), run(drafter))


def test_target_embeddings_are_not_saved(tmp_path: Path) -> None:
    drafter = build(tiny_target())
    drafter.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_copied_embeddings_are_saved_and_independent(tmp_path: Path, family: str) -> None:
    target = tiny_target(family)
    drafter = build(target)
    before = run(drafter)
    drafter.copy_target_embeddings()
    assert torch.equal(run(drafter), before)
    drafter.save_pretrained(tmp_path)
    assert {"embed_tokens.weight", "lm_head.weight"} <= load_file(tmp_path / "model.safetensors").keys()
    with torch.no_grad():
        target.get_input_embeddings().weight.zero_()
        target.get_output_embeddings().weight.zero_()
    assert torch.equal(run(drafter), before)
    assert torch.equal(run(DSparkDrafter.from_pretrained(tmp_path)), before)


def test_sharded_weights_load(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = build(target)
    drafter.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    loaded.bind_target(target)
    assert torch.equal(run(loaded), run(drafter))


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.q_norm.weight", "markov_head.markov_w1.weight"])
def test_missing_tensor_is_refused(tmp_path: Path, name: str) -> None:
    build(tiny_target()).save_pretrained(tmp_path)
    rewrite_weights(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(OSError, match=name.replace(".", "\\.")):
        DSparkDrafter.from_pretrained(tmp_path)


def test_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    build(tiny_target()).save_pretrained(tmp_path)
    rewrite_weights(tmp_path, lambda tensors: tensors.update({"fc.weight": torch.zeros(3, 3)}))
    with pytest.raises(OSError, match="fc\\.weight"):
        DSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 1000, -100])
def test_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    build(tiny_target()).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(OSError, match="cannot be read"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_another_model_is_refused(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="qwen3 model .*Qwen3ForCausalLM.* not a drafter.*AutoDrafter"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_incomplete_config_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves .*hidden_size.* unset. Build a drafter with `get_drafter"):
        DSparkDrafter(DSparkConfig())


# --- binding -----------------------------------------------------------------------------------------------------


def test_unbound_drafter_says_so(tmp_path: Path) -> None:
    build(tiny_target()).save_pretrained(tmp_path)
    drafter = DSparkDrafter.from_pretrained(tmp_path)
    for use in (lambda: run(drafter), drafter.copy_target_embeddings):
        with pytest.raises(ValueError, match="bound to no target. Call `drafter.bind_target"):
            use()


def test_binding_keeps_no_target_alive() -> None:
    target = tiny_target()
    drafter = build(target)
    del target
    gc.collect()
    with pytest.raises(ValueError, match="keep the target alive"):
        run(drafter)


def test_bound_target_is_no_part_of_the_drafter() -> None:
    target = tiny_target()
    drafter = build(target)
    tables = {id(target.get_input_embeddings().weight), id(target.get_output_embeddings().weight)}
    assert not tables & {id(parameter) for parameter in drafter.parameters()}
    assert all(parameter.requires_grad for parameter in target.parameters())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 32}, "`hidden_size` is 64 but the target .* 32"),
        ({"vocab_size": VOCAB_SIZE + 8}, f"`vocab_size` is {VOCAB_SIZE} but the target .* {VOCAB_SIZE + 8}"),
        ({"num_hidden_layers": 2}, "`target_layer_ids` \\[0, 1, 2\\] name a layer that .* 2 layers"),
        ({"num_hidden_layers": 5}, "`num_target_layers` is 4 but the target .* 5 layers"),
    ],
)
def test_wrong_target_is_refused(overrides: dict[str, int], message: str) -> None:
    drafter = build(tiny_target())
    with pytest.raises(ValueError, match=message):
        drafter.bind_target(tiny_target(**overrides))


def test_number_of_target_layers_may_be_unknown() -> None:
    drafter = build(tiny_target())
    drafter.config.num_target_layers = None
    drafter.bind_target(tiny_target(num_hidden_layers=5))


def test_target_without_head_is_refused() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="no LM head"):
        build(target).bind_target(target.base_model)


# --- heads -------------------------------------------------------------------------------------------------------


def test_gated_head_follows_its_formula() -> None:
    drafter = build(tiny_target(), markov_head_type="gated")
    head = drafter.markov_head
    hidden = torch.randn(2, 7, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    previous = tiny_prompt(7, batch=2)
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    gate_weight, gate_bias = head.gate_proj.weight, head.gate_proj.bias
    with torch.no_grad():
        bias = head(previous, hidden)
    for row, position in itertools.product(range(2), range(7)):
        embedding = w1[previous[row, position]]
        joint = torch.cat([hidden[row, position], embedding])
        gate = 1 / (1 + torch.exp(-(gate_weight @ joint + gate_bias)))
        torch.testing.assert_close(bias[row, position], w2 @ (gate * embedding), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_step_by_step_equals_teacher_forcing(head_type: str) -> None:
    drafter = build(tiny_target(), markov_head_type=head_type)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, HIDDEN_SIZE, generator=generator)
    base = torch.randn(2, 7, VOCAB_SIZE, generator=generator)
    previous = tiny_prompt(7, batch=2)
    expected, state = drafter.sequential_logits(base, hidden, previous), None
    for position in range(7):
        logits, state = drafter.draft_step(
            base[:, position], hidden[:, position], drafter.embed_previous(previous[:, position]), state
        )
        torch.testing.assert_close(logits, expected[:, position], atol=1e-5, rtol=1e-5)


def test_fresh_sequential_head_changes_nothing() -> None:
    torch.manual_seed(0)
    drafter = get_drafter(tiny_target(), DSparkConfig(markov_rank=8))
    hidden, base = torch.randn(1, 7, HIDDEN_SIZE), torch.randn(1, 7, VOCAB_SIZE)
    assert torch.equal(drafter.sequential_logits(base, hidden, tiny_prompt(7)), base)


def test_confidence_follows_its_formula_and_never_sees_the_token_itself() -> None:
    drafter = build(tiny_target())
    hidden, previous = torch.randn(3, HIDDEN_SIZE), tiny_prompt(3)[0]
    joint = torch.cat([hidden, drafter.markov_head.markov_w1.weight[previous]], dim=-1)
    expected = joint @ drafter.confidence_head.proj.weight[0] + drafter.confidence_head.proj.bias
    torch.testing.assert_close(drafter.confidence_logits(hidden, drafter.embed_previous(previous)), expected)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("confidence", [False, True])
@torch.no_grad()
def test_heads_can_be_left_out(tmp_path: Path, rank: int, confidence: bool) -> None:
    target = tiny_target()
    drafter = build(target, markov_rank=rank, enable_confidence_head=confidence)
    drafter.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any("markov_head" in name for name in names) == (rank > 0)
    assert any("confidence_head" in name for name in names) == confidence
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    loaded.bind_target(target)
    assert torch.equal(run(loaded), run(drafter))
    hidden, base, previous = torch.randn(2, HIDDEN_SIZE), torch.randn(2, VOCAB_SIZE), torch.tensor([3, 4])
    logits, _ = loaded.draft_step(base, hidden, loaded.embed_previous(previous), None)
    assert torch.equal(logits, base) == (rank == 0)
    confidences = loaded.confidence_logits(hidden, loaded.embed_previous(previous))
    assert (confidences is not None) == confidence
    if confidences is not None:
        assert confidences.shape == (2,)
        assert confidences.dtype == torch.float32


# --- dtypes, cache, masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
@torch.no_grad()
def test_target_and_drafter_of_other_dtypes(
    family: str, drafter_dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    target = tiny_target(family).to(target_dtype)
    drafter = build(target).to(drafter_dtype)
    assert drafter.embed(torch.tensor([[3]])).dtype == drafter_dtype
    logits = run(drafter, dtype=target_dtype)
    assert logits.isfinite().all()
    exact_target = tiny_target(family)
    reference = run(build(exact_target))
    assert (logits.float() - reference).abs().mean() < 0.2 * reference.abs().mean()


@torch.no_grad()
def test_context_in_pieces_equals_context_at_once() -> None:
    target = tiny_target()
    drafter = build(target)
    states = torch.randn(1, 9, len(drafter.config.target_layer_ids) * HIDDEN_SIZE)
    block = drafter.block_input_ids(torch.tensor([[7]]))
    expected = drafter(block, states, torch.arange(9 + 7)[None]).logits
    cache, start = drafter.make_cache(), 0
    for end in (4, 5, 9):
        positions = torch.arange(start, end + 7)[None]
        logits = drafter(block, states[:, start:end], positions, cache=cache).logits
        start = end
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    again = drafter(block, None, torch.arange(9, 16)[None], cache=cache).logits
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_sliding_layers_forget_what_is_far() -> None:
    target = tiny_target()
    drafter = build(
        target, num_hidden_layers=2, layer_types=["sliding_attention", "sliding_attention"], sliding_window=4
    )
    states = torch.randn(1, 9, len(drafter.config.target_layer_ids) * HIDDEN_SIZE)
    block, positions = drafter.block_input_ids(torch.tensor([[7]])), torch.arange(16)[None]
    expected = drafter(block, states, positions).logits
    states[:, :3] = 0
    # The block is bidirectional, so what one slot sees reaches all: the anchor at 9 sees positions above 5.
    torch.testing.assert_close(drafter(block, states, positions).logits, expected)
    states[:, 6:] = 0
    assert (drafter(block, states, positions).logits - expected).abs().max() > 1e-3


@torch.no_grad()
def test_block_is_bidirectional() -> None:
    target = tiny_target()
    drafter = build(target)
    block = drafter.block_input_ids(torch.tensor([[7]]))
    expected = drafter(block, None, torch.arange(7)[None]).logits
    block[:, -1] = 9
    assert (drafter(block, None, torch.arange(7)[None]).logits - expected)[:, 0].abs().max() > 1e-4


def test_gradients_reach_every_weight_and_only_the_drafter() -> None:
    target = tiny_target("gemma4")
    drafter = build(target).train()
    width = len(drafter.config.target_layer_ids) * HIDDEN_SIZE
    block = drafter.block_input_ids(torch.tensor([[7]]))
    output = drafter(block, torch.randn(1, 5, width), torch.arange(12)[None])
    previous = tiny_prompt(7)
    logits = drafter.sequential_logits(output.logits, output.last_hidden_state, previous)
    confidences = drafter.confidence_logits(output.last_hidden_state, drafter.embed_previous(previous))
    loss = logits.square().mean() + confidences.square().mean()
    loss.backward()
    assert [name for name, parameter in drafter.named_parameters() if parameter.grad is None] == []


def test_gradient_checkpointing_changes_no_gradient() -> None:
    target = tiny_target()
    states = torch.randn(1, 5, 3 * HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in (False, True):
        drafter = build(target).train()
        if checkpointing:
            drafter.gradient_checkpointing_enable()
        block = drafter.block_input_ids(torch.tensor([[7]]))
        drafter(block, states, torch.arange(12)[None]).logits.square().mean().backward()
        gradients.append(drafter.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_config_json_is_readable(tmp_path: Path) -> None:
    build(tiny_target()).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert saved["model_type"] == "dspark"
    assert saved["architectures"] == ["DSparkDrafter"]
    assert "quantization_config" not in saved


def test_head_with_bias_is_shared_but_not_copied() -> None:
    target = tiny_target()
    drafter = build(target)
    hidden = torch.randn(1, HIDDEN_SIZE)
    target.lm_head.bias = nn.Parameter(torch.randn(VOCAB_SIZE))
    torch.testing.assert_close(drafter.project(hidden), target.lm_head(hidden))
    with pytest.raises(ValueError, match="LM head has a bias"):
        drafter.copy_target_embeddings()


@pytest.mark.parametrize(
    ("attribute", "weight"),
    [
        ("lm_head", torch.zeros(VOCAB_SIZE * HIDDEN_SIZE // 2, 1, dtype=torch.uint8)),
        ("lm_head", torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.int8)),
        ("lm_head", torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.float8_e4m3fn)),
        ("lm_head", torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, device="meta")),
        ("lm_head", None),
        ("embed_tokens", torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.int8)),
    ],
)
def test_quantised_weights_are_not_copied(attribute: str, weight: torch.Tensor | None) -> None:
    target = tiny_target()
    drafter = build(target)
    module = target.lm_head if attribute == "lm_head" else target.model.embed_tokens
    module.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)
    name = "LM head" if attribute == "lm_head" else "embeddings"
    with pytest.raises(ValueError, match=f"{name} cannot be copied: the weights are quantised"):
        drafter.copy_target_embeddings()
    assert drafter.config.share_target_embeddings and drafter.lm_head is None
