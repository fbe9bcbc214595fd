"""Drafters in DeepSpec's format: config keys, strict loading, and saving in our own format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_hf import AutoDrafter, DSparkDrafter, Eagle3Config, Eagle3Drafter
from dspark_hf.conversion import config_from_deepspec

from ..parity.fixtures import CASES, EAGLE3_CASE, FIXTURES, SAMPLING_CASE, load_drafter

ALL_CASES = (*CASES, SAMPLING_CASE, EAGLE3_CASE)


def native_config(case: str = "qwen3-dspark-vanilla") -> dict[str, Any]:
    return json.loads((FIXTURES / case / "drafter" / "config.json").read_text(encoding="utf-8"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of a DeepSpec checkpoint that a test may damage."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "qwen3-dspark-vanilla" / "drafter", folder)
    return folder


def rewrite_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- config ------------------------------------------------------------------------------------------------------


def test_qwen3_config() -> None:
    config = config_from_deepspec(native_config())
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (331, 64, 96)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 16)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (7, 330, 5)
    assert config.target_layer_ids == [0, 2, 3]
    assert (config.markov_rank, config.markov_head_type) == (16, "vanilla")
    assert config.enable_confidence_head and config.confidence_head_with_markov
    assert config.target_model_type == "qwen3"
    assert not config.share_target_embeddings
    assert not config.sandwich_norms


def test_gemma4_config() -> None:
    config = config_from_deepspec(native_config("gemma4-dspark-vanilla"))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 32)
    assert config.rope_parameters == {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }
    assert config.sandwich_norms and config.use_value_norm and config.attention_k_eq_v and config.use_layer_scalar
    assert (config.attention_scale, config.embedding_scale, config.final_logit_softcapping) == (1.0, 8.0, 30.0)
    assert config.hidden_act == "gelu_pytorch_tanh"
    assert config.target_model_type == "gemma4"


def test_gemma4_without_shared_keys_keeps_its_key_value_heads() -> None:
    native = native_config("gemma4-dspark-vanilla") | {"attention_k_eq_v": False}
    config = config_from_deepspec(native)
    assert not config.attention_k_eq_v
    assert (config.num_key_value_heads, config.head_dim) == (2, 32)


def test_dflash_config_has_no_heads() -> None:
    config = config_from_deepspec(native_config("qwen3-dflash"))
    assert config.markov_rank == 0
    assert not config.enable_confidence_head


def test_eagle3_config() -> None:
    config = config_from_deepspec(native_config(EAGLE3_CASE))
    assert type(config) is Eagle3Config
    assert (config.block_size, config.num_hidden_layers, config.num_target_layers) == (7, 1, 6)
    assert config.target_layer_ids == [0, 1, 2, 3, 4]
    assert config.head_norms and not config.share_target_embeddings and config.draft_vocab_size is None
    assert config.target_model_type == "qwen3"
    several = native_config(EAGLE3_CASE) | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    assert config_from_deepspec(several).num_hidden_layers == 2


def test_eagle3_config_for_gemma4() -> None:
    """The layers of a Gemma 4 target with EAGLE-3's keys."""
    native = native_config("gemma4-dspark-vanilla") | {"architectures": ["Gemma4Eagle3Model"], "ttt_length": 5}
    for key in ("block_size", "mask_token_id", "markov_rank"):
        del native[key]
    config = config_from_deepspec(native)
    assert type(config) is Eagle3Config and config.block_size == 5
    assert config.sandwich_norms and config.attention_k_eq_v and config.use_layer_scalar
    assert (config.attention_scale, config.embedding_scale, config.final_logit_softcapping) == (1.0, 8.0, 30.0)
    layer = Eagle3Drafter(config).layers[0]
    assert layer.self_attn.q_proj.in_features == 2 * config.hidden_size and layer.self_attn.v_proj is None


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"rope_theta": 5e6}, {"rope_type": "default", "rope_theta": 5e6}),
        ({"rope_theta": 5e6, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e6}),
        ({"rope_parameters": {"rope_theta": 5e6}}, {"rope_type": "default", "rope_theta": 5e6}),
        (
            {"rope_theta": 5e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e6, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e6}, "sliding_attention": {"rope_theta": 1e4}}},
            {"rope_type": "default", "rope_theta": 5e6},
        ),
    ],
)
def test_rotary_embedding_in_every_form(stored: dict[str, Any], expected: dict[str, Any]) -> None:
    native = native_config()
    del native["rope_parameters"]
    assert config_from_deepspec(native | stored).rope_parameters == expected


def test_sliding_layers_are_forwarded() -> None:
    native = native_config() | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    config = config_from_deepspec(native)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 32


