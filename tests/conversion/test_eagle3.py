"""EAGLE-3 drafters as EAGLE and SpecForge store them: config keys, names of tensors, the draft vocabulary, loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_hf import AutoDrafter, Eagle3Drafter
from dspark_hf.conversion import config_from_eagle3

from ..recurrent import make_recurrent
from ..tiny import VOCAB_SIZE, tiny_prompt, tiny_target

TOKENS = [*range(0, 200, 2), 250, 319]

NATIVE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 1,
    "draft_vocab_size": len(TOKENS),
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
}
"""A config.json as SpecForge writes it for a Llama target."""


def make_target() -> Any:
    """Deep enough for EAGLE-3's own choice of layers."""
    target = tiny_target("llama", num_hidden_layers=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target()


@pytest.fixture(scope="module")
def original(target: Any) -> Eagle3Drafter:
    """The drafter that the checkpoints hold."""
    return make_recurrent(
        target,
        "eagle3",
        TOKENS,
        draft_vocab_size=len(TOKENS),
        head_norms=False,
        share_target_head=False,
        rms_norm_eps=1e-5,
        block_size=7,
    )


def foreign_tensors(original: Eagle3Drafter) -> dict[str, torch.Tensor]:
    """The tensors by EAGLE's names."""
    return {name.replace("layers.0.", "midlayer."): tensor.clone() for name, tensor in original.state_dict().items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(NATIVE | changes), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(drafter: Eagle3Drafter, target: Any) -> torch.Tensor:
    drafter.bind_target(target)
    states = torch.randn(1, 9, 3 * 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = drafter(tiny_prompt(9), drafter.fuse(states), torch.arange(9)[None])
    return drafter.over_vocabulary(output.logits)


def test_names_are_eagles(original: Eagle3Drafter) -> None:
    """What SpecForge and SGLang call the tensors."""
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    norms = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    assert foreign_tensors(original).keys() == {
        *(f"midlayer.{name}.weight" for name in (*projections, *norms)),
        *(f"{name}.weight" for name in ("fc", "norm", "lm_head")),
        "d2t",
        "t2d",
    }


def test_checkpoint_loads_and_drafts(tmp_path: Path, target: Any, original: Eagle3Drafter) -> None:
    drafter = AutoDrafter.from_pretrained(write(tmp_path / "checkpoint", foreign_tensors(original)))
    assert type(drafter) is Eagle3Drafter and not drafter.training
    assert drafter.config.target_layer_ids is None, "EAGLE-3 leaves them to the target"
    assert drafter.draft_ids.tolist() == TOKENS
    assert torch.equal(logits(drafter, target), logits(original, target))
    # Layers whose output is read, counted from 0: low, middle and high.
    assert drafter.config.target_layer_ids == [1, 3, 4]
    assert drafter.lm_head is not None and drafter.embed_tokens is None
    prompt = tiny_prompt(20)
    plain = target.generate(input_ids=prompt, max_new_tokens=20, do_sample=False)
    output = target.generate(input_ids=prompt, max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert torch.equal(output, plain)
    target.generate(input_ids=prompt, max_new_tokens=20, do_sample=False, assistant_model=original)
    rounds, expected = drafter.last_stats.rounds, original.last_stats.rounds
    assert [entry.emitted for entry in rounds] == [entry.emitted for entry in expected]


def test_saved_in_our_format_it_reloads_exactly(tmp_path: Path, target: Any, original: Eagle3Drafter) -> None:
    drafter = AutoDrafter.from_pretrained(write(tmp_path / "checkpoint", foreign_tensors(original)))
    drafter.save_pretrained(tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in saved and not [name for name in saved if "midlayer" in name]
    loaded = AutoDrafter.from_pretrained(tmp_path / "ours")
    assert loaded.config.target_layer_ids is None
    assert torch.equal(logits(loaded, target), logits(original, target))


def test_layers_and_rope_of_the_config(tmp_path: Path, target: Any, original: Eagle3Drafter) -> None:
    changes = {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True},
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    drafter = AutoDrafter.from_pretrained(write(tmp_path / "checkpoint", foreign_tensors(original), **changes))
    assert drafter.config.target_layer_ids == [0, 2, 5]
    assert drafter.config.rope_parameters == changes["rope_scaling"] | {"rope_theta": 5e5}
    assert not torch.allclose(logits(drafter, target), logits(original, target)), "another rotary embedding"
    assert config_from_eagle3({**NATIVE, "rope_theta": None}).rope_parameters["rope_theta"] == 1e4, "Llama's default"


@pytest.mark.parametrize("what", ["embeddings", "buffers", "no_t2d", "int32", "shards"])
def test_what_checkpoints_may_have(tmp_path: Path, target: Any, original: Eagle3Drafter, what: str) -> None:
    tensors = foreign_tensors(original)
    if what == "embeddings":
        tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    elif what == "buffers":
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    elif what == "no_t2d":
        del tensors["t2d"]
    elif what == "int32":
        tensors["d2t"] = tensors["d2t"].int()
    folder = write(tmp_path / "checkpoint", tensors)
    if what == "shards":
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    drafter = AutoDrafter.from_pretrained(folder)
    assert torch.equal(logits(drafter, target), logits(original, target))
    assert drafter.t2d.nonzero().flatten().tolist() == TOKENS


@pytest.mark.parametrize("size", [None, VOCAB_SIZE])
def test_whole_vocabulary(tmp_path: Path, target: Any, size: int | None) -> None:
    """Where every token is drafted, tables of zeros and ones, or none."""
    original = make_recurrent(target, "eagle3", head_norms=False, share_target_head=False, rms_norm_eps=1e-5)
    tensors = foreign_tensors(original)
    if size is not None:
        tensors |= {"d2t": torch.zeros(size, dtype=torch.long), "t2d": torch.ones(size, dtype=torch.bool)}
    drafter = AutoDrafter.from_pretrained(write(tmp_path / "checkpoint", tensors, draft_vocab_size=size))
    assert drafter.d2t is None
    assert torch.equal(logits(drafter, target), logits(original, target))


def test_dtype_is_the_configs_unless_given(tmp_path: Path, original: Eagle3Drafter) -> None:
    folder = write(tmp_path / "checkpoint", foreign_tensors(original))
    assert AutoDrafter.from_pretrained(folder).dtype == torch.float32
    assert AutoDrafter.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    halved = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in foreign_tensors(original).items()
    }
    assert AutoDrafter.from_pretrained(write(folder, halved, torch_dtype="bfloat16")).dtype == torch.bfloat16


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "The EAGLE-3 config lacks \\['hidden_size'\\]"),
        ({"num_hidden_layers": 2}, "`num_hidden_layers` = 2; a `LlamaForCausalLMEagle3` has one"),
        ({"target_hidden_size": 128}, "64 wide and its target 128"),
        ({"norm_before_residual": True}, "`norm_before_residual`, a variant"),
        ({"eagle_config": {"norm_before_fc": True}}, "`norm_before_fc`, a variant"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "outside of `eagle_config`"),
        ({"draft_vocab_size": VOCAB_SIZE + 1}, "more than the vocabulary"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'; a drafter supports"),
    ],
)
def test_other_variants_are_refused(
    tmp_path: Path, original: Eagle3Drafter, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(write(tmp_path / "checkpoint", foreign_tensors(original), **changes))


@pytest.mark.parametrize("changes", [{"hidden_size": "64"}, {"eagle_config": 3}])
def test_value_of_another_type_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"`{next(iter(changes))}` is .*; it must be"):
        config_from_eagle3(NATIVE | changes)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "d2t"])
