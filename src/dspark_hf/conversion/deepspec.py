"""Drafters stored by DeepSpec, the reference code of the DSpark paper.

Their `config.json` is the target's with a few keys added, so its `model_type` is still that of the target; only
`architectures` tells them apart. Tensors have the same names as here. Each checkpoint holds copies of the target's
embeddings and LM head. DFlash drafters are the same class as DSpark ones, with `markov_rank` 0; EAGLE-3 drafters are
one of their own.

vLLM and SGLang read the same layout. They take the target's embeddings and LM head, so that checkpoints made for them
may come without; vLLM also knows a reduced draft vocabulary (`draft_vocab_size`, `d2t`), for which it needs the head.
"""

from __future__ import annotations

import os
from typing import Any

from ..models import DRAFTER_CLASSES, Drafter, DrafterConfig, DSparkConfig, Eagle3Config
from ..models.configuration_base import check_fields
from .checkpoints import check_keys, check_leftovers, has_tensor, refuse_pickle, rope_parameters
from .writing import check_layers, dtype_name, has_gemma4_layers, own_facts, pick, read_own_facts, rope_keys

ARCHITECTURES: dict[str, type[DrafterConfig]] = {
    "Qwen3DSparkModel": DSparkConfig,
    "Gemma4DSparkModel": DSparkConfig,
    "Qwen3Eagle3Model": Eagle3Config,
    "Gemma4Eagle3Model": Eagle3Config,
}
"""DeepSpec's classes, and what they are here."""

GEMMA4 = ("Gemma4DSparkModel", "Gemma4Eagle3Model")

NUM_ANCHORS = 512
"""DeepSpec's number of anchors in training, which its classes ask for even where nothing is trained."""

REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "target_layer_ids",
    "num_target_layers",
)

OWN_KEYS: dict[type[DrafterConfig], dict[str, str]] = {
    DSparkConfig: {name: name for name in ("block_size", "mask_token_id", "markov_rank")},
    Eagle3Config: {"ttt_length": "block_size"},
}
"""Required keys of each kind, with our names for them; EAGLE-3 drafts as many tokens as its training had steps."""

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


