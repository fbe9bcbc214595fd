"""`get_drafter` fits any supported target and refuses the others; `AutoDrafter` tells formats apart."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5ForConditionalGeneration,
)

from dspark_hf import AutoDrafter, DSparkConfig, DSparkDrafter, get_drafter
from dspark_hf.factory import choose_mask_token, default_target_layers

from .tiny import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE, tiny_prompt, tiny_target

GEMMA_FAMILIES = ("gemma3", "gemma4")


def small(**fields: Any) -> DSparkConfig:
    return DSparkConfig(**{"markov_rank": 8, **fields})


def make_tokenizer(size: int, extra: dict[int, str] | None = None, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` words, some of which have the given names."""
    words = {index: f"word{index}" for index in range(size)} | (extra or {})
    vocabulary = {word: index for index, word in words.items()}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


# --- what is taken from the target -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_drafter_fits_its_target(family: str) -> None:
    target = tiny_target(family)
    drafter = get_drafter(target, small())
    config = drafter.config
    assert config.missing_fields() == []
    assert (config.vocab_size, config.hidden_size) == (VOCAB_SIZE, HIDDEN_SIZE)
    assert config.num_target_layers == target.config.num_hidden_layers
    assert config.target_model_type == target.config.model_type
    assert (drafter.dtype, drafter.device) == (target.dtype, target.device)
    assert not drafter.training
    assert config.sandwich_norms == (family in GEMMA_FAMILIES)
    input_ids = tiny_prompt()
    # The embedding module's own output, scaled or not, is what the drafter embeds.
    torch.testing.assert_close(drafter.embed(input_ids), target.get_input_embeddings()(input_ids))
    # And its projection of the target's last state is the target's logits.
    outputs = target(input_ids, output_hidden_states=True)
    torch.testing.assert_close(drafter.project(outputs.hidden_states[-1]), outputs.logits, atol=1e-5, rtol=1e-5)


def test_qwen3_style() -> None:
    config = get_drafter(tiny_target("qwen3"), small()).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.hidden_act, config.embedding_scale, config.final_logit_softcapping) == ("silu", 1.0, None)
    assert config.attention_scale is None
    assert not (config.use_value_norm or config.attention_k_eq_v or config.use_layer_scalar)


def test_gemma3_style() -> None:
    config = get_drafter(tiny_target("gemma3"), small()).config
    assert config.hidden_act == "gelu_pytorch_tanh"
    assert config.embedding_scale == pytest.approx(math.sqrt(HIDDEN_SIZE))
    assert config.rope_parameters["rope_theta"] == 1e6
    assert not config.use_value_norm


def test_gemma4_style_uses_full_attention_sizes() -> None:
    config = get_drafter(tiny_target("gemma4"), small()).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 32)
    assert config.use_value_norm and config.attention_k_eq_v and config.use_layer_scalar
    assert (config.attention_scale, config.final_logit_softcapping) == (1.0, 30.0)
    assert config.rope_parameters == {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }


def test_embedding_scale_is_not_rounded_in_half_precision() -> None:
    target = tiny_target("gemma3", hidden_size=80).to(torch.bfloat16)
    drafter = get_drafter(target, small())
    assert drafter.config.embedding_scale == math.sqrt(80)
    assert drafter.dtype == torch.bfloat16
    input_ids = tiny_prompt()
    torch.testing.assert_close(drafter.embed(input_ids), target.get_input_embeddings()(input_ids), atol=0, rtol=0)


def test_family_without_style_is_plain() -> None:
    target = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=4, n_head=4, n_positions=64)).eval()
    drafter = get_drafter(target, small())
    config = drafter.config
    assert not config.sandwich_norms
    assert (config.intermediate_size, config.head_dim, config.num_key_value_heads) == (256, 16, 4)
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    block = drafter.block_input_ids(torch.tensor([[3]]))
    states = torch.randn(1, 5, len(config.target_layer_ids) * 64)
    assert drafter(block, states, torch.arange(12)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        ),
        ({"rope_type": "dynamic", "rope_theta": 5e5, "factor": 4.0}, {"rope_type": "default", "rope_theta": 5e5}),
    ],
)
def test_rotary_embedding_is_the_targets(rope: dict[str, Any], expected: dict[str, Any]) -> None:
    target = tiny_target("llama", rope_parameters=rope)
    assert get_drafter(target, small()).config.rope_parameters == expected


