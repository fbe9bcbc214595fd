"""Drafters as the speculators library of the vLLM project stores them, which vLLM serves by their path alone.

Their `config.json` has the layers as a Transformers config of their own, `transformer_layer_config`, and beside it the
method and what it needs. Layers of the target are numbered from the embedding output, one higher than here. Tensors
have the same names as here. DFlash and DSpark drafters have no embeddings, and over the whole vocabulary no LM head:
both are the target's, which the reader is told of (`verifier`). With a reduced draft vocabulary the LM head has the
target's rows for it. EAGLE-3 drafters have a copy of the target's embeddings, and an LM head of their own.
"""

from __future__ import annotations

import os
from typing import Any

from ..models import DRAFTER_CLASSES, Drafter, DSparkConfig, Eagle3Config
from ..models.configuration_base import check_fields
from .checkpoints import check_keys, check_leftovers, read_tensors, rope_parameters
from .writing import check_layers, dtype_name, own_facts, pick, read_own_facts, rope_keys

SPECULATORS_VERSION = "0.9.0"
"""The version of the library whose format is written."""

LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
"""Keys of `transformer_layer_config` that mean the same here."""

HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")

BLOCK_LAYERS = "aux_hidden_state_layer_ids"
BLOCK_KEYS = ("block_size", "mask_token_id", BLOCK_LAYERS)

EAGLE3_LAYERS = "eagle_aux_hidden_state_layer_ids"

VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
"""Switches of EAGLE-3 drafters that change what is computed, or whose weights."""

FROM_ANCHOR = {"dflash": False, "dspark": True}
"""What `sample_from_anchor` is where a config does not say."""


def config_from_speculators(native: dict[str, Any]) -> DSparkConfig | Eagle3Config:
    """Translates the `config.json` of such a drafter.

    Raises:
        TypeError: if a key has a value of another type.
        ValueError: if it lacks keys that a drafter needs, or describes a method or variant that is not supported.
    """
    method = native.get("speculators_model_type")
    if method not in ("dspark", "dflash", "eagle3"):
        raise ValueError(
            f"The speculators config has `speculators_model_type` = {method!r}; supported are 'dspark', 'dflash' and "
            "'eagle3'."
        )
    check_keys(native, ("transformer_layer_config",), "speculators")
    layers = native["transformer_layer_config"]
    if not isinstance(layers, dict):
        raise TypeError(f"`transformer_layer_config` is {layers!r}; it must be a mapping of names to values.")
    check_keys(layers, LAYER_KEYS[:5], "speculators")
    if native.get("target_hidden_size") not in (None, layers["hidden_size"]):
        raise ValueError(
            f"The speculators drafter is {layers['hidden_size']} wide and its target {native['target_hidden_size']} "
            "(`target_hidden_size`); only drafters as wide as their target are supported."
        )
    fields = {name: layers[name] for name in LAYER_KEYS if layers.get(name) is not None}
    vocabulary = native.get("draft_vocab_size")
    fields["draft_vocab_size"] = None if vocabulary == layers["vocab_size"] else vocabulary
    fields["target_name_or_path"] = _verifier(native).get("name_or_path")
    fields |= _eagle3_fields(native, layers) if method == "eagle3" else _block_fields(native, layers, method)
    config_class: Any = Eagle3Config if method == "eagle3" else DSparkConfig
    fields |= read_own_facts(native, "block_size")
    check_fields(config_class, fields)
    fields.setdefault("num_key_value_heads", layers["num_attention_heads"])
    fields.setdefault("head_dim", layers["hidden_size"] // layers["num_attention_heads"])
    config: DSparkConfig | Eagle3Config = config_class(
        **fields,
        rope_parameters=rope_parameters(layers, "speculators", 10000.0),
        dtype=native.get("dtype") or native.get("torch_dtype") or layers.get("dtype"),
    )
    return config


def _verifier(native: dict[str, Any]) -> dict[str, Any]:
    """What is said of the target."""
    found = (native.get("speculators_config") or {}).get("verifier")
    return found if isinstance(found, dict) else {}


def _block_fields(native: dict[str, Any], layers: dict[str, Any], method: str) -> dict[str, Any]:
    """Fields of DFlash and DSpark drafters."""
    check_keys(native, BLOCK_KEYS, "speculators")
    width = native["block_size"]
    if not isinstance(width, int):
        raise TypeError(f"`block_size` is {width!r}; it must be a whole number.")
    if "sliding_attention" in (layers.get("layer_types") or ()):
        raise ValueError(
            "The speculators config has `sliding_attention` in `layer_types`, of which its readers differ. Only "
            "drafters of `full_attention` are supported."
        )
    from_anchor = native.get("sample_from_anchor")
    from_anchor = FROM_ANCHOR[method] if from_anchor is None else from_anchor
    heads: dict[str, Any] = {"markov_rank": 0, "enable_confidence_head": False}
    if method == "dspark":
        heads = {name: native[name] for name in HEAD_KEYS if native.get(name) is not None}
    return heads | {
        "block_size": width - (not from_anchor),
        "mask_token_id": native["mask_token_id"],
        "target_layer_ids": _numbers_from(native[BLOCK_LAYERS]),
        "sample_from_anchor": from_anchor,
    }


def _eagle3_fields(native: dict[str, Any], layers: dict[str, Any]) -> dict[str, Any]:
    """Fields of EAGLE-3 drafters."""
    for name in VARIANTS:
        if native.get(name):
            raise ValueError(f"The speculators config has `{name}`, a variant whose layers are not supported here.")
    kind = layers.get("model_type", "qwen3")
    if kind not in ("llama", "qwen3") or layers["num_hidden_layers"] != 1:
        raise ValueError(
            f"The speculators EAGLE-3 drafter has {layers['num_hidden_layers']} layers of type {kind!r}; supported is "
            "one layer, of type 'llama' or 'qwen3'."
        )
    found = native.get(EAGLE3_LAYERS)
    return {
        "target_layer_ids": None if found is None else _numbers_from(found),
        "head_norms": kind == "qwen3",
        "share_target_head": False,
    }


def _numbers_from(layers: Any) -> Any:
    """Our numbers of layers; anything else is left for the check of the fields."""
    whole = isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)
    return [layer - 1 for layer in layers] if whole else layers


