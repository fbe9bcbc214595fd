"""DSpark drafters as SpecForge stores them (`DSparkDraftModel`), which SGLang and vLLM read, too.

The layout is that of z-lab's DFlash (`dflash.py`): a Qwen3 config with a nested `dflash_config`, in which the keys of
the heads may stand as well as beside it, and no embeddings and no LM head. The block is DeepSpec's: the anchor's slot
predicts the first token, and `block_size` is the number of drafted tokens.
"""

from __future__ import annotations

import os
from typing import Any, cast

from ..models import Drafter, DSparkConfig
from .checkpoints import check_keys
from .deepspec import REQUIRED_KEYS, config_from_deepspec, load_deepspec

ARCHITECTURE = "DSparkDraftModel"

NESTED = "dflash_config"

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dspark",),
    "attention_mode": ("gqa", "mha"),
    "causal": (False,),
    "is_causal": (False,),
    "shift_label": (True,),
    "dspark_bonus_anchor": (False,),
    "sample_from_anchor": (True,),
    "attention_sink_bias": (False,),
    "use_swa": (False,),
}
"""Switches of variants, with the values under which a drafter is one of DeepSpec's."""


def config_from_specforge(native: dict[str, Any]) -> DSparkConfig:
    """Translates the `config.json` of such a drafter.

    Raises:
        TypeError: if a key has a value of another type.
        ValueError: if it lacks keys that a drafter needs, or describes a variant that is not supported.
    """
    return cast(DSparkConfig, config_from_deepspec(as_deepspec(native)))


def as_deepspec(native: dict[str, Any]) -> dict[str, Any]:
    """The same `config.json` with the keys where DeepSpec has them.

    Raises:
        TypeError: if `dflash_config` is no mapping.
        ValueError: if it describes a variant that is not supported.
    """
    inner = native.get(NESTED) or {}
    if not isinstance(inner, dict):
        raise TypeError(f"`{NESTED}` is {inner!r}; it must be a mapping of names to values.")
    values = {**native, **inner}
    for name, neutral in NEUTRAL.items():
        if values.get(name) is not None and values[name] not in neutral:
            raise ValueError(
                f"The SpecForge config has `{name}` = {values[name]!r}, a variant that is not supported here; only "
                f"{neutral[0]!r} is."
            )
    if "sliding_attention" in (values.get("layer_types") or ()):
        raise ValueError(
            "The SpecForge config has `sliding_attention` in `layer_types`, which is causal inside a block there. "
            "Only drafters of `full_attention` are supported."
        )
    check_keys(values, (*REQUIRED_KEYS, "block_size", "mask_token_id"), "SpecForge")
    # An older name; SpecForge has the head where nothing is said.
    confidence = values.get("enable_confidence_head", values.get("use_confidence_head", True))
    markov = bool(values.get("markov_rank", 0))
    values |= {
        "architectures": ["Qwen3DSparkModel"],
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": values.get("confidence_head_with_markov", markov),
        "markov_rank": values.get("markov_rank", 0),
    }
    return values


def load_specforge(path: str | os.PathLike[str], native: dict[str, Any], **kwargs: Any) -> Drafter:
    """Loads such a drafter, whose `config.json` is `native`; `kwargs` are those of `from_pretrained`.

    `save_pretrained` on the result writes this package's own format.

    Raises:
        OSError: if weights are missing, left over, of another shape, unreadable, or not stored as safetensors.
        ValueError: if the config describes a variant that is not supported.
    """
    return load_deepspec(path, as_deepspec(native), **kwargs)


__all__ = ["ARCHITECTURE", "as_deepspec", "config_from_specforge", "load_specforge"]
