"""EAGLE-3 drafters as EAGLE and SpecForge store them (`LlamaForCausalLMEagle3`), read by SGLang and vLLM too.

One Llama layer, `midlayer`, without norms on heads; an LM head of its own over a reduced vocabulary, in which
`target id = draft id + d2t[draft id]`; the target's embeddings, which the checkpoint may or may not repeat. Which of
the target's layers are read is in `eagle_config`, as numbers of layers whose output is meant, or left to EAGLE-3's
rule (`eagle3_target_layers`).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ..models import Eagle3Config, Eagle3Drafter
from ..models.configuration_base import check_fields
from .checkpoints import check_keys, check_leftovers, read_tensors, rope_parameters
from .writing import check_layers, dtype_name, own_facts, pick, read_own_facts, rope_keys

ARCHITECTURE = "LlamaForCausalLMEagle3"

REQUIRED_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")

SAME_MEANING = (
    *REQUIRED_KEYS,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
"""Keys that mean the same in both formats."""

OTHER_LAYERS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
"""Switches of later variants that change what the layers compute."""

LAYERS = "eagle_aux_hidden_state_layer_ids"

LLAMA_THETA = 10000.0
"""Base of Llama's rotary embedding where a config has none."""


def config_from_eagle3(native: dict[str, Any]) -> Eagle3Config:
    """Translates the `config.json` of such a drafter.

    Raises:
        TypeError: if a key has a value of another type.
        ValueError: if it lacks keys that a drafter needs, or describes a variant that is not supported.
    """
    check_keys(native, REQUIRED_KEYS, "EAGLE-3")
    _refuse_variants(native)
    fields = {key: native[key] for key in SAME_MEANING if native.get(key) is not None}
    layers = (native.get("eagle_config") or {}).get(LAYERS)
    vocabulary = native.get("draft_vocab_size")
    fields["target_layer_ids"] = layers or None
    fields["draft_vocab_size"] = None if vocabulary == native["vocab_size"] else vocabulary
    check_fields(Eagle3Config, fields)
    fields.setdefault("num_key_value_heads", native["num_attention_heads"])
    fields.setdefault("head_dim", native["hidden_size"] // native["num_attention_heads"])
    facts = {"target_model_type": native.get("target_model_type")} | read_own_facts(native, "block_size")
    return Eagle3Config(
        **(fields | facts),
        rope_parameters=rope_parameters(native, "EAGLE-3", LLAMA_THETA),
        dtype=native.get("dtype") or native.get("torch_dtype"),
        head_norms=False,
        share_target_head=False,
    )


def config_to_eagle3(config: Eagle3Config) -> dict[str, Any]:
    """The `config.json` of a drafter as SpecForge writes it.

    vLLM reads the layers from a key outside of `eagle_config`, where it counts from the embedding output; SGLang reads
    them inside. Both are written.

    Raises:
        ValueError: if a `LlamaForCausalLMEagle3` would compute something else.
    """
    if config.head_norms:
        raise ValueError(
            f"The drafter has `head_norms` = True, and a `{ARCHITECTURE}` has no norms on heads. Write it as deepspec "
            "or speculators, or train one with `Eagle3Config(head_norms=False)`."
        )
    if config.num_hidden_layers != 1:
        raise ValueError(
            f"The drafter has `num_hidden_layers` = {config.num_hidden_layers}; a `{ARCHITECTURE}` has one."
        )
    if config.attention_bias:
        raise ValueError(f"The drafter has `attention_bias` = True, of which readers of a `{ARCHITECTURE}` differ.")
    check_layers(config, "EAGLE-3's format")
    layers = config.target_layer_ids
    return {
        **pick(config, SAME_MEANING),
        **rope_keys(config),
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config.predicted_vocab_size,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers},
        LAYERS: None if layers is None else [layer + 1 for layer in layers],
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": dtype_name(config),
        **own_facts(config, "block_size"),
    }