def config_to_speculators(config: DSparkConfig | Eagle3Config, verifier: list[str]) -> dict[str, Any]:
    """The `config.json` of a drafter as speculators writes it.

    Args:
        config: of the drafter.
        verifier: `architectures` of the target.

    Raises:
        ValueError: if speculators' classes would compute something else.
    """
    check_layers(config, "speculators' format")
    kind = "qwen3" if getattr(config, "head_norms", True) else "llama"
    layers = pick(config, LAYER_KEYS) | rope_keys(config) | {"model_type": kind, "tie_word_embeddings": False}
    layers["layer_types"] = config.layer_types
    if config.target_layer_ids is None:
        raise ValueError("The drafter's `target_layer_ids` are unset; give the target, or bind the drafter to it.")
    numbers = [layer + 1 for layer in config.target_layer_ids]
    method = _method(config)
    native: dict[str, Any] = {
        "speculators_model_type": method,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.predicted_vocab_size,
        "transformer_layer_config": layers,
        "tie_word_embeddings": False,
        "dtype": dtype_name(config),
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size}],
            "verifier": {"name_or_path": config.target_name_or_path, "architectures": verifier},
        },
    }
    if isinstance(config, Eagle3Config):
        if config.num_hidden_layers != 1:
            raise ValueError(
                f"The drafter has `num_hidden_layers` = {config.num_hidden_layers}, and speculators' further layers "
                "do not read the embeddings again, as these do. One layer can be written."
            )
        native |= {
            "architectures": ["Eagle3DraftModel"],
            EAGLE3_LAYERS: numbers,
            **dict.fromkeys(VARIANTS, False),
            **own_facts(config, "block_size"),
        }
        return native
    native |= {
        "architectures": ["DSparkDraftModel" if method == "dspark" else "DFlashDraftModel"],
        "block_size": config.block_width,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        BLOCK_LAYERS: numbers,
        **own_facts(config),
    }
    return native | (pick(config, HEAD_KEYS) if method == "dspark" else {})


def _method(config: DSparkConfig | Eagle3Config) -> str:
    if isinstance(config, Eagle3Config):
        return "eagle3"
    return "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"


def load_speculators(path: str | os.PathLike[str], native: dict[str, Any], **kwargs: Any) -> Drafter:
    """Loads such a drafter, whose `config.json` is `native`; `kwargs` are those of `from_pretrained`.

    `save_pretrained` on the result writes this package's own format.

    Raises:
        OSError: if weights are missing, left over, of another shape, unreadable, or not stored as safetensors, or the
            tables of the draft vocabulary contradict each other.
        ValueError: if the config describes a method or variant that is not supported.
    """
    config = config_from_speculators(native)
    config.name_or_path = os.fspath(path)
    # What is the target's is taken from the target; training does not change it.
    shared = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    if isinstance(config, DSparkConfig):
        shared.add("lm_head.weight")
    tensors = {name: value for name, value in read_tensors(path, "speculators", kwargs).items() if name not in shared}
    if config.draft_vocab_size is None:
        tensors = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    options = {**kwargs, "config": config, "state_dict": tensors, "output_loading_info": True}
    drafter, info = DRAFTER_CLASSES[config.model_type].from_pretrained(None, **options)
    check_leftovers(list(info["unexpected_keys"]), path, "speculators")
    loaded: Drafter = drafter
    return loaded


__all__ = ["config_from_speculators", "config_to_speculators", "load_speculators"]