def test_config_of_the_user_wins_and_is_not_changed() -> None:
    config = small(
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8,
        intermediate_size=40,
        hidden_act="relu",
        rms_norm_eps=1e-3,
        rope_parameters={"rope_theta": 123.0},
        target_layer_ids=[-1, 2],
        mask_token_id=11,
        attention_scale=0.5,
        final_logit_softcapping=7.0,
    )
    before = copy.deepcopy(config.to_dict())
    drafter = get_drafter(tiny_target("gemma4", attention_k_eq_v=False), config)
    assert config.to_dict() == before
    assert config.vocab_size is None
    for name in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
        "target_layer_ids",
        "mask_token_id",
        "attention_scale",
        "final_logit_softcapping",
    ):
        assert getattr(drafter.config, name) == getattr(config, name), name


def test_default_config_is_a_dspark_drafter() -> None:
    target = tiny_target()
    drafter = get_drafter(target)
    assert (drafter.config.block_size, drafter.config.markov_rank) == (7, 256)
    assert drafter.markov_head is not None
    assert drafter.confidence_head is not None
    assert drafter.embed_tokens is None


def test_seed_decides_the_weights() -> None:
    target = tiny_target("gemma4")
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(get_drafter(target, small()).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["fc.weight"], states[2]["fc.weight"])


def test_target_is_not_changed() -> None:
    target = tiny_target("gemma4")
    config = copy.deepcopy(target.config.to_dict())
    weights = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    get_drafter(target, small())
    assert target.config.to_dict() == config
    assert all(torch.equal(tensor, weights[name]) for name, tensor in target.state_dict().items())


# --- layers to capture -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(1, [-1]), (2, [0]), (3, [0, 1]), (4, [0, 1, 2]), (36, [1, 9, 17, 25, 33]), (40, [1, 10, 19, 28, 37])],
)
def test_default_layers(num_layers: int, expected: list[int]) -> None:
    assert default_target_layers(num_layers) == expected


@pytest.mark.parametrize("num_layers", range(2, 130))
def test_default_layers_are_always_usable(num_layers: int) -> None:
    layers = default_target_layers(num_layers)
    assert layers == sorted(set(layers))
    assert 1 <= len(layers) <= 5
    assert layers[0] >= 0
    assert layers[-1] < num_layers - 1


def test_one_layer_target_gives_its_embeddings() -> None:
    assert get_drafter(tiny_target(num_hidden_layers=1), small()).config.target_layer_ids == [-1]


# --- mask token --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "special", "expected"),
    [
        ({9: "[MASK]", 7: "<|mask|>"}, {"mask_token": "[MASK]"}, 9),
        ({7: "<|mask|>", 5: "<unused3>"}, {}, 7),
        ({5: "<unused3>", 8: "<unused9>"}, {}, 5),
        ({6: "<|reserved_special_token_4|>"}, {}, 6),
        ({}, {}, 300),
        # A token with a role is not free, even if it is named like one that is.
        ({5: "<unused3>"}, {"unk_token": "<unused3>"}, 300),
    ],
)
def test_mask_token_from_tokenizer(extra: dict[int, str], special: dict[str, str], expected: int) -> None:
    target, tokenizer = tiny_target(), make_tokenizer(300, extra, **special)
    assert get_drafter(target, small(), tokenizer=tokenizer).config.mask_token_id == expected


def test_mask_token_without_tokenizer_is_the_last_free_id() -> None:
    assert choose_mask_token(tiny_target()) == VOCAB_SIZE - 1
    assert choose_mask_token(tiny_target(eos_token_id=[VOCAB_SIZE - 1, 5], pad_token_id=VOCAB_SIZE - 2)) == (
        VOCAB_SIZE - 3
    )


def test_full_vocabulary_without_free_token_is_refused() -> None:
    with pytest.raises(ValueError, match="Set `mask_token_id`"):
        get_drafter(tiny_target(), small(), tokenizer=make_tokenizer(VOCAB_SIZE))


def test_tokens_that_have_another_role_are_named_with_it() -> None:
    target = tiny_target()
    target.generation_config.eos_token_id = [2, 9]
    tokenizer = make_tokenizer(VOCAB_SIZE, {9: "[MASK]", 7: "<unused1>"}, mask_token="[MASK]", unk_token="<unused1>")
    with pytest.raises(ValueError) as error:
        get_drafter(target, small(), tokenizer=tokenizer)
    assert "9 is `eos_token_id` of GenerationConfig; 7 is `unk_token_id` of " in str(error.value)


# --- targets that cannot be served -------------------------------------------------------------------------------


