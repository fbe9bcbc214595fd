"""DFlash drafters as z-lab stores them (`DFlashDraftModel`); SpecForge writes the same format.

Their `config.json` is a Qwen3 one with `block_size`, `num_target_layers` and a nested `dflash_config` of
`target_layer_ids` and `mask_token_id` (`block_size` may stand there, too). Tensors have the same names as here; there
are no embeddings and no LM head, which are the target's. The block is the anchor and mask tokens, of which the latter
alone predict; `block_size` counts the anchor, so it is one more than here.
"""

from __future__ import annotations

import os
from typing import Any

from ..models import DSparkConfig, DSparkDrafter
from ..models.configuration_base import check_fields
from .checkpoints import check_keys, check_leftovers, refuse_pickle, rope_parameters
from .writing import check_layers, dtype_name, own_facts, pick, read_own_facts, rope_keys

ARCHITECTURE = "DFlashDraftModel"

REQUIRED_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

SAME_MEANING = (
    *REQUIRED_KEYS,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "num_target_layers",
    "target_layer_ids",
    "mask_token_id",
    "final_logit_softcapping",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
"""Keys that mean the same in both formats, wherever they stand."""

BLOCK_SIZE = 16
"""The format's own block size where a config has none."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "projector_type": ("dflash",),
    "output_multiplier": (1, 1.0),
    "is_causal": (False,),
    "causal": (False,),
    "conv_kernel_size": (0,),
    "conv_group_size": (0,),
    "selector_rank": (0,),
    "selector_top_k": (0,),
}
"""Switches of later variants, with the values under which they change nothing."""


def config_from_dflash(native: dict[str, Any]) -> DSparkConfig:
    """Translates the `config.json` of such a drafter.

    Raises:
        TypeError: if a key has a value of another type.
        ValueError: if it lacks keys that a drafter needs, or describes a variant that is not supported.
    """
    inner = native.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise TypeError(f"`dflash_config` is {inner!r}; it must be a mapping of names to values.")
    values = {**native, **inner}
    check_keys(values, (*REQUIRED_KEYS, "target_layer_ids", "mask_token_id"), "DFlash")
    _refuse_variants(values)
    fields = {key: values[key] for key in SAME_MEANING if values.get(key) is not None}
    fields["block_size"] = values.get("block_size") or BLOCK_SIZE
    check_fields(DSparkConfig, fields)
    if fields["block_size"] < 2:
        raise ValueError(
            f"The DFlash config has `block_size` = {fields['block_size']}, which counts the anchor; it must be at "
            "least 2."
        )
    fields["block_size"] -= 1
    fields.setdefault("num_key_value_heads", values["num_attention_heads"])
    fields.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    if not fields.get("final_logit_softcapping"):
        fields.pop("final_logit_softcapping", None)  # 0 is none there
    return DSparkConfig(
        **(fields | read_own_facts(native)),
        rope_parameters=rope_parameters(values, "DFlash"),
        dtype=values.get("dtype") or values.get("torch_dtype"),
        embedding_scale=float(values.get("input_embedding_scale") or 1.0),
        sample_from_anchor=False,
        markov_rank=0,
        enable_confidence_head=False,
    )


def config_to_dflash(config: DSparkConfig) -> dict[str, Any]:
    """The `config.json` of a drafter without heads as z-lab writes it.

    Raises:
        ValueError: if z-lab's class would compute something else.
    """
    if config.markov_rank or config.enable_confidence_head:
        raise ValueError(
            f"The drafter has heads (`markov_rank` = {config.markov_rank}, `enable_confidence_head` = "
            f"{config.enable_confidence_head}), which z-lab's format does not have. Write it as deepspec, vllm, "
            "sglang or speculators."
        )
    if config.sample_from_anchor:
        raise ValueError(
            "The drafter has `sample_from_anchor` = True, DeepSpec's convention, and z-lab's readers leave out what "
            "the anchor's slot predicts. Write it as deepspec or speculators."
        )
    if config.draft_vocab_size is not None:
        raise ValueError(
            f"The drafter has `draft_vocab_size` = {config.draft_vocab_size}, and z-lab's readers use the target's "
            "whole LM head. Write it as speculators."
        )
    check_layers(config, "z-lab's format", spared=("embedding_scale", "final_logit_softcapping"))
    inner = {"target_layer_ids": config.target_layer_ids, "mask_token_id": config.mask_token_id}
    if config.final_logit_softcapping:
        inner["final_logit_softcapping"] = config.final_logit_softcapping
    if config.embedding_scale != 1.0:
        inner["input_embedding_scale"] = config.embedding_scale
    outer = tuple(name for name in SAME_MEANING if name not in (*inner, "final_logit_softcapping"))
    return {
        **pick(config, outer),
        **rope_keys(config),
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": config.block_size + 1,
        "dflash_config": inner,
        "layer_types": config.layer_types,
        "tie_word_embeddings": False,
        "dtype": dtype_name(config),
        **own_facts(config),
    }


def _refuse_variants(values: dict[str, Any]) -> None:
    """Raises `ValueError` for what would be computed otherwise than here."""
    for name, neutral in NEUTRAL.items():
        value = values.get(name)
        if value is not None and value not in neutral:
            raise ValueError(
                f"The DFlash config has `{name}` = {value!r}, a variant whose layers are not supported here."
            )
    if "sliding_attention" in (values.get("layer_types") or ()):
        raise ValueError(
            "The DFlash config has `sliding_attention` in `layer_types`, of which z-lab's readers differ: in newer "
            "ones such a layer is causal inside the block. Only drafters of `full_attention` are supported."
        )


def load_dflash(path: str | os.PathLike[str], native: dict[str, Any], **kwargs: Any) -> DSparkDrafter:
    """Loads such a drafter, whose `config.json` is `native`; `kwargs` are those of `from_pretrained`.

    `save_pretrained` on the result writes this package's own format.

    Raises:
        OSError: if weights are missing, left over, of another shape, unreadable, or not stored as safetensors.
        ValueError: if the config describes a variant that is not supported.
    """
    config = config_from_dflash(native)
    refuse_pickle(path, "DFlash", kwargs)
    options = {**kwargs, "config": config, "use_safetensors": True, "output_loading_info": True}
    drafter, info = DSparkDrafter.from_pretrained(path, **options)
    check_leftovers(list(info["unexpected_keys"]), path, "DFlash")
    loaded: DSparkDrafter = drafter
    return loaded


__all__ = ["ARCHITECTURE", "config_from_dflash", "config_to_dflash", "load_dflash"]
