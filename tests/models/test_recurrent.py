"""Drafters that draft token by token as Transformers models: what they compute, saving, loading, building."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding

from dspark_hf import AutoDrafter, DSparkConfig, Eagle3Config, Eagle3Drafter, MTPConfig, MTPDrafter, get_drafter
from dspark_hf.models import RecurrentDrafter

from ..recurrent import KINDS, make_recurrent
from ..tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_prompt, tiny_target

FAMILIES = ["qwen3", "llama", "gemma3", "gemma4"]
LENGTH = 11


def build(family: str, kind: str, **fields: Any) -> Any:
    """A drafter that keeps its target alive."""
    target = tiny_target(family)
    drafter = make_recurrent(target, kind, **fields)
    drafter.kept_alive = [target]
    return drafter


def states_for(drafter: RecurrentDrafter, length: int = LENGTH, batch: int = 1) -> torch.Tensor:
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def run(drafter: RecurrentDrafter, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of every position of a text."""
    features = drafter.fuse(states_for(drafter).to(dtype))
    return drafter(tiny_prompt(LENGTH), features, torch.arange(LENGTH)[None]).logits


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


# --- what is computed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [["full_attention"], ["sliding_attention", "full_attention"]])
@torch.no_grad()
def test_step_by_step_equals_at_once(kind: str, family: str, layers: list[str]) -> None:
    drafter = build(family, kind, num_hidden_layers=len(layers), layer_types=layers, sliding_window=4)
    expected, features, ids = run(drafter), drafter.fuse(states_for(drafter)), tiny_prompt(LENGTH)
    cache = drafter.make_cache()
    for place in range(LENGTH):
        one = slice(place, place + 1)
        output = drafter(ids[:, one], features[:, one], torch.tensor([[place]]), cache=cache)
        torch.testing.assert_close(output.logits, expected[:, one], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_context_in_pieces_equals_context_at_once(kind: str) -> None:
    drafter = build("qwen3", kind, num_hidden_layers=2)
    expected, features, ids = run(drafter), drafter.fuse(states_for(drafter)), tiny_prompt(LENGTH)
    cache, start = drafter.make_cache(), 0
    for end in (4, 5, LENGTH):
        piece = slice(start, end)
        positions = torch.arange(start, end)[None]
        output = drafter(ids[:, piece], features[:, piece], positions, cache=cache)
        torch.testing.assert_close(output.logits, expected[:, piece], atol=1e-5, rtol=1e-5)
        start = end


@torch.no_grad()
def test_rows_with_padding_equal_rows_alone(kind: str) -> None:
    """Padding before and between the texts of rows, as it comes from rows that keep different numbers of drafts."""
    drafter = build("qwen3", kind, num_hidden_layers=2)
    ids, features = tiny_prompt(6, batch=2), drafter.fuse(states_for(drafter, 6, batch=2))
    positions = torch.tensor([[-1, -1, 0, 1, -1, 2], [0, 1, 2, 3, 4, 5]])
    masks = drafter.causal_masks(positions, positions)
    logits = drafter(ids, features, positions.clamp(min=0), masks).logits
    for row, columns in enumerate(([2, 3, 5], [0, 1, 2, 3, 4, 5])):
        alone = drafter(
            ids[row : row + 1, columns], features[row : row + 1, columns], torch.arange(len(columns))[None]
        )
        torch.testing.assert_close(logits[row, columns], alone.logits[0], atol=1e-5, rtol=1e-5)
    assert logits.isfinite().all()


@pytest.mark.parametrize("what", ["ids", "features"])
@torch.no_grad()
def test_later_positions_do_not_change_earlier_ones(kind: str, what: str) -> None:
    drafter = build("qwen3", kind, num_hidden_layers=2)
    ids, features, positions = tiny_prompt(LENGTH), drafter.fuse(states_for(drafter)), torch.arange(LENGTH)[None]
    expected = drafter(ids, features, positions).logits
    if what == "ids":
        ids[:, 6] += 1
    else:
        features[:, 6] += 1
    difference = (drafter(ids, features, positions).logits - expected).abs()
    assert difference[:, :6].max() < 1e-5
    assert difference[:, 6:].amax(dim=-1).min() > 1e-3


@torch.no_grad()
def test_the_next_step_takes_the_features_of_this_one(kind: str) -> None:
    """EAGLE-3 hands on the layer's output, MTP the state that the LM head sees."""
    drafter = build("qwen3", kind)
    output = drafter(tiny_prompt(LENGTH), drafter.fuse(states_for(drafter)), torch.arange(LENGTH)[None])
    assert torch.equal(drafter.project(output.last_hidden_state), output.logits)
    same = torch.equal(output.features, output.last_hidden_state)
    assert same == (kind == "mtp")
    torch.testing.assert_close(
        output.last_hidden_state, output.features if same else drafter.norm(output.features), atol=1e-6, rtol=1e-6
    )
    cache = drafter.make_cache()
    logits, features = drafter.advance(
        tiny_prompt(LENGTH), drafter.fuse(states_for(drafter)), torch.arange(LENGTH)[None], None, cache
    )
    torch.testing.assert_close(logits, output.logits[:, -1])
    torch.testing.assert_close(features, output.features[:, -1:])


@torch.no_grad()
def test_eagle3_layer_is_a_llama_layer_over_pairs() -> None:
    """Against Transformers' Llama attention, widened; without norms on heads."""
    drafter = build("llama", "eagle3", head_norms=False)
    layer, config = drafter.layers[0], drafter.config
    llama = LlamaConfig(
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]},
    )
    llama._attn_implementation = "eager"
    attention = LlamaAttention(llama, 0).eval()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, getattr(layer.self_attn, name))
    features, ids = drafter.fuse(states_for(drafter)), tiny_prompt(LENGTH)
    pairs = torch.cat([layer.input_layernorm(drafter.embed(ids)), layer.hidden_norm(features)], dim=-1)
    positions = torch.arange(LENGTH)[None]
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
    tables = Qwen3RotaryEmbedding(llama)(pairs, positions)
    attended = features + attention(pairs, tables, mask)[0]
    expected = attended + layer.mlp(layer.post_attention_layernorm(attended))
    output = drafter(ids, features, positions)
    torch.testing.assert_close(output.features, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.logits, drafter.project(drafter.norm(expected)), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_mtp_module_is_a_projection_and_a_qwen3_layer() -> None:
    target = tiny_target()
    drafter = make_recurrent(target, "mtp")
    reference_config = Qwen3Config(**{**target.config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    reference_config._attn_implementation = "eager"
    reference = Qwen3DecoderLayer(reference_config, 0).eval()
    reference.load_state_dict(drafter.layers[0].state_dict())
    states, ids, positions = states_for(drafter), tiny_prompt(LENGTH), torch.arange(LENGTH)[None]
    joint = torch.cat(
        [drafter.embedding_norm(target.get_input_embeddings()(ids)), drafter.hidden_norm(states)], dim=-1
    )
    start = joint @ drafter.fc.weight.T
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
    tables = Qwen3RotaryEmbedding(reference_config)(start, positions)
    hidden = drafter.norm(reference(start, attention_mask=mask, position_embeddings=tables))
    output = drafter(ids, drafter.fuse(states), positions)
    torch.testing.assert_close(output.last_hidden_state, hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.logits, target.lm_head(hidden), atol=1e-5, rtol=1e-5)


def test_gradients_reach_every_weight_and_only_the_drafter(kind: str) -> None:
    """Also through several steps, whose keys and values are kept in a cache."""
    target = tiny_target("gemma4")
    drafter = make_recurrent(target, kind).train()
    ids, positions, cache = tiny_prompt(LENGTH), torch.arange(LENGTH)[None], drafter.make_cache()
    mask, own = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), torch.eye(LENGTH, dtype=torch.bool)
    features, loss = drafter.fuse(states_for(drafter)), torch.tensor(0.0)
    for step in range(3):
        output = drafter(ids.roll(-step, 1), features, positions + step, mask[None, None], cache)
        features, loss = output.features, loss + output.logits.square().mean()
        mask = torch.cat([mask, own], dim=1)
    loss.backward()
    assert [name for name, parameter in drafter.named_parameters() if parameter.grad is None] == []
    assert all(parameter.grad is None for parameter in target.model.layers.parameters())
    with pytest.raises(ValueError, match="does not support (gradient|activation) checkpointing"):
        drafter.gradient_checkpointing_enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_target_of_another_dtype(kind: str, dtype: torch.dtype) -> None:
    target = tiny_target("gemma4").to(dtype)
    logits = run(make_recurrent(target, kind).float(), dtype=dtype)
    reference = run(build("gemma4", kind))
    assert (logits.float() - reference).abs().mean() < 0.2 * reference.abs().mean()


# --- building ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_drafter_fits_its_target(kind: str, family: str) -> None:
    target = tiny_target(family)
    drafter = get_drafter(target, KINDS[kind]())
    config, layers = drafter.config, target.config.num_hidden_layers
    assert type(drafter) is {"eagle3": Eagle3Drafter, "mtp": MTPDrafter}[kind]
    assert config.missing_fields() == [] and not drafter.training
    assert (config.vocab_size, config.hidden_size, config.num_target_layers) == (VOCAB_SIZE, HIDDEN_SIZE, layers)
    assert config.sandwich_norms == family.startswith("gemma")
    if kind == "mtp":
        assert config.target_layer_ids == [layers - 1]
        # What the module reads is what the target's LM head sees.
        outputs = target(tiny_prompt(), output_hidden_states=True)
        torch.testing.assert_close(
            drafter.project(drafter.fuse(outputs.hidden_states[-1])), outputs.logits, atol=1e-5, rtol=1e-5
        )
    else:
        assert len(config.target_layer_ids) == min(3, layers - 1) and config.target_layer_ids[-1] < layers - 1


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="`config` is a LlamaConfig; give a `DSparkConfig.*`Eagle3Config.*`MTPConfig"):
        get_drafter(tiny_target(), LlamaConfig())  # type: ignore[call-overload]


@pytest.mark.parametrize("fields", [{"vocab_size": VOCAB_SIZE + 8}, {"hidden_size": 32}, {"num_hidden_layers": 5}])
def test_wrong_target_is_refused(kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="made for another target"):
        make_recurrent(tiny_target(), kind).bind_target(tiny_target(**fields))


def test_layers_that_a_checkpoint_leaves_open_are_eagle3s() -> None:
    fitted = get_drafter(tiny_target(num_hidden_layers=9), Eagle3Config()).config.to_dict()
    fields = {**fitted, "target_layer_ids": None, "num_target_layers": None}
    drafter, target = Eagle3Drafter(Eagle3Config(**fields)), tiny_target(num_hidden_layers=9)
    drafter.bind_target(target)
    assert drafter.config.target_layer_ids == [1, 3, 5]
    other = Eagle3Drafter(Eagle3Config(**fields))
    with pytest.raises(ValueError, match="hidden size of 32"):
        other.bind_target(tiny_target(num_hidden_layers=12, hidden_size=32))
    other.bind_target(target)
    assert other.config.target_layer_ids == [1, 3, 5], "a target that does not fit leaves nothing behind"
    with pytest.raises(ValueError, match="reads 3 layers of its target .* has 3 layers, too few"):
        Eagle3Drafter(Eagle3Config(**fields)).bind_target(tiny_target(num_hidden_layers=3))


# --- saving and loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_reload_is_exact(tmp_path: Path, kind: str, family: str) -> None:
    target = tiny_target(family)
    drafter = make_recurrent(target, kind)
    drafter.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["model_type"] == f"dspark_{kind}"
    for loaded in (AutoModel.from_pretrained(tmp_path), AutoDrafter.from_pretrained(tmp_path)):
        assert type(loaded) is type(drafter) and not loaded.training
        loaded.bind_target(target)
        assert torch.equal(run(loaded), run(drafter))


def test_reduced_vocabulary_and_copied_embeddings_reload(tmp_path: Path, kind: str) -> None:
    tokens = [2, 5, 77, 300]
    target = tiny_target()
    drafter = make_recurrent(target, kind, draft_tokens=tokens, draft_vocab_size=len(tokens))
    before = run(drafter)
    assert before.shape[-1] == len(tokens)
    drafter.copy_target_embeddings()
    torch.testing.assert_close(run(drafter), before)
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert loaded.draft_ids.tolist() == tokens
    assert torch.equal(run(loaded), run(drafter)), "complete without a target"


def test_head_of_its_own_stays(tmp_path: Path) -> None:
    """EAGLE-3 trains its LM head: it is saved, and no copy of the target's comes in its place."""
    target = tiny_target()
    drafter = make_recurrent(target, "eagle3", share_target_head=False)
    own = drafter.lm_head.weight.clone()
    hidden = torch.randn(3, HIDDEN_SIZE)
    torch.testing.assert_close(drafter.project(hidden), hidden @ own.T)
    torch.testing.assert_close(drafter.target_logits(hidden), target.lm_head(hidden))
    drafter.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" in names and "embed_tokens.weight" not in names
    loaded = Eagle3Drafter.from_pretrained(tmp_path)
    loaded.bind_target(target)
    assert torch.equal(run(loaded), run(drafter))
    before = run(drafter)
    drafter.copy_target_embeddings()
    assert torch.equal(drafter.lm_head.weight, own) and isinstance(drafter.embed_tokens, nn.Embedding)
    assert torch.equal(run(drafter), before)


def test_another_kind_of_drafter_is_refused(tmp_path: Path) -> None:
    get_drafter(tiny_target(), DSparkConfig(markov_rank=4)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dspark model .*not a drafter of type 'dspark_mtp'.*AutoDrafter"):
        MTPDrafter.from_pretrained(tmp_path)


def test_incomplete_config_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="leaves .*hidden_size.* unset. Build a drafter with `get_drafter"):
        {"eagle3": Eagle3Drafter, "mtp": MTPDrafter}[kind](KINDS[kind]())


def test_mtp_drafts_one_token_unless_more_are_allowed() -> None:
    assert get_drafter(tiny_target(), MTPConfig()).config.block_size == 1
    assert get_drafter(tiny_target(), MTPConfig(block_size=3)).config.block_size == 3