def tiny_granite(**fields: Any) -> PreTrainedModel:
    return GraniteForCausalLM(
        GraniteConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            **fields,
        )
    ).eval()


def test_encoder_decoder_is_refused() -> None:
    target = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        get_drafter(target)


def test_model_without_head_is_refused() -> None:
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    with pytest.raises(ValueError, match="no LM head; load it with `AutoModelForCausalLM`"):
        get_drafter(Qwen3Model(config))


def test_recurrent_target_is_refused() -> None:
    target = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="recurrent state"):
        get_drafter(target)


def test_scaled_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="`logits_scaling` = 4.0"):
        get_drafter(tiny_granite(logits_scaling=4.0))
    cohere = CohereForCausalLM(
        CohereConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    with pytest.raises(ValueError, match="`logit_scale`"):
        get_drafter(cohere)


@torch.no_grad()
def test_embedding_multiplier_is_reproduced() -> None:
    target = tiny_granite(embedding_multiplier=12.0, logits_scaling=1.0)
    drafter = get_drafter(target, small())
    input_ids = torch.tensor([[3, 4]])
    expected = target(input_ids, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(drafter.embed(input_ids), expected)


def test_contradicting_config_is_refused() -> None:
    with pytest.raises(ValueError, match="out of range for a target of 4 layers"):
        get_drafter(tiny_target(), small(target_layer_ids=[0, 4]))
    with pytest.raises(ValueError, match="`hidden_size` is 32"):
        get_drafter(tiny_target(), small(hidden_size=32))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        get_drafter(tiny_target(), small(mask_token_id=VOCAB_SIZE))


# --- AutoDrafter -------------------------------------------------------------------------------------------------


def write_config(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_own_format_is_loaded(tmp_path: Path) -> None:
    target = tiny_target()
    get_drafter(target, small()).save_pretrained(tmp_path)
    drafter = AutoDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(drafter) is DSparkDrafter
    assert drafter.dtype == torch.bfloat16
    assert AutoDrafter.from_pretrained(str(tmp_path)).dtype == torch.float32


def test_subfolder_is_honoured(tmp_path: Path) -> None:
    target = tiny_target()
    get_drafter(target, small()).save_pretrained(tmp_path / "drafter")
    assert type(AutoDrafter.from_pretrained(tmp_path, subfolder="drafter")) is DSparkDrafter


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "EAGLE-3"),
        ({"architectures": ["Qwen2ForCausalLMEagle3"], "model_type": "qwen2"}, "EAGLE-3 drafter of another"),
        (
            {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dflash_config": {"mask_token_id": 1}},
            "DFlash drafter of another architecture",
        ),
        (
            {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}},
            "The SpecForge config lacks",
        ),
        ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}, "The speculators config lacks"),
        ({"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark"}, "The speculators config lacks"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
            "qwen3 language model, not a drafter.*`get_drafter\\(target\\)`.*pass it to `generate` directly",
        ),
        ({"peft_type": "LORA"}, "PEFT adapter"),
        ({"architectures": ["Qwen3VLDSparkModel"]}, "Qwen3VLDSparkModel"),
        ({"architectures": ["Qwen3VLEagle3Model"]}, "Qwen3VLEagle3Model"),
        ({"model_type": "bert"}, "no known drafter format"),
        ({}, "no known drafter format"),
        ({"architectures": 3}, "no known drafter format"),
    ],
)
def test_other_formats_are_named_and_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(write_config(tmp_path, config))


def test_full_model_is_refused(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path) is not None
    with pytest.raises(ValueError, match="qwen3 language model"):
        AutoDrafter.from_pretrained(tmp_path)


def test_adapter_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    with pytest.raises(ValueError, match="PEFT adapter, not a drafter.*`peft.PeftModel.from_pretrained"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\x00"])
def test_unreadable_config_is_an_os_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(OSError, match="config.json"):
        AutoDrafter.from_pretrained(tmp_path)


def test_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="There is no folder .*nothing'; `pretrained_model_name_or_path` takes"):
        AutoDrafter.from_pretrained(tmp_path / "nothing")
    with pytest.raises(OSError, match="There is no folder 'org/name', and it cannot be read from the Hub"):
        AutoDrafter.from_pretrained("org/name")


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="`target` is 'Qwen/Qwen3-8B', of type str; give a loaded model"):
        get_drafter("Qwen/Qwen3-8B")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`config` is a dict; give a `DSparkConfig"):
        get_drafter(tiny_target("qwen3"), {"block_size": 4})  # type: ignore[arg-type]
