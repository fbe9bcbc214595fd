"""Drafters stored by DeepSpec, the reference code of the DSpark paper.

Their `config.json` is the target's with a few keys added, so its `model_type` is still that of the target; only
`architectures` tells them apart. Tensors have the same names as here. Each checkpoint holds copies of the target's
embeddings and LM head. DFlash drafters are the same class with `markov_rank` 0.
"""

from __future__ import annotations

import os
from typing import Any

from ..models.configuration_dspark import DSparkConfig, check_fields
from ..models.modeling_dspark import DSparkDrafter
from .formats import find_file

ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel")

REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "markov_rank",
)

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
    "layer_types",
    "sliding_window",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
"""Keys that mean the same in both formats."""


def config_from_deepspec(native: dict[str, Any]) -> DSparkConfig:
    """Translates the `config.json` of a DeepSpec drafter.

    Raises:
        TypeError: if a key has a value of another type.
        ValueError: if it is none, or lacks keys that a drafter needs.
    """
    architecture = next((name for name in native.get("architectures") or [] if name in ARCHITECTURES), None)
    if architecture is None:
        raise ValueError(
            f"`architectures` is {native.get('architectures')}; a DeepSpec DSpark drafter has one of {ARCHITECTURES}."
        )
    missing = [key for key in REQUIRED_KEYS if native.get(key) is None]
    if missing:
        raise ValueError(f"The DeepSpec config lacks {missing}; take config.json from the original checkpoint.")
    fields = {key: native[key] for key in SAME_MEANING if native.get(key) is not None}
    check_fields(fields)
    # DeepSpec writes the keys of a head only where the head exists; without the flag there is none.
    fields.setdefault("enable_confidence_head", False)
    fields.setdefault("confidence_head_with_markov", False)
    fields.setdefault("num_key_value_heads", native["num_attention_heads"])
    fields.setdefault("head_dim", native["hidden_size"] // native["num_attention_heads"])
    if architecture == "Gemma4DSparkModel":
        fields |= _gemma4_fields(native)
    return DSparkConfig(
        **fields,
        rope_parameters=_rope(native),
        dtype=native.get("dtype") or native.get("torch_dtype"),
        target_model_type=native.get("target_model_type") or native.get("model_type"),
        share_target_embeddings=False,
    )


def _gemma4_fields(native: dict[str, Any]) -> dict[str, Any]:
    """Fields of Gemma 4 layers; every drafter layer has the head sizes of a full-attention layer of the target."""
    k_eq_v = bool(native.get("attention_k_eq_v"))
    heads = native.get("num_global_key_value_heads") if k_eq_v else None
    sizes = {
        "num_key_value_heads": heads or native.get("num_key_value_heads"),
        "head_dim": native.get("global_head_dim") or native.get("head_dim"),
    }
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise ValueError(f"The DeepSpec config lacks {missing}; take config.json from the original checkpoint.")
    return sizes | {
        "hidden_act": native.get("hidden_activation") or "gelu_pytorch_tanh",
        "sandwich_norms": True,
        "use_value_norm": True,
        "attention_k_eq_v": k_eq_v,
        "attention_scale": 1.0,
        "use_layer_scalar": True,
        "embedding_scale": float(native["hidden_size"]) ** 0.5,
        "final_logit_softcapping": native.get("final_logit_softcapping"),
    }


def _rope(native: dict[str, Any]) -> dict[str, Any]:
    """Rotary embedding, which configs hold nested by layer type, flat, or as `rope_theta` and `rope_scaling`."""
    rope = native.get("rope_parameters") or native.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise TypeError(f"`rope_parameters` or `rope_scaling` is {rope!r}; it must be a mapping of names to values.")
    rope = dict(rope)
    if isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    rope = {name: value for name, value in rope.items() if value is not None and not isinstance(value, dict)}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if native.get("rope_theta") is not None:
        rope.setdefault("rope_theta", native["rope_theta"])
    if "rope_theta" not in rope:
        raise ValueError(
            "The DeepSpec config lacks `rope_theta`, alone or inside `rope_parameters`; take config.json from the "
            "original checkpoint."
        )
    return rope


def load_deepspec(path: str | os.PathLike[str], native: dict[str, Any], **kwargs: Any) -> DSparkDrafter:
    """Loads a DeepSpec drafter whose `config.json` is `native`; `kwargs` are those of `from_pretrained`.

    `save_pretrained` on the result writes this package's own format.

    Raises:
        OSError: if weights are missing, left over, of another shape, unreadable, or not stored as safetensors.
        ValueError: if the config is not that of a DeepSpec drafter.
    """
    config = config_from_deepspec(native)
    _refuse_pickle(path, kwargs)
    options = {**kwargs, "config": config, "use_safetensors": True, "output_loading_info": True}
    drafter, info = DSparkDrafter.from_pretrained(path, **options)
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        raise OSError(
            f"The DeepSpec drafter {path!s} has {len(unexpected)} tensors that its config does not account for, among "
            f"them {unexpected[:5]}. Check that config.json and the weights belong together."
        )
    loaded: DSparkDrafter = drafter
    return loaded


def _refuse_pickle(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> None:
    """Raises `OSError` where the only weights are pickled ones, which may run code when they are read."""
    if _has_file(path, ("model.safetensors", "model.safetensors.index.json"), kwargs):
        return
    if _has_file(path, ("pytorch_model.bin", "pytorch_model.bin.index.json"), kwargs):
        raise OSError(
            f"The DeepSpec drafter {path!s} stores its weights as pickle (pytorch_model.bin), which is not loaded "
            "because it can run code. Convert them to safetensors first."
        )


def _has_file(path: str | os.PathLike[str], names: tuple[str, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the checkpoint has one of several files."""
    for name in names:
        try:
            find_file(path, name, kwargs)
        except OSError:
            continue
        return True
    return False


__all__ = ["ARCHITECTURES", "config_from_deepspec", "load_deepspec"]
