"""DFlash drafters in z-lab's format, made by the tests: config keys, what they compute, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

from dspark_hf import AutoDrafter, DSparkDrafter
from dspark_hf.conversion import config_from_dflash

from ..tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_prompt, tiny_target

LAYERS, HEADS, KEY_VALUE_HEADS, HEAD_DIM, WIDTH = 2, 4, 2, 16, 96
CAPTURED = [0, 2]

NATIVE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 5,
    "dflash_config": {"mask_token_id": VOCAB_SIZE - 1, "target_layer_ids": CAPTURED},
    "num_target_layers": 4,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "layer_types": ["full_attention"] * LAYERS,
    "sliding_window": None,
    "attention_bias": False,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def make_tensors() -> dict[str, torch.Tensor]:
    """Random weights under z-lab's names, no norm of which is one."""
    shapes: dict[str, tuple[int, ...]] = {"fc": (HIDDEN_SIZE, len(CAPTURED) * HIDDEN_SIZE)}
    shapes |= dict.fromkeys(("hidden_norm", "norm"), (HIDDEN_SIZE,))
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (HIDDEN_SIZE,),
                "post_attention_layernorm": (HIDDEN_SIZE,),
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN_SIZE),
                "self_attn.k_proj": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN_SIZE),
                "self_attn.v_proj": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN_SIZE),
                "self_attn.o_proj": (HIDDEN_SIZE, HEADS * HEAD_DIM),
                "self_attn.q_norm": (HEAD_DIM,),
                "self_attn.k_norm": (HEAD_DIM,),
                "mlp.gate_proj": (WIDTH, HIDDEN_SIZE),
                "mlp.up_proj": (WIDTH, HIDDEN_SIZE),
                "mlp.down_proj": (HIDDEN_SIZE, WIDTH),
            }.items()
        }
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.1 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


