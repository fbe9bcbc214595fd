"""Drafters for a target: `get_drafter` builds a new one, `AutoDrafter` loads a trained one of any supported format.

Both know target families by one table, `TARGET_FAMILIES`. A family that is not in it gets plain layers; what the
drafter has to copy exactly (embedding scale, soft cap) is read off the target itself, whatever its family.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from . import _compat
from .conversion import LOADERS
from .conversion.formats import DSPARK, detect_format, find_file, read_json, refuse_foreign
from .conversion.loading import check_location, neither_found
from .models import (
    DRAFTER_CLASSES,
    Drafter,
    DrafterConfig,
    DSparkConfig,
    DSparkDrafter,
    Eagle3Config,
    Eagle3Drafter,
    MTPConfig,
    MTPDrafter,
)
from .models.backbone import RotaryEmbedding
from .models.configuration_eagle3 import eagle3_target_layers

PLAIN_STYLE: dict[str, Any] = {}
"""Norms before attention and MLP only, as in Qwen3 and Llama."""

GEMMA_STYLE: dict[str, Any] = {"sandwich_norms": True}
"""Norms on both sides of attention and MLP."""

GEMMA4_STYLE: dict[str, Any] = {
    "sandwich_norms": True,
    "use_value_norm": True,
    "attention_scale": 1.0,
    "use_layer_scalar": True,
}
"""Gemma's norms, normalised values, unscaled attention scores, one scalar on each layer's output."""

TARGET_FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": PLAIN_STYLE,
    "apertus": PLAIN_STYLE,
    "apertus1p5_text": PLAIN_STYLE,
    "arcee": PLAIN_STYLE,
    "aria_text": PLAIN_STYLE,
    "axk1": PLAIN_STYLE,
    "axk2": PLAIN_STYLE,
    "aya_vision": PLAIN_STYLE,
    "biogpt": PLAIN_STYLE,
    "bitnet": PLAIN_STYLE,
    "bloom": PLAIN_STYLE,
    "codegen": PLAIN_STYLE,
    "cohere": PLAIN_STYLE,
    "cohere2": PLAIN_STYLE,
    "cohere2_moe": PLAIN_STYLE,
    "cohere2_vision": PLAIN_STYLE,
    "ctrl": PLAIN_STYLE,
    "cwm": PLAIN_STYLE,
    "dbrx": PLAIN_STYLE,
    "deepseek_v2": PLAIN_STYLE,
    "deepseek_v3": PLAIN_STYLE,
    "deepseek_v32": PLAIN_STYLE,
    "deepseek_vl": PLAIN_STYLE,
    "diffllama": PLAIN_STYLE,
    "doge": PLAIN_STYLE,
    "dots1": PLAIN_STYLE,
    "ernie4_5": PLAIN_STYLE,
    "ernie4_5_moe": PLAIN_STYLE,
    "ernie4_5_vl_moe": PLAIN_STYLE,
    "exaone4": PLAIN_STYLE,
    "exaone4_5": PLAIN_STYLE,
    "exaone_moe": PLAIN_STYLE,
    "falcon": PLAIN_STYLE,
    "flex_olmo": PLAIN_STYLE,
    "fuyu": PLAIN_STYLE,
    "gemma": GEMMA_STYLE,
    "gemma2": GEMMA_STYLE,
    "gemma3": GEMMA_STYLE,
    "gemma3_text": GEMMA_STYLE,
    "gemma3n_text": GEMMA_STYLE,
    "gemma4": GEMMA4_STYLE,
    "gemma4_text": GEMMA4_STYLE,
    "gemma4_unified": GEMMA4_STYLE,
    "gemma4_unified_text": GEMMA4_STYLE,
    "glm": PLAIN_STYLE,
    "glm4": PLAIN_STYLE,
    "glm4_moe": PLAIN_STYLE,
    "glm4_moe_lite": PLAIN_STYLE,
    "glm4v": PLAIN_STYLE,
    "glm4v_moe": PLAIN_STYLE,
    "glm_moe_dsa": PLAIN_STYLE,
    "got_ocr2": PLAIN_STYLE,
    "gpt2": PLAIN_STYLE,
    "gpt_bigcode": PLAIN_STYLE,
    "gpt_neo": PLAIN_STYLE,
    "gpt_neox": PLAIN_STYLE,
    "gpt_neox_japanese": PLAIN_STYLE,
    "gpt_oss": PLAIN_STYLE,
    "gptj": PLAIN_STYLE,
    "granite": PLAIN_STYLE,
    "granite_swa": PLAIN_STYLE,
    "granitemoe": PLAIN_STYLE,
    "granitemoe_swa": PLAIN_STYLE,
    "granitemoeshared": PLAIN_STYLE,
    "helium": PLAIN_STYLE,
    "hunyuan_v1_dense": PLAIN_STYLE,
    "hunyuan_v1_moe": PLAIN_STYLE,
    "hy_v3": PLAIN_STYLE,
    "hyperclovax": PLAIN_STYLE,
    "idefics3": PLAIN_STYLE,
    "internvl": PLAIN_STYLE,
    "jais2": PLAIN_STYLE,
    "jetmoe": PLAIN_STYLE,
    "kimi_k25": PLAIN_STYLE,
    "kolibri1": PLAIN_STYLE,
    "laguna": PLAIN_STYLE,
    "llama": PLAIN_STYLE,
    "llama4_text": PLAIN_STYLE,
    "llava": PLAIN_STYLE,
    "llava_next": PLAIN_STYLE,
    "llava_onevision": PLAIN_STYLE,
    "longcat_flash": PLAIN_STYLE,
    "mellum": PLAIN_STYLE,
    "mimo_v2_flash": PLAIN_STYLE,
    "minimax_m2": PLAIN_STYLE,
    "minimax_m3_vl_text": PLAIN_STYLE,
    "ministral": PLAIN_STYLE,
    "ministral3": PLAIN_STYLE,
    "mistral": PLAIN_STYLE,
    "mistral3": PLAIN_STYLE,
    "mixtral": PLAIN_STYLE,
    "moshi": PLAIN_STYLE,
    "mpt": PLAIN_STYLE,
    "nanochat": PLAIN_STYLE,
    "nemotron": PLAIN_STYLE,
    "olmo": PLAIN_STYLE,
    "olmo2": PLAIN_STYLE,
    "olmo3": PLAIN_STYLE,
    "olmoe": PLAIN_STYLE,
    "opt": PLAIN_STYLE,
    "paligemma": PLAIN_STYLE,
    "persimmon": PLAIN_STYLE,
    "phi": PLAIN_STYLE,
    "phi3": PLAIN_STYLE,
    "phimoe": PLAIN_STYLE,
    "qwen2": PLAIN_STYLE,
    "qwen2_5_vl": PLAIN_STYLE,
    "qwen2_moe": PLAIN_STYLE,
    "qwen2_vl": PLAIN_STYLE,
    "qwen3": PLAIN_STYLE,
    "qwen3_moe": PLAIN_STYLE,
    "qwen3_vl": PLAIN_STYLE,
    "qwen3_vl_moe": PLAIN_STYLE,
    "seed_oss": PLAIN_STYLE,
    "smollm3": PLAIN_STYLE,
    "smolvlm": PLAIN_STYLE,
    "solar_open": PLAIN_STYLE,
    "stablelm": PLAIN_STYLE,
    "starcoder2": PLAIN_STYLE,
    "vaultgemma": PLAIN_STYLE,
    "xglm": PLAIN_STYLE,
    "youtu": PLAIN_STYLE,
}
"""Layer style by `model_type` of the target, or of its text model. Each is tested with a target of its own; a type
that is not here gets `PLAIN_STYLE`."""

MAX_CAPTURED_LAYERS = 5

# Factors between the LM head's output and the logits. A drafter calls the head alone, so these must be neutral.
LOGIT_FACTORS = (
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)

Config = TypeVar("Config", bound=DrafterConfig)

_TOKENIZER_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")
_MASK_TOKEN = re.compile(r"<\|?mask\|?>|\[mask\]", re.IGNORECASE)
_RESERVED_TOKEN = re.compile(r"[<\[]\|?(unused|reserved|extra_id|placeholder).*[>\]]", re.IGNORECASE)


@overload
def get_drafter(
    target: PreTrainedModel,
    config: DSparkConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokens: Iterable[int] | None = None,
) -> DSparkDrafter: ...


@overload
def get_drafter(
    target: PreTrainedModel,
    config: Eagle3Config,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokens: Iterable[int] | None = None,
) -> Eagle3Drafter: ...


@overload
def get_drafter(
    target: PreTrainedModel,
    config: MTPConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokens: Iterable[int] | None = None,
) -> MTPDrafter: ...


def get_drafter(
    target: PreTrainedModel,
    config: DrafterConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokens: Iterable[int] | None = None,
) -> Drafter:
    """Builds a new, untrained drafter for `target`, of the kind that the type of `config` says.

    What `config` leaves unset is taken from the target. Fields that are `None` count as unset. So do layer style,
    activation, norm epsilon, embedding scale and soft cap where they still have their default: the target's family
    decides these. To force such a default on a family that wants something else, build the drafter yourself:
    `DSparkDrafter(config)`, then `drafter.bind_target(target)`.

    Weights are drawn on the CPU in float32 and moved afterwards, so that `torch.manual_seed` gives the same drafter
    on every device.

    Args:
        target: a decoder-only model with an LM head. It is not changed.
        config: what to build, a `DSparkConfig`, `Eagle3Config` or `MTPConfig`, `DSparkConfig()` if unset. It is not
            changed either: the drafter gets a copy.
        tokenizer: the target's tokenizer, used only to choose a mask token that text never contains. Without it the
            last vocabulary entry to which the target's config gives no role (padding, end of text, image, ...) is
            taken: right for padded vocabularies, otherwise give the tokenizer or set `config.mask_token_id`.
        draft_tokens: the tokens that the drafter predicts, `config.draft_vocab_size` of the target's, such as those
            that `dspark_hf.training.choose_draft_tokens` finds in the training data. Needed if that is set.

    Returns:
        A drafter bound to `target`, in its dtype and on its device, in evaluation mode.

    Raises:
        TypeError: if `target` is no model or `config` no configuration of a drafter.
        ValueError: if no drafter can be built for this target, or `config` contradicts it.

    Example:
        ```python
        target = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
        drafter = get_drafter(target, DSparkConfig(num_hidden_layers=5), tokenizer=tokenizer)
        other = get_drafter(target, Eagle3Config())
        ```
    """
    config = complete_config(target, config, tokenizer=tokenizer)
    if (draft_tokens is None) != (config.draft_vocab_size is None):
        raise ValueError(
            f"`draft_vocab_size` is {config.draft_vocab_size} and `draft_tokens` is "
            f"{'unset' if draft_tokens is None else 'given'}; give both, the tokens from "
            "`dspark_hf.training.choose_draft_tokens`, or neither for a drafter that predicts every token."
        )
    drafter = DRAFTER_CLASSES[config.model_type](config).to(device=_device(target), dtype=_dtype(target))
    if draft_tokens is not None:
        drafter.set_draft_tokens(draft_tokens)
    drafter.bind_target(target)
    return drafter.eval()


@overload
def complete_config(
    target: PreTrainedModel, config: None = None, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> DSparkConfig: ...


@overload
def complete_config(
    target: PreTrainedModel, config: Config | None, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> Config: ...


def complete_config(
    target: PreTrainedModel,
    config: DrafterConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> DrafterConfig:
    """The config of the drafter that `get_drafter` builds from the same arguments, whose errors it raises.

    The target's weights are not read: it may be on the meta device.
    """
    if not isinstance(target, nn.Module) or not hasattr(target, "config"):
        raise TypeError(
            f"`target` is {target!r:.60}, of type {type(target).__name__}; give a loaded model, such as "
            "`AutoModelForCausalLM.from_pretrained(...)`."
        )
    if config is not None and not (isinstance(config, DrafterConfig) and config.model_type in TARGET_LAYERS):
        raise TypeError(
            f"`config` is a {type(config).__name__}; give a `DSparkConfig(...)`, an `Eagle3Config(...)` or an "
            "`MTPConfig(...)`, or leave it out."
        )
    _check_target(target)
    config = copy.deepcopy(config) if config is not None else DSparkConfig()
    _fill(config, target, tokenizer)
    config._check()
    return config


# --- checks ------------------------------------------------------------------------------------------------------


def _check_target(target: PreTrainedModel) -> None:
    """Raises `ValueError` for a target that no drafter can serve."""
    name = repr(target.config.name_or_path or type(target).__name__)
    if getattr(target.config, "is_encoder_decoder", False):
        raise ValueError(f"The target {name} is an encoder-decoder; `get_drafter` needs a decoder-only causal LM.")
    if target.get_input_embeddings() is None or target.get_output_embeddings() is None:
        raise ValueError(
            f"The target {name} ({type(target).__name__}) has no LM head; load it with `AutoModelForCausalLM`."
        )
    if not _compat.can_roll_back(target):
        raise ValueError(
            f"The target {name} ({type(target).__name__}) keeps a recurrent state or another one beside its keys and "
            "values, which cannot be rolled back when drafted tokens are rejected; `get_drafter` needs a target with "
            "a key/value cache."
        )
    text_config = target.config.get_text_config(decoder=True)
    for factor in LOGIT_FACTORS:
        value = getattr(text_config, factor, None)
        if value is not None and value != 1.0:
            raise ValueError(
                f"The target {name} multiplies or divides its logits by `{factor}` = {value}, which a drafter does "
                "not reproduce. Fold the factor into the weights of an untied LM head and set it to 1."
            )


# --- facts about the target --------------------------------------------------------------------------------------


def _fill(config: DrafterConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Sets every field of `config` that is still unset."""
    num_layers: int = target.config.get_text_config(decoder=True).num_hidden_layers
    facts = _shape(target) | {
        "num_target_layers": num_layers,
        "target_model_type": target.config.model_type,
        "target_name_or_path": target.config.name_or_path or None,
    }
    for name, value in facts.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, value in _style(target).items():
        if getattr(config, name) == defaults[name]:
            setattr(config, name, value)
    if config.target_layer_ids is None:
        # LongCat counts its two attentions per layer, but returns states per layer.
        text = target.config.get_text_config(decoder=True)
        depth = min(num_layers, getattr(text, "num_layers", num_layers))
        config.target_layer_ids = TARGET_LAYERS[config.model_type](depth)
    if isinstance(config, DSparkConfig) and config.mask_token_id is None:
        config.mask_token_id = choose_mask_token(target, tokenizer)


