"""What the converters share when they write: layers that others build, and facts that only this package has."""

from __future__ import annotations

from typing import Any

from ..models import DrafterConfig

OWN_FACTS = "dspark_hf"
"""Where a foreign `config.json` has facts that its format has no place for. Other readers pass it over."""

FACTS = (
    "target_name_or_path",
    "target_model_type",
    "num_target_layers",
    "generation_prompt_ids",
    "enable_thinking",
    "confidence_temperatures",
)

PLAIN_LAYERS: dict[str, Any] = {
    "sandwich_norms": False,
    "use_value_norm": False,
    "attention_k_eq_v": False,
    "attention_scale": None,
    "use_layer_scalar": False,
    "embedding_scale": 1.0,
    "final_logit_softcapping": None,
}
"""Layers of Qwen3, in terms of a drafter's config."""

GEMMA4_LAYERS: dict[str, Any] = {
    "sandwich_norms": True,
    "use_value_norm": True,
    "attention_scale": 1.0,
    "use_layer_scalar": True,
}
"""Layers of Gemma 4; whether keys serve as values, and soft caps, are told by keys of their own."""


def own_facts(config: DrafterConfig, *more: str) -> dict[str, Any]:
    """What to add to a foreign `config.json` so that this package loses nothing when it reads it again.

    Args:
        config: of the drafter.
        more: fields beyond `FACTS` that the format has no place for.
    """
    return {OWN_FACTS: pick(config, (*FACTS, *more))}


def read_own_facts(native: dict[str, Any], *more: str) -> dict[str, Any]:
    """Fields that `own_facts` has left in a foreign `config.json`.

    Raises:
        TypeError: if something else stands there.
    """
    facts = native.get(OWN_FACTS) or {}
    if not isinstance(facts, dict):
        raise TypeError(f"`{OWN_FACTS}` is {facts!r}; it must be a mapping of names to values.")
    return {name: facts[name] for name in (*FACTS, *more) if facts.get(name) is not None}


def pick(config: DrafterConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """Those fields that `config` has and that are set."""
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def rope_keys(config: DrafterConfig) -> dict[str, Any]:
    """The rotary embedding as readers of any age look for it: nested, and as `rope_theta` and `rope_scaling`."""
    rope = dict(config.rope_parameters)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
    }


def dtype_name(config: DrafterConfig) -> str:
    """The name of the dtype of the weights."""
    return str(config.dtype or "float32").removeprefix("torch.")


def differences(config: DrafterConfig, layers: dict[str, Any]) -> list[str]:
    """Where the layers of `config` are not these, in words."""
    found = {name: getattr(config, name) for name in layers}
    if found.get("attention_scale") == config.head_dim**-0.5:
        found["attention_scale"] = None  # said in full what is meant anyway
    return [f"`{name}` = {found[name]!r}" for name, value in layers.items() if found[name] != value]


def has_gemma4_layers(config: DrafterConfig) -> bool:
    """Whether the layers are those of Gemma 4, with its scale of embeddings."""
    scale: float = config.hidden_size**0.5
    return not differences(config, GEMMA4_LAYERS) and abs(config.embedding_scale - scale) < 1e-3 * scale


def check_layers(
    config: DrafterConfig, kind: str, *, spared: tuple[str, ...] = (), causal_sliding: bool = True
) -> None:
    """Checks that a reader which builds Qwen3's layers builds those of `config`.

    Args:
        config: of the drafter.
        kind: the format, for the error.
        spared: what that reader can do beyond Qwen3's layers.
        causal_sliding: whether it makes `sliding_attention` causal inside the block, which this package does not.

    Raises:
        ValueError: if it would compute something else.
    """
    odd = differences(config, {name: value for name, value in PLAIN_LAYERS.items() if name not in spared})
    if causal_sliding and "sliding_attention" in config.layer_types:
        odd.append("`layer_types` with `sliding_attention`, which is causal inside a block there")
    if odd:
        raise ValueError(
            f"The drafter cannot be written as {kind}, whose readers build Qwen3's layers: it has {', '.join(odd)}. "
            "Keep it in this package's format."
        )


__all__ = [
    "FACTS",
    "GEMMA4_LAYERS",
    "OWN_FACTS",
    "PLAIN_LAYERS",
    "check_layers",
    "differences",
    "dtype_name",
    "has_gemma4_layers",
    "own_facts",
    "pick",
    "read_own_facts",
    "rope_keys",
]