def write(folder: Path, native: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(native), encoding="utf-8")
    save_file(tensors or make_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def states_as_published(block: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What z-lab's model gives: an embedded block `(1, width, d)` behind captured states, to `(1, width, d)`."""
    tensors = make_tensors()
    config = Qwen3Config(hidden_size=HIDDEN_SIZE, num_attention_heads=HEADS, head_dim=HEAD_DIM)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    cos, sin = Qwen3RotaryEmbedding(config)(block, positions)

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(values, values.shape[-1:], tensors[f"{name}.weight"], 1e-6)

    def linear(values: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(values, tensors[f"{name}.weight"])

    def turned(values: torch.Tensor) -> torch.Tensor:
        count = values.shape[2]
        return values * cos[:, None, -count:] + rotate_half(values) * sin[:, None, -count:]

    context = norm(linear(states, "fc"), "hidden_norm")
    for layer in range(LAYERS):
        own = f"layers.{layer}.self_attn"
        given = norm(block, f"layers.{layer}.input_layernorm")
        everything = torch.cat([context, given], dim=1)
        heads = {
            name: linear(values, f"{own}.{name}_proj").unflatten(-1, (-1, HEAD_DIM))
            for name, values in {"q": given, "k": everything, "v": everything}.items()
        }
        query, key = (turned(norm(heads[name], f"{own}.{name}_norm").transpose(1, 2)) for name in "qk")
        attended = F.scaled_dot_product_attention(query, key, heads["v"].transpose(1, 2), enable_gqa=True)
        block = block + linear(attended.transpose(1, 2).flatten(2), f"{own}.o_proj")
        given = norm(block, f"layers.{layer}.post_attention_layernorm")
        gate, up = (linear(given, f"layers.{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        block = block + linear(F.silu(gate) * up, f"layers.{layer}.mlp.down_proj")
    return norm(block, "norm")


def test_config() -> None:
    config = config_from_dflash(NATIVE)
    assert (config.block_size, config.block_width, config.sample_from_anchor) == (4, 5, False)
    assert (config.target_layer_ids, config.mask_token_id, config.num_target_layers) == (CAPTURED, VOCAB_SIZE - 1, 4)
    assert (config.markov_rank, config.enable_confidence_head, config.share_target_embeddings) == (0, False, True)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    nested = {**NATIVE, "dflash_config": {**NATIVE["dflash_config"], "block_size": 8, "final_logit_softcapping": 30.0}}
    del nested["block_size"]
    assert (config_from_dflash(nested).block_size, config_from_dflash(nested).final_logit_softcapping) == (7, 30.0)
    del nested["dflash_config"]["block_size"]
    assert config_from_dflash(nested).block_size == 15
    assert config_from_dflash({**NATIVE, "input_embedding_scale": 8}).embedding_scale == 8.0


@torch.no_grad()
def test_it_computes_what_the_published_model_does(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = AutoDrafter.from_pretrained(write(tmp_path / "native", NATIVE))
    drafter.bind_target(target)
    states = torch.randn(1, 6, len(CAPTURED) * HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[7, *[VOCAB_SIZE - 1] * 4]])
    assert torch.equal(drafter.block_input_ids(torch.tensor([[7]])), ids)
    positions = torch.arange(11)[None]
    output = drafter(ids, states, positions)
    expected = states_as_published(target.get_input_embeddings()(ids), states, positions)[:, 1:]
    torch.testing.assert_close(output.last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.logits, target.lm_head(expected), atol=1e-4, rtol=1e-4)
    cache = drafter.make_cache()
    drafter(ids, states[:, :4], torch.cat([positions[:, :4], torch.arange(4, 9)[None]], dim=1), cache=cache)
    again = drafter(ids, states[:, 4:], positions[:, 4:], cache=cache)
    torch.testing.assert_close(again.last_hidden_state, expected, atol=1e-5, rtol=1e-5)


def test_it_drafts_and_is_saved_in_our_format(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = AutoDrafter.from_pretrained(write(tmp_path / "native", NATIVE))
    options = {"max_new_tokens": 16, "do_sample": False}
    prompts = tiny_prompt(batch=2)
    plain = target.generate(prompts, **options)
    assert torch.equal(target.generate(prompts, assistant_model=drafter, **options), plain)
    assert drafter.last_stats.rounds[0].proposed == 8, "four tokens for each of two rows"
    drafter.save_pretrained(tmp_path / "own")
    loaded = AutoDrafter.from_pretrained(tmp_path / "own")
    assert type(loaded) is DSparkDrafter and not loaded.config.sample_from_anchor
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


def nested(**fields: Any) -> dict[str, Any]:
    return {"dflash_config": {**NATIVE["dflash_config"], **fields}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [1]}}, "lacks \\['mask_token_id'\\]"),
        ({"dflash_config": None}, "lacks \\['target_layer_ids', 'mask_token_id'\\]"),
        ({"hidden_size": None}, "lacks \\['hidden_size'\\]"),
        ({"rope_theta": None}, "lacks `rope_theta`"),
        ({"block_size": 1}, "`block_size` = 1, which counts the anchor"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "`sliding_attention`"),
        ({"is_causal": True}, "`is_causal` = True, a variant"),
        (nested(causal=True), "`causal` = True, a variant"),
        (nested(attention_mode="mla"), "`attention_mode` = 'mla', a variant"),
        (nested(projector_type="dspark"), "`projector_type` = 'dspark', a variant"),
        (nested(selector_rank=64), "`selector_rank` = 64, a variant"),
        (nested(output_multiplier=0.5), "`output_multiplier` = 0.5, a variant"),
        (nested(target_layer_ids=[2, 9]), "`target_layer_ids` is \\[2, 9\\], out of range"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(write(tmp_path, {**NATIVE, **changes}))


def test_wrong_types_are_named() -> None:
    for changes in ({"dflash_config": [1]}, {"block_size": "5"}, nested(mask_token_id="<mask>")):
        name = next(iter(changes)) if "mask" not in str(changes) else "mask_token_id"
        with pytest.raises(TypeError, match=f"`{name}` is"):
            config_from_dflash({**NATIVE, **changes})


def test_tensors_must_be_all_of_them(tmp_path: Path) -> None:
    tensors = make_tensors()
    missing = {name: tensor for name, tensor in tensors.items() if name != "fc.weight"}
    with pytest.raises(OSError, match="fc.weight"):
        AutoDrafter.from_pretrained(write(tmp_path / "missing", NATIVE, missing))
    left_over = {**tensors, "lm_head.weight": torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)}
    with pytest.raises(OSError, match="does not account for, among them \\['lm_head.weight'\\]"):
        AutoDrafter.from_pretrained(write(tmp_path / "left_over", NATIVE, left_over))
    assert load_file(tmp_path / "left_over" / "model.safetensors").keys() == left_over.keys()
