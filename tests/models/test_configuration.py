"""Fields of the configurations: what is refused, what is derived, what survives saving."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from dspark_hf import DSparkConfig, Eagle3Config, MTPConfig
from dspark_hf.models import DrafterConfig
from dspark_hf.models.configuration_eagle3 import eagle3_target_layers

KINDS: tuple[type[DrafterConfig], ...] = (DSparkConfig, Eagle3Config, MTPConfig)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "`block_size` is 0"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"markov_rank": -1}, "`markov_rank` is -1; use 0"),
        ({"markov_head_type": "lstm"}, "`markov_head_type` is 'lstm'; choose one of"),
        ({"layer_types": ["full_attention"]}, "`layer_types` has 1 entries"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "`sliding_window` is unset"),
        ({"target_layer_ids": []}, "at least one layer"),
        ({"target_layer_ids": [3, 1]}, "strictly rising"),
        ({"target_layer_ids": [1, 1]}, "strictly rising"),
        ({"target_layer_ids": [-2, 1]}, "-1 \\(the embedding output\\)"),
        ({"target_layer_ids": [1, 4], "num_target_layers": 4}, "out of range for a target of 4 layers"),
        ({"mask_token_id": 10, "vocab_size": 10}, "outside the vocabulary of 10"),
        ({"mask_token_id": -1, "vocab_size": 10}, "outside the vocabulary of 10"),
        ({"draft_vocab_size": 0}, "`draft_vocab_size` is 0; it must be at least 1"),
        ({"draft_vocab_size": 11, "vocab_size": 10}, "`draft_vocab_size` is 11, more than the vocabulary of 10"),
        ({"hidden_size": 0}, "`hidden_size` is 0; it must be at least 1"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "`num_key_value_heads` = 3 does not divide"),
        ({"hidden_act": "nope"}, "`hidden_act` is 'nope'; choose one of .*'silu'"),
        ({"final_logit_softcapping": 0.0}, "`final_logit_softcapping` is 0.0; it must be positive"),
        ({"dtype": "foo"}, "`dtype` is 'foo'; name a floating-point type"),
        ({"torch_dtype": 3}, "`dtype` is 3"),
        ({"dtype": "int8"}, "`dtype` is 'int8'"),
        ({"rope_parameters": {"rope_type": "default"}}, "`rope_parameters` has `rope_theta` = None"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "has `factor` = None; it must be a positive",
        ),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "has `rope_theta` = '1e4'"),
        ({"confidence_temperatures": [1.0] * 6}, "`confidence_temperatures` has 6 entries for `block_size` = 7"),
        ({"confidence_temperatures": [1.0] * 6 + [0.0]}, "`confidence_temperatures` is .*0.0.; each must be positive"),
        (
            {"confidence_temperatures": [1.0], "block_size": 1, "enable_confidence_head": False},
            "`confidence_temperatures` is .* but `enable_confidence_head` is false",
        ),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**fields)


@pytest.mark.parametrize(
    ("config_class", "name"),
    [(config_class, name) for config_class in KINDS for name in config_class.drafter_fields()],
)
def test_every_field_knows_its_type(config_class: type[DrafterConfig], name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` is <object .*; it must be"):
        config_class(**{name: object()})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": "7"}, "`block_size` is '7'; it must be a whole number."),
        ({"block_size": 7.0}, "`block_size` is 7.0"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` is True"),
        ({"markov_rank": None}, "`markov_rank` is None"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` is nan; it must be a finite number."),
        (
            {"target_layer_ids": ["1", 2]},
            "`target_layer_ids` is ['1', 2]; it must be a list of whole numbers, or unset",
        ),
        ({"target_layer_ids": 3}, "`target_layer_ids` is 3"),
        ({"rope_parameters": "x"}, "`rope_parameters` is 'x'"),
        ({"confidence_temperatures": 1.5}, "`confidence_temperatures` is 1.5; it must be a list of finite numbers"),
        ({"confidence_temperatures": [float("nan")]}, "`confidence_temperatures` is [nan]"),
        ({"share_target_embeddings": "false"}, "`share_target_embeddings` is 'false'; it must be true or false."),
    ],
)
def test_wrong_types_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        DSparkConfig(**fields)


def test_defaults_leave_the_target_open() -> None:
    config = DSparkConfig()
    assert config.block_size == 7
    assert config.layer_types == ["full_attention"] * config.num_hidden_layers
    assert config.tie_word_embeddings is False
    # Facts about a target must not be guessed.
    assert set(config.missing_fields()) == {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rope_parameters",
        "mask_token_id",
        "target_layer_ids",
    }


@pytest.mark.parametrize("config_class", KINDS)
def test_every_field_has_help(config_class: type[DrafterConfig]) -> None:
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = {field.name: field.metadata.get("help") for field in dataclasses.fields(config_class)}
    names = config_class.drafter_fields()
    assert [name for name in names if not own[name]] == []
    assert {*own} - inherited <= {*names}


def test_without_sequential_head_confidence_sees_hidden_states_only() -> None:
    config = DSparkConfig(markov_rank=0)
    assert config.enable_confidence_head
    assert not config.confidence_head_with_markov


def test_embedding_output_may_be_captured() -> None:
    assert DSparkConfig(target_layer_ids=[-1, 2], num_target_layers=4).target_layer_ids == [-1, 2]


@pytest.mark.parametrize("filled", [False, True])
def test_saving_keeps_every_field(tmp_path: Path, filled: bool) -> None:
    fields = (
        {
            "vocab_size": 100,
            "draft_vocab_size": 30,
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "embedding_scale": 8.0,
            "attention_scale": 1.0,
            "markov_head_type": "rnn",
            "target_layer_ids": [-1, 3],
            "confidence_temperatures": [1.5, 2, *[1.0] * 5],
        }
        if filled
        else {}
    )
    config = DSparkConfig(**fields)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is DSparkConfig
    for name in (field.name for field in dataclasses.fields(DSparkConfig)):
        if name not in ("transformers_version", "architectures", "_name_or_path"):
            assert getattr(loaded, name) == getattr(config, name), name


# --- recurrent drafters ------------------------------------------------------------------------------------------


def test_a_saved_dspark_config_has_nothing_of_other_kinds() -> None:
    saved = DSparkConfig().to_diff_dict()
    assert not {"head_norms", "share_target_head"} & saved.keys()
    assert DSparkConfig.drafter_fields().keys() <= saved.keys()


def test_defaults_of_recurrent_drafters() -> None:
    eagle3, mtp = Eagle3Config(), MTPConfig()
    assert (eagle3.block_size, eagle3.num_hidden_layers) == (7, 1)
    assert (mtp.block_size, mtp.num_hidden_layers) == (1, 1)
    for config in (eagle3, mtp):
        assert config.layer_types == ["full_attention"]
        assert not hasattr(config, "mask_token_id") and not hasattr(config, "markov_rank")
    # An EAGLE-3 drafter can be built before it knows which layers of its target it reads.
    assert "target_layer_ids" not in eagle3.missing_fields()
    assert "target_layer_ids" in mtp.missing_fields()
    assert eagle3.num_captured_layers == 3 and Eagle3Config(target_layer_ids=[0, 2]).num_captured_layers == 2


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (Eagle3Config, {"block_size": 0}, "`block_size` is 0"),
        (Eagle3Config, {"target_layer_ids": [3, 1]}, "strictly rising"),
        (Eagle3Config, {"num_attention_heads": 4, "num_key_value_heads": 3}, "does not divide"),
        (MTPConfig, {"target_layer_ids": [1, 2]}, "an MTP module reads one layer, the target's last"),
        (MTPConfig, {"target_layer_ids": [4], "num_target_layers": 4}, "out of range for a target of 4 layers"),
    ],
)
def test_wrong_fields_of_recurrent_drafters_are_refused(
    config_class: type[DrafterConfig], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_class(**fields)


@pytest.mark.parametrize("config_class", KINDS)
def test_types_of_models_are_ours_alone(tmp_path: Path, config_class: type[DrafterConfig]) -> None:
    assert CONFIG_MAPPING[config_class.model_type] is config_class
    config_class(vocab_size=100, rope_parameters={"rope_theta": 5e5}).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is config_class
    assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (1, [-1]),
        (2, [0]),
        (3, [0, 1]),
        (4, [0, 1, 2]),
        (6, [0, 2, 4]),
        (7, [1, 2, 3]),
        (32, [1, 15, 28]),
        (36, [1, 17, 32]),
    ],
)
def test_eagle3_reads_a_low_a_middle_and_a_high_layer(num_layers: int, expected: list[int]) -> None:
    assert eagle3_target_layers(num_layers) == expected


def test_eagle3_never_reads_the_last_layer() -> None:
    for num_layers in range(1, 100):
        layers = eagle3_target_layers(num_layers)
        assert layers == sorted(set(layers)) and layers[-1] < num_layers - 1 and len(layers) <= 3
        assert num_layers < 4 or len(layers) == 3