@pytest.mark.parametrize(
    ("case", "key"),
    [
        *(("qwen3-dspark-vanilla", key) for key in ("block_size", "mask_token_id", "target_layer_ids", "markov_rank")),
        ("qwen3-dspark-vanilla", "hidden_size"),
        (EAGLE3_CASE, "ttt_length"),
        (EAGLE3_CASE, "num_target_layers"),
    ],
)
def test_missing_key_is_named(case: str, key: str) -> None:
    native = native_config(case)
    del native[key]
    with pytest.raises(ValueError, match=key):
        config_from_deepspec(native)


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "64"}, {"num_attention_heads": "6", "head_dim": None}, {"rope_parameters": "x"}]
)
def test_value_of_another_type_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"`{next(iter(wrong))}`.* is '.*'; it must be"):
        config_from_deepspec(native_config() | wrong)


def test_missing_rotary_base_is_named() -> None:
    native = native_config() | {"rope_parameters": None}
    with pytest.raises(ValueError, match="rope_theta"):
        config_from_deepspec(native)


def test_other_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        config_from_deepspec(native_config() | {"architectures": ["Qwen3ForCausalLM"]})


# --- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL_CASES)
def test_every_tensor_arrives(case: str) -> None:
    drafter = load_drafter(case)
    stored, loaded = load_file(FIXTURES / case / "drafter" / "model.safetensors"), drafter.state_dict()
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name
    assert not drafter.training


@pytest.mark.parametrize("case", ALL_CASES)
def test_saved_in_our_format_it_reloads_exactly(tmp_path: Path, case: str) -> None:
    drafter = load_drafter(case)
    drafter.save_pretrained(tmp_path)
    is_eagle3 = case == EAGLE3_CASE
    model_type = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["model_type"]
    assert model_type == ("dspark_eagle3" if is_eagle3 else "dspark")
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert type(loaded) is (Eagle3Drafter if is_eagle3 else DSparkDrafter)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    states = torch.randn(1, 4, len(drafter.config.target_layer_ids) * drafter.config.hidden_size)
    if is_eagle3:
        ids, positions = torch.tensor([[3, 4, 5, 6]]), torch.arange(4)[None]
        with torch.no_grad():
            outputs = [each(ids, each.fuse(states), positions).logits for each in (drafter, loaded)]
        assert torch.equal(*outputs)
        return
    block = drafter.block_input_ids(torch.tensor([[3]]))
    positions = torch.arange(4 + block.shape[1])[None]
    with torch.no_grad():
        assert torch.equal(drafter(block, states, positions).logits, loaded(block, states, positions).logits)


def test_dtype_is_the_configs_unless_given(checkpoint: Path) -> None:
    assert AutoDrafter.from_pretrained(checkpoint).dtype == torch.float32
    assert AutoDrafter.from_pretrained(checkpoint, dtype=torch.bfloat16).dtype == torch.bfloat16
    native = native_config() | {"dtype": "bfloat16"}
    (checkpoint / "config.json").write_text(json.dumps(native), encoding="utf-8")
    rewrite_weights(
        checkpoint, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
    )
    assert AutoDrafter.from_pretrained(checkpoint).dtype == torch.bfloat16


def test_sharded_checkpoint(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {
        f"model-0000{index + 1}-of-00002.safetensors": {name: tensors[name] for name in names[index::2]}
        for index in range(2)
    }
    for file, shard in shards.items():
        save_file(shard, checkpoint / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, shard in shards.items() for name in shard}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    loaded = AutoDrafter.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "markov_head.markov_w2.weight"])
def test_missing_tensor_is_named(checkpoint: Path, name: str) -> None:
    rewrite_weights(checkpoint, lambda tensors: tensors.pop(name))
    with pytest.raises(OSError, match=name.replace(".", "\\.")):
        AutoDrafter.from_pretrained(checkpoint)


def test_left_over_tensor_is_named(checkpoint: Path) -> None:
    rewrite_weights(checkpoint, lambda tensors: tensors.update({"layers.2.extra.weight": torch.zeros(2)}))
    with pytest.raises(OSError, match="layers\\.2\\.extra\\.weight"):
        AutoDrafter.from_pretrained(checkpoint)


def test_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    rewrite_weights(checkpoint, lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 64)}))
    with pytest.raises(OSError, match="fc\\.weight"):
        AutoDrafter.from_pretrained(checkpoint)


@pytest.mark.parametrize("kept", [0, 4, 1000, -100])
def test_truncated_file_is_an_os_error(checkpoint: Path, kept: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(OSError, match="cannot be read"):
        AutoDrafter.from_pretrained(checkpoint)


def test_pickle_is_refused(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(OSError):
        AutoDrafter.from_pretrained(checkpoint)
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    with pytest.raises(OSError, match="pickle.*Convert them to safetensors"):
        AutoDrafter.from_pretrained(checkpoint)