def _refuse_variants(native: dict[str, Any]) -> None:
    """Raises `ValueError` for what would be computed otherwise than here."""
    inner = native.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise TypeError(f"`eagle_config` is {inner!r}; it must be a mapping of names to values.")
    for name in OTHER_LAYERS:
        if native.get(name) or inner.get(name):
            raise ValueError(f"The EAGLE-3 config has `{name}`, a variant whose layers are not supported here.")
    if native.get("num_hidden_layers", 1) != 1:
        raise ValueError(
            f"The EAGLE-3 config has `num_hidden_layers` = {native['num_hidden_layers']}; a `{ARCHITECTURE}` has one."
        )
    if native.get("target_hidden_size") not in (None, native["hidden_size"]):
        raise ValueError(
            f"The EAGLE-3 drafter is {native['hidden_size']} wide and its target {native['target_hidden_size']} "
            "(`target_hidden_size`); only drafters as wide as their target are supported."
        )
    if inner.get("use_aux_hidden_state") is False:
        raise ValueError("The EAGLE-3 config has `use_aux_hidden_state` = false, which is EAGLE-1 and not supported.")
    outside, inside = native.get(LAYERS), inner.get(LAYERS)
    if outside is not None and outside != [layer + 1 for layer in inside or []]:
        raise ValueError(
            "The EAGLE-3 config has `eagle_aux_hidden_state_layer_ids` outside of `eagle_config`, where readers count "
            "layers differently. Move it into `eagle_config`, as numbers of the layers whose output is read."
        )


def load_eagle3(path: str | os.PathLike[str], native: dict[str, Any], **kwargs: Any) -> Eagle3Drafter:
    """Loads such a drafter, whose `config.json` is `native`; `kwargs` are those of `from_pretrained`.

    `save_pretrained` on the result writes this package's own format.

    Raises:
        OSError: if weights are missing, left over, of another shape, unreadable, or not stored as safetensors, or the
            tables of the draft vocabulary contradict each other.
        ValueError: if the config describes a variant that is not supported.
    """
    config = config_from_eagle3(native)
    config.name_or_path = os.fspath(path)
    tensors = translate_tensors(read_tensors(path, "EAGLE-3", kwargs), config)
    options = {**kwargs, "config": config, "state_dict": tensors, "output_loading_info": True}
    drafter, info = Eagle3Drafter.from_pretrained(None, **options)
    check_leftovers(list(info["unexpected_keys"]), path, "EAGLE-3")
    loaded: Eagle3Drafter = drafter
    return loaded


def tensors_to_eagle3(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a drafter by the names of such a checkpoint; without embeddings, which are the target's."""
    return {
        name.replace("layers.0.", "midlayer.", 1): tensor
        for name, tensor in tensors.items()
        if name != "embed_tokens.weight"
    }


def translate_tensors(tensors: dict[str, torch.Tensor], config: Eagle3Config) -> dict[str, torch.Tensor]:
    """The tensors of such a checkpoint by our names.

    Left out are the embeddings, which training does not change, so that they are the target's; buffers that follow
    from the config; and tables of a draft vocabulary that is the whole one.
    """
    ours = {
        name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name: tensor
        for name, tensor in tensors.items()
        if name != "embed_tokens.weight" and not name.endswith("rotary_emb.inv_freq")
    }
    if config.draft_vocab_size is None:
        ours.pop("d2t", None)
        ours.pop("t2d", None)
    elif "d2t" in ours:
        ours["d2t"] = ours["d2t"].long()
        tokens = ours["d2t"] + torch.arange(len(ours["d2t"]))
        made = torch.zeros(config.vocab_size, dtype=torch.bool)
        made[tokens.clamp(0, config.vocab_size - 1)] = True
        ours["t2d"] = ours.get("t2d", made).bool()
    return ours


__all__ = [
    "ARCHITECTURE",
    "config_from_eagle3",
    "config_to_eagle3",
    "load_eagle3",
    "tensors_to_eagle3",
    "translate_tensors",
]
