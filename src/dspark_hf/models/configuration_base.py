"""What the configurations of all drafters share: the shape of their layers, facts about the target, the vocabulary."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

_LEAST = {
    "vocab_size": 1,
    "draft_vocab_size": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "sliding_window": 1,
    "block_size": 1,
    "num_target_layers": 1,
}
"""Smallest value of a field, where it is set."""

_ROPE_KEYS = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
"""What a type of rotary embedding needs beside `rope_theta`."""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(of, value))


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", _is_int),
    "float": ("a finite number", _is_number),
    "str": ("a string", lambda value: isinstance(value, str)),
    "list[int]": ("a list of whole numbers", lambda value: _is_list(value, _is_int)),
    "list[float]": ("a list of finite numbers", lambda value: _is_list(value, _is_number)),
    "list[str]": ("a list of strings", lambda value: _is_list(value, lambda item: isinstance(item, str))),
    "dict[str, Any]": ("a mapping of names to values", lambda value: isinstance(value, dict)),
}
"""What a field takes, in words and as a test, by its annotation."""


def check_fields(config_class: type[DrafterConfig], values: Mapping[str, Any]) -> None:
    """Checks fields of a `config_class` one by one; other names are passed over.

    Raises:
        TypeError: if a value is of another type than its field.
        ValueError: if a number is too small.
    """
    for name, annotation in config_class.drafter_fields().items():
        if name not in values:
            continue
        value = values[name]
        # Facts about the target are annotated as they are once `get_drafter` has filled them in.
        may_be_unset = annotation.endswith(" | None") or getattr(config_class, name, ...) is None
        if value is None and may_be_unset:
            continue
        kind, fits = _KINDS[annotation.removesuffix(" | None")]
        if not fits(value):
            raise TypeError(f"`{name}` is {value!r}; it must be {kind}{', or unset' if may_be_unset else ''}.")
        if name in _LEAST and value < _LEAST[name]:
            raise ValueError(f"`{name}` is {value}; it must be at least {_LEAST[name]}.")


def from_target(help_text: str) -> Any:
    """A field that is a fact about the target: `None` in a new config, filled in by `get_drafter`."""
    return field(default=None, metadata={"help": help_text})


def _check_dtype(value: Any) -> None:
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"`dtype` is {value!r}; name a floating-point type of torch, such as 'float32'.")


class DrafterConfig(PreTrainedConfig):
    """Base of the configurations of all drafters.

    Fields left at `None` are facts about the target; `get_drafter` fills them in.

    Layer style is configuration, not code: the defaults give Qwen3-style layers, and `sandwich_norms`,
    `use_value_norm`, `attention_k_eq_v`, `attention_scale`, `use_layer_scalar`, `embedding_scale` and
    `final_logit_softcapping` turn them into Gemma-style ones.

    Raises:
        TypeError: if a field has a value of another type.
        ValueError: if a field is out of its range or two fields contradict each other.
    """

    # --- shape of the backbone -------------------------------------------------------------------------------
    vocab_size: int = from_target("Vocabulary of the target's LM head.")
    hidden_size: int = from_target("Hidden size, the same as the target's.")
    intermediate_size: int = from_target("Width of each layer's MLP.")
    num_hidden_layers: int = field(default=2, metadata={"help": "Number of drafter layers."})
    num_attention_heads: int = from_target("Query heads of each layer.")
    num_key_value_heads: int = from_target("Key/value heads of each layer.")
    head_dim: int = from_target("Width of one attention head.")
    hidden_act: str = field(default="silu", metadata={"help": "Activation of the MLP."})
    rms_norm_eps: float = field(default=1e-6, metadata={"help": "Epsilon of every RMS norm."})
    max_position_embeddings: int | None = field(default=None, metadata={"help": "Longest context of the target."})
    rope_parameters: dict[str, Any] = from_target("Rotary embedding: `rope_type`, `rope_theta`, what the type needs.")
    attention_bias: bool = field(default=False, metadata={"help": "Biases in the attention projections."})
    attention_dropout: float = field(default=0.0, metadata={"help": "Dropout of attention weights in training."})
    initializer_range: float = field(default=0.02, metadata={"help": "Standard deviation of initial weights."})
    layer_types: list[str] = field(
        default_factory=list,
        metadata={"help": "`full_attention` or `sliding_attention` for each layer; all full if left empty."},
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "Context positions that a `sliding_attention` layer sees."}
    )

    # --- layer style: Qwen3 by default, Gemma by these -------------------------------------------------------
    sandwich_norms: bool = field(
        default=False, metadata={"help": "Norms after attention and MLP too (Gemma), not only before (Qwen3)."}
    )
    use_value_norm: bool = field(default=False, metadata={"help": "RMS norm without weights on values (Gemma 4)."})
    attention_k_eq_v: bool = field(
        default=False, metadata={"help": "Values are the key projection's output; there is no value projection."}
    )
    attention_scale: float | None = field(
        default=None, metadata={"help": "Factor on attention scores; 1/sqrt(head_dim) if unset (Gemma 4: 1.0)."}
    )
    use_layer_scalar: bool = field(default=False, metadata={"help": "One scalar on each layer's output (Gemma 4)."})
    embedding_scale: float = field(default=1.0, metadata={"help": "Factor on token embeddings (Gemma: sqrt(d))."})
    final_logit_softcapping: float | None = field(
        default=None, metadata={"help": "Soft cap on base logits, applied before the sequential head's bias."}
    )

    # --- what is drafted, from what --------------------------------------------------------------------------
    block_size: int = field(default=7, metadata={"help": "γ, the most tokens drafted in one round."})
    target_layer_ids: list[int] = from_target("Target layers whose output is captured; -1 is the embedding output.")
    num_target_layers: int | None = field(default=None, metadata={"help": "Number of layers of the target."})
    target_model_type: str | None = field(default=None, metadata={"help": "`model_type` of the target."})
    target_name_or_path: str | None = field(default=None, metadata={"help": "Where the target came from."})
    generation_prompt_ids: list[int] | None = field(
        default=None,
        metadata={"help": "Tokens with which chat prompts ended in training; unset for a drafter of plain text."},
    )
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Thinking mode of the chat template in training; unset for its default."}
    )
    share_target_embeddings: bool = field(
        default=True,
        metadata={"help": "Use the target's embeddings and LM head in place of copies kept in the drafter."},
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={"help": "Predict this many of the target's tokens, its frequent ones; all of them if unset."},
    )

    def __post_init__(self, **kwargs: Any) -> None:
        self.tie_word_embeddings = False
        self.layer_types = self.layer_types or []
        self._check()
        _check_dtype(kwargs.get("torch_dtype"))
        rope_parameters = self.rope_parameters and {"rope_type": "default", **self.rope_parameters}
        if not self.layer_types:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        # Where it is unset Transformers fills in a default base, which would hide that the target's is to be taken.
        self.rope_parameters = rope_parameters

    @classmethod
    def drafter_fields(cls) -> dict[str, str]:
        """Names of the fields that drafters add to those of every config of Transformers, with their annotations."""
        fields: dict[str, str] = {}
        for each in reversed(cls.__mro__):
            if issubclass(each, DrafterConfig):
                fields |= inspect.get_annotations(each)
        return fields

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `PreTrainedConfig.from_dict`.

        Raises:
            ValueError: if it is the config of another model.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"This is a {model_type} model ({config_dict.get('architectures')}), not a drafter of type "
                f"{cls.model_type!r}. If it is a drafter of another kind or in another format, load it with "
                "`AutoDrafter.from_pretrained`; if it is a target, build a drafter for it with `get_drafter(target)`."
            )
        return super().from_dict(config_dict, **kwargs)

    def _check(self) -> None:
        """Raises `TypeError` or `ValueError` for fields that no drafter can have."""
        check_fields(type(self), vars(self))
        _check_dtype(self.dtype)
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` is {self.hidden_act!r}; choose one of {tuple(ACT2FN)}.")
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            raise ValueError(
                f"`final_logit_softcapping` is {self.final_logit_softcapping}; it must be positive, or unset for none."
            )
        self._check_heads()
        self._check_rope()
        self._check_layer_types()
        self._check_target_layers()
        if self.vocab_size is not None and (self.draft_vocab_size or 0) > self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` is {self.draft_vocab_size}, more than the vocabulary of {self.vocab_size} "
                "tokens; give fewer, or leave it unset for all of them."
            )

    def _check_heads(self) -> None:
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads is not None and shared is not None and heads % shared:
            raise ValueError(
                f"`num_attention_heads` is {heads}, which `num_key_value_heads` = {shared} does not divide."
            )

    def _check_rope(self) -> None:
        rope = self.rope_parameters
        if rope is None:
            return
        needed = ("rope_theta", *_ROPE_KEYS.get(str(rope.get("rope_type")), ()))
        for key in (*needed, "partial_rotary_factor"):
            value: Any = rope.get(key)
            if value is None and key not in needed:
                continue
            if not (_is_number(value) and value > 0):
                raise ValueError(f"`rope_parameters` has `{key}` = {value!r}; it must be a positive number.")

    def _check_layer_types(self) -> None:
        layer_types = self.layer_types
        if layer_types and len(layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has {len(layer_types)} entries for `num_hidden_layers` = {self.num_hidden_layers}; "
                "give one per drafter layer, or leave it unset."
            )
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"`layer_types` has {sorted(unknown)}; use `full_attention` or `sliding_attention`.")
        if "sliding_attention" in layer_types and not self.sliding_window:
            raise ValueError("`layer_types` has `sliding_attention` but `sliding_window` is unset; give its length.")

    def _check_target_layers(self) -> None:
        layers = self.target_layer_ids
        if layers is None:
            return
        if not layers or sorted(set(layers)) != list(layers):
            raise ValueError(f"`target_layer_ids` is {layers}; give at least one layer, in strictly rising order.")
        last = self.num_target_layers - 1 if self.num_target_layers is not None else None
        if layers[0] < -1 or (last is not None and layers[-1] > last):
            top = "" if last is None else f" to {last}"
            raise ValueError(
                f"`target_layer_ids` is {layers}, out of range for a target of {self.num_target_layers} layers: "
                f"use -1 (the embedding output) or 0{top}."
            )

    @property
    def predicted_vocab_size(self) -> int:
        """Number of tokens that the drafter can predict."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def missing_fields(self) -> list[str]:
        """Names of fields that a model cannot be built without and that are still unset."""
        needed = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rope_parameters",
            "target_layer_ids",
        )
        return [name for name in needed if getattr(self, name) is None]


__all__ = ["DrafterConfig", "check_fields", "from_target"]