def config_from_deepspec(native: dict[str, Any]) -> DrafterConfig:
    """Translates the `config.json` of a DeepSpec drafter.

    Raises:
        TypeError: if a key has a value of another type.
        ValueError: if it is none, or lacks keys that a drafter needs.
    """
    architecture = next((name for name in native.get("architectures") or [] if name in ARCHITECTURES), None)
    if architecture is None:
        raise ValueError(
            f"`architectures` is {native.get('architectures')}; a DeepSpec drafter has one of {tuple(ARCHITECTURES)}."
        )
    config_class = ARCHITECTURES[architecture]
    own = OWN_KEYS[config_class]
    check_keys(native, (*REQUIRED_KEYS, *own), "DeepSpec")
    names = {name: name for name in SAME_MEANING} | own
    fields = {ours: native[theirs] for theirs, ours in names.items() if native.get(theirs) is not None}
    check_fields(config_class, fields)
    fields.setdefault("num_key_value_heads", native["num_attention_heads"])
    fields.setdefault("head_dim", native["hidden_size"] // native["num_attention_heads"])
    if config_class is DSparkConfig:
        # DeepSpec writes the keys of a head only where the head exists; without the flag there is none.
        fields.setdefault("enable_confidence_head", False)
        fields.setdefault("confidence_head_with_markov", False)
    if architecture in GEMMA4:
        fields |= _gemma4_fields(native)
    vocabulary = native.get("draft_vocab_size")
    facts = {"target_model_type": native.get("target_model_type") or native.get("model_type")} | read_own_facts(native)
    return config_class(
        **(fields | facts),
        draft_vocab_size=None if vocabulary == native["vocab_size"] else vocabulary,
        rope_parameters=rope_parameters(native, "DeepSpec"),
        dtype=native.get("dtype") or native.get("torch_dtype"),
        share_target_embeddings=False,
    )


def config_to_deepspec(config: DSparkConfig | Eagle3Config) -> dict[str, Any]:
    """The `config.json` of a drafter as DeepSpec writes it.

    Raises:
        ValueError: if DeepSpec's classes would compute something else.
    """
    check_deepspec(config)
    gemma4 = has_gemma4_layers(config)
    names = {ours: theirs for theirs, ours in OWN_KEYS[type(config)].items()}
    native: dict[str, Any] = pick(config, SAME_MEANING) | {names[name]: getattr(config, name) for name in names}
    method = "DSpark" if isinstance(config, DSparkConfig) else "Eagle3"
    native |= {
        "architectures": [f"{'Gemma4' if gemma4 else 'Qwen3'}{method}Model"],
        "model_type": "gemma4_text" if gemma4 else "qwen3",
        "tie_word_embeddings": False,
        "dtype": dtype_name(config),
    }
    if isinstance(config, DSparkConfig):
        native["num_anchors"] = NUM_ANCHORS
        if config.markov_rank == 0:
            native.pop("markov_head_type")
        if not config.enable_confidence_head:
            native.pop("confidence_head_with_markov")
    else:
        native["draft_num_hidden_layers"] = config.num_hidden_layers
    return native | (_gemma4_keys(config) if gemma4 else rope_keys(config)) | own_facts(config)


def check_deepspec(config: DSparkConfig | Eagle3Config) -> None:
    """Raises `ValueError` for a drafter that no class of DeepSpec computes."""
    if isinstance(config, DSparkConfig) and not config.sample_from_anchor:
        raise ValueError(
            "The drafter has `sample_from_anchor` = False, z-lab's convention, which DeepSpec's readers do not know. "
            "A drafter without heads can be written as zlab."
        )
    if isinstance(config, Eagle3Config) and not config.head_norms:
        raise ValueError(
            "The drafter has `head_norms` = False, Llama's layers, which DeepSpec does not have. Write it as vllm, "
            "sglang or speculators."
        )
    if not has_gemma4_layers(config):
        check_layers(config, "DeepSpec's format", causal_sliding=False)


def _gemma4_keys(config: DSparkConfig | Eagle3Config) -> dict[str, Any]:
    """Keys of Gemma 4 layers, each of which has the head sizes of a full-attention layer of the target."""
    return {
        "hidden_activation": config.hidden_act,
        "global_head_dim": config.head_dim,
        "attention_k_eq_v": config.attention_k_eq_v,
        "num_global_key_value_heads": config.num_key_value_heads,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope_parameters": {
            "full_attention": dict(config.rope_parameters),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "target_text_model_type": "gemma4_text",
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }


def _gemma4_fields(native: dict[str, Any]) -> dict[str, Any]:
    """Fields of Gemma 4 layers; every drafter layer has the head sizes of a full-attention layer of the target."""
    k_eq_v = bool(native.get("attention_k_eq_v"))
    heads = native.get("num_global_key_value_heads") if k_eq_v else None
    sizes = {
        "num_key_value_heads": heads or native.get("num_key_value_heads"),
        "head_dim": native.get("global_head_dim") or native.get("head_dim"),
    }
    check_keys(sizes, tuple(sizes), "DeepSpec")
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


def load_deepspec(path: str | os.PathLike[str], native: dict[str, Any], **kwargs: Any) -> Drafter:
    """Loads a DeepSpec drafter whose `config.json` is `native`; `kwargs` are those of `from_pretrained`.

    `save_pretrained` on the result writes this package's own format.

    Raises:
        OSError: if weights are missing, left over, of another shape, unreadable, or not stored as safetensors.
        ValueError: if the config is not that of a DeepSpec drafter.
    """
    config = config_from_deepspec(native)
    refuse_pickle(path, "DeepSpec", kwargs)
    config.share_target_embeddings = not has_tensor(path, "embed_tokens.weight", kwargs)
    options = {**kwargs, "config": config, "use_safetensors": True, "output_loading_info": True}
    drafter, info = DRAFTER_CLASSES[config.model_type].from_pretrained(path, **options)
    check_leftovers(list(info["unexpected_keys"]), path, "DeepSpec")
    loaded: Drafter = drafter
    return loaded


__all__ = ["ARCHITECTURES", "check_deepspec", "config_from_deepspec", "config_to_deepspec", "load_deepspec"]