def test_missing_tensor_is_named(tmp_path: Path, original: Eagle3Drafter, name: str) -> None:
    tensors = foreign_tensors(original)
    del tensors[name]
    folder = write(tmp_path / "checkpoint", tensors)
    message = f"The drafter .*checkpoint is incomplete: .*{name.replace('midlayer.', 'layers.0.')}"
    with pytest.raises(OSError, match=message):
        AutoDrafter.from_pretrained(folder)


def test_left_over_tensor_is_named(tmp_path: Path, original: Eagle3Drafter) -> None:
    folder = write(tmp_path / "checkpoint", foreign_tensors(original) | {"midlayer.extra.weight": torch.zeros(2)})
    with pytest.raises(OSError, match="1 tensors .*extra\\.weight"):
        AutoDrafter.from_pretrained(folder)


def test_tensor_of_another_shape_is_named(tmp_path: Path, original: Eagle3Drafter) -> None:
    folder = write(tmp_path / "checkpoint", foreign_tensors(original) | {"fc.weight": torch.zeros(64, 64)})
    with pytest.raises(OSError, match="fc\\.weight"):
        AutoDrafter.from_pretrained(folder)


def test_tables_that_contradict_each_other(tmp_path: Path, original: Eagle3Drafter) -> None:
    tensors = foreign_tensors(original)
    tensors["t2d"] = tensors["t2d"].roll(1)
    with pytest.raises(OSError, match="tables `d2t` and `t2d` that name different tokens"):
        AutoDrafter.from_pretrained(write(tmp_path / "checkpoint", tensors))


@pytest.mark.parametrize("kept", [0, 1000, -100])
def test_truncated_file_is_an_os_error(tmp_path: Path, original: Eagle3Drafter, kept: int) -> None:
    path = write(tmp_path / "checkpoint", foreign_tensors(original)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(OSError, match="cannot be read"):
        AutoDrafter.from_pretrained(path.parent)


def test_pickle_is_refused(tmp_path: Path, original: Eagle3Drafter) -> None:
    folder = write(tmp_path / "checkpoint", foreign_tensors(original))
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no weights in safetensors"):
        AutoDrafter.from_pretrained(folder)
    torch.save(foreign_tensors(original), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="EAGLE-3 drafter .*pickle.*Convert them to safetensors"):
        AutoDrafter.from_pretrained(folder)