def _shape(target: PreTrainedModel) -> dict[str, Any]:
    """Sizes and rotary embedding of a drafter's layers, the same as those of the target's full-attention layers."""
    text = _layer_config(target)
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    if getattr(text, "attention_k_eq_v", False):
        key_value_heads = getattr(text, "num_global_key_value_heads", None) or key_value_heads
    head_dim = getattr(text, "global_head_dim", None) or getattr(text, "head_dim", None)
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": _intermediate_size(text),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim or text.hidden_size // heads,
        "rope_parameters": flat_rope(text),
        "max_position_embeddings": getattr(text, "max_position_embeddings", None),
    }


def _intermediate_size(text: PreTrainedConfig) -> int:
    """Width of the target's MLPs, the largest where it differs by layer (Gemma 3n)."""
    width = _first(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * text.hidden_size
    return max(width) if isinstance(width, (list, tuple)) else width


def _style(target: PreTrainedModel) -> dict[str, Any]:
    """Layer style of the target's family, and what the target does to embeddings and logits."""
    text = _layer_config(target)
    family = TARGET_FAMILIES.get(text.model_type, TARGET_FAMILIES.get(target.config.model_type, PLAIN_STYLE))
    return family | {
        "attention_k_eq_v": bool(getattr(text, "attention_k_eq_v", False)),
        "hidden_act": _first(text, "hidden_activation", "hidden_act", "activation_function") or "silu",
        "rms_norm_eps": _first(text, "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-6,
        "embedding_scale": _embedding_scale(target),
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
    }


def _layer_config(target: PreTrainedModel) -> PreTrainedConfig:
    """The target's text config as one of its full-attention layers sees it: sizes may differ by layer (Gemma 4)."""
    text = target.config.get_text_config(decoder=True)
    if not getattr(text, "is_heterogeneous", False):
        return text
    layer_types = getattr(text, "layer_types", None) or []
    index = layer_types.index("full_attention") if "full_attention" in layer_types else text.num_hidden_layers - 1
    return text.per_layer_config[index]


def _first(config: PreTrainedConfig, *names: str) -> Any:
    """The first of several attributes that is set, as families name the same thing differently."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _embedding_scale(target: PreTrainedModel) -> float:
    """The factor that the target applies to rows of its embedding table, in full precision."""
    embeddings = target.get_input_embeddings()
    # `embed_scale` is a buffer that a half-precision target has rounded; the number it was made from has not been.
    for name in ("scalar_embed_scale", "embed_scale"):
        scale = getattr(embeddings, name, None)
        if scale is not None:
            return float(scale)
    multiplier = _first(target.config.get_text_config(decoder=True), "embedding_multiplier", "scale_emb")
    return 1.0 if multiplier is None else float(multiplier)


def flat_rope(text_config: PreTrainedConfig) -> dict[str, Any]:
    """One rotary embedding for the drafter's layers: the target's, that of its full-attention layers if it has two.

    A type whose frequencies change with the length of the text is replaced by the default type with the same base.
    """
    rope = dict(getattr(text_config, "rope_parameters", None) or {})
    if isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    theta = rope.get("rope_theta") or getattr(text_config, "rope_theta", None) or 10000.0
    rope = {name: value for name, value in rope.items() if value is not None} | {"rope_theta": float(theta)}
    if rope.setdefault("rope_type", "default") in RotaryEmbedding.SUPPORTED_TYPES:
        return rope
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return {"rope_type": "default", **kept}


def default_target_layers(num_layers: int) -> list[int]:
    """Layers to capture from a target of `num_layers`: at most five, evenly spread, never the last.

    Deep targets leave out the first and the last two layers, as the released drafters do (36 layers: 1, 9, 17, 25,
    33). Shallow ones use all they have. A single layer leaves only the embedding output, -1.
    """
    if num_layers < 2:
        return [-1]
    first, last = (1, num_layers - 3) if num_layers >= 8 else (0, num_layers - 2)
    count = min(MAX_CAPTURED_LAYERS, last - first + 1)
    if count == 1:
        return [first]
    return [first + (2 * index * (last - first) + count - 1) // (2 * (count - 1)) for index in range(count)]


TARGET_LAYERS: dict[str, Callable[[int], list[int]]] = {
    DSparkConfig.model_type: default_target_layers,
    Eagle3Config.model_type: eagle3_target_layers,
    # The state after the target's final norm.
    MTPConfig.model_type: lambda num_layers: [num_layers - 1],
}
"""Layers that each kind of drafter captures from a target of so many, where its config does not say."""


def choose_mask_token(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    """A token for the undecided slots of a block: one that never occurs in text, so that its embedding is free.

    With a tokenizer, in this order: its mask token; a token named like one; an unused or reserved token; an id past
    its end in a padded vocabulary. Without: the last id to which the target's config gives no role.

    Raises:
        ValueError: if there is no such token.
    """
    text = target.config.get_text_config(decoder=True)
    sources = [source for source in (text, target.config, target.generation_config, tokenizer) if source is not None]
    taken = _roles(sources)
    candidates = range(text.vocab_size - 1, -1, -1) if tokenizer is None else _free_tokens(tokenizer)
    token = next((token for token in candidates if 0 <= token < text.vocab_size and token not in taken), None)
    if token is None:
        roles = "".join(f"; {token} is {taken[token]}" for token in dict.fromkeys(candidates) if token in taken)
        raise ValueError(
            f"No token of the vocabulary of {text.vocab_size} can serve as mask token: none is a mask, unused or "
            f"reserved token without another role and none is padding of the vocabulary{roles}. Set `mask_token_id` "
            "to a token that your text never contains."
        )
    return token


def _free_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that text never contains, the best first."""
    vocabulary = tokenizer.get_vocab()
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    mask = getattr(tokenizer, "mask_token_id", None)
    named = [vocabulary[token] for token in ordered if _MASK_TOKEN.fullmatch(token)]
    reserved = [vocabulary[token] for token in ordered if _RESERVED_TOKEN.fullmatch(token)]
    past_the_end = max(vocabulary.values(), default=-1) + 1
    return [*([] if mask is None else [mask]), *named, *reserved, past_the_end]


def _roles(sources: list[Any]) -> dict[int, str]:
    """Ids that configs and tokenizers name, with the field that does: padding, first, last, image placeholder, ..."""
    roles: dict[int, str] = {}
    for source in sources:
        names = vars(source) if not isinstance(source, PreTrainedTokenizerBase) else _TOKENIZER_IDS
        for name in names:
            if not name.endswith(("_token_id", "_token_index")) or name == "mask_token_id":
                continue
            value = getattr(source, name, None)
            values = value if isinstance(value, (list, tuple)) else [value]
            role = f"`{name}` of {type(source).__name__}"
            roles.update((token, role) for token in values if isinstance(token, int))
    return roles


def _device(target: PreTrainedModel) -> torch.device:
    """Where the target's LM head is, or the CPU if it is offloaded: the drafter works on its output."""
    head: nn.Module = target.get_output_embeddings()
    device: torch.device = next(head.parameters()).device
    return device if device.type != "meta" else torch.device("cpu")


def _dtype(target: PreTrainedModel) -> torch.dtype:
    """The dtype that the target computes in."""
    dtype: torch.dtype = target.dtype
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else target.get_input_embeddings().weight.dtype


# --- loading -----------------------------------------------------------------------------------------------------


class AutoDrafter:
    """Loads a drafter whatever format it is stored in."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Drafter:
        """Loads the drafter in a local folder or Hub repository.

        Args:
            pretrained_model_name_or_path: folder or repository with `config.json` and safetensors weights, in this
                package's format, or in that of DeepSpec, EAGLE-3, z-lab's DFlash, SpecForge or speculators.
            kwargs: as for `PreTrainedModel.from_pretrained`: `revision`, `subfolder`, `token`, `cache_dir`,
                `local_files_only`, `dtype`, `device_map`, ...

        Raises:
            OSError: if there is no such folder or repository, no `config.json` in it, or the weights are missing,
                incomplete or damaged.
            TypeError: if a field of the config has a value of another type.
            ValueError: if the checkpoint is something else than a drafter of these formats; the message names it.
        """
        config = _read_config(pretrained_model_name_or_path, kwargs)
        found = detect_format(config)
        if found == DSPARK:
            drafter_class = DRAFTER_CLASSES[config["model_type"]]
            drafter: Drafter = drafter_class.from_pretrained(pretrained_model_name_or_path, **kwargs)
            return drafter
        if found in LOADERS:
            return LOADERS[found](pretrained_model_name_or_path, config, **kwargs)
        raise refuse_foreign(found, pretrained_model_name_or_path, config.get("model_type"))


def _read_config(path: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's `config.json`; a PEFT adapter, which has none, is refused by name."""
    check_location(path, "`pretrained_model_name_or_path`")
    try:
        return read_json(find_file(path, "config.json", kwargs))
    except OSError as error:
        try:
            find_file(path, "adapter_config.json", kwargs)
        except OSError:
            if not os.path.isdir(path):
                raise neither_found(path, error) from error
            raise OSError(f"The drafter {path!s} has no readable config.json: {error}") from error
    raise refuse_foreign("peft", path)


__all__ = [
    "TARGET_FAMILIES",
    "AutoDrafter",
    "choose_mask_token",
    "complete_config",
    "default_target_layers",
    "flat_rope",
    "get_drafter",
]
