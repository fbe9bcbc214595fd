"""Fields of `DSparkConfig`: what is refused, what is derived, what survives saving."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dspark_hf import DSparkConfig


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


@pytest.mark.parametrize("name", DSparkConfig.__annotations__)
def test_every_field_knows_its_type(name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` is <object .*; it must be"):
        DSparkConfig(**{name: object()})


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


def test_every_field_has_help() -> None:
    inherited = {field.name for field in dataclasses.fields(DSparkConfig.__mro__[1])}
    own = [field for field in dataclasses.fields(DSparkConfig) if field.name not in inherited]
    assert [field.name for field in own if not field.metadata.get("help")] == []


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
