"""Configuration of a DSpark drafter."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from transformers import PreTrainedConfig

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


def _from_target(help_text: str) -> Any:
    """A field that is a fact about the target: `None` in a new config, filled in by `get_drafter`."""
    return field(default=None, metadata={"help": help_text})


class DSparkConfig(PreTrainedConfig):
    """Describes a DSpark drafter: its parallel backbone, its sequential head and its confidence head.

    Fields left at `None` are facts about the target; `get_drafter` fills them in. With `markov_rank=0` and
    `enable_confidence_head=False` the drafter is a plain DFlash drafter.

    Layer style is configuration, not code: the defaults give Qwen3-style layers, and `sandwich_norms`,
    `use_value_norm`, `attention_k_eq_v`, `attention_scale`, `use_layer_scalar`, `embedding_scale` and
    `final_logit_softcapping` turn them into Gemma-style ones.

    Raises:
        ValueError: if a field is out of its range or two fields contradict each other.
    """

    model_type = "dspark"

    # --- shape of the backbone -------------------------------------------------------------------------------
    vocab_size: int = _from_target("Vocabulary of the target's LM head.")
    hidden_size: int = _from_target("Hidden size, the same as the target's.")
    intermediate_size: int = _from_target("Width of each layer's MLP.")
    num_hidden_layers: int = field(default=2, metadata={"help": "Number of drafter layers."})
    num_attention_heads: int = _from_target("Query heads of each layer.")
    num_key_value_heads: int = _from_target("Key/value heads of each layer.")
    head_dim: int = _from_target("Width of one attention head.")
    hidden_act: str = field(default="silu", metadata={"help": "Activation of the MLP."})
    rms_norm_eps: float = field(default=1e-6, metadata={"help": "Epsilon of every RMS norm."})
    max_position_embeddings: int | None = field(default=None, metadata={"help": "Longest context of the target."})
    rope_parameters: dict[str, Any] = _from_target("Rotary embedding: `rope_type`, `rope_theta`, what the type needs.")
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
    mask_token_id: int = _from_target("Token that fills the block after the anchor.")
    target_layer_ids: list[int] = _from_target("Target layers whose output is captured; -1 is the embedding output.")
    num_target_layers: int | None = field(default=None, metadata={"help": "Number of layers of the target."})
    target_model_type: str | None = field(default=None, metadata={"help": "`model_type` of the target."})
    target_name_or_path: str | None = field(default=None, metadata={"help": "Where the target came from."})
    share_target_embeddings: bool = field(
        default=True,
        metadata={"help": "Use the target's embeddings and LM head in place of copies kept in the drafter."},
    )

    # --- heads -----------------------------------------------------------------------------------------------
    markov_rank: int = field(default=256, metadata={"help": "Rank r of the sequential head; 0 for none (DFlash)."})
    markov_head_type: str = field(default="vanilla", metadata={"help": "`vanilla`, `gated` or `rnn`."})
    enable_confidence_head: bool = field(default=True, metadata={"help": "Predict each drafted token's survival."})
    confidence_head_with_markov: bool = field(
        default=True, metadata={"help": "The confidence head also sees the previous token's Markov embedding."}
    )

    def __post_init__(self, **kwargs: Any) -> None:
        self.tie_word_embeddings = False
        if self.markov_rank == 0:
            self.confidence_head_with_markov = False
        rope_parameters = self.rope_parameters and {"rope_type": "default", **self.rope_parameters}
        if not self.layer_types:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        self._check()
        super().__post_init__(**kwargs)
        # Where it is unset Transformers fills in a default base, which would hide that the target's is to be taken.
        self.rope_parameters = rope_parameters

    def _check(self) -> None:
        """Raises `ValueError` for a field that no drafter can have."""
        for name in ("num_hidden_layers", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if self.markov_rank < 0:
            raise ValueError(f"`markov_rank` is {self.markov_rank}; use 0 for no sequential head, or a positive rank.")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(f"`markov_head_type` is {self.markov_head_type!r}; choose one of {MARKOV_HEAD_TYPES}.")
        self._check_layer_types()
        self._check_target_layers()
        if self.vocab_size is not None and self.mask_token_id is not None:
            if not 0 <= self.mask_token_id < self.vocab_size:
                raise ValueError(
                    f"`mask_token_id` is {self.mask_token_id}, outside the vocabulary of {self.vocab_size} tokens."
                )

    def _check_layer_types(self) -> None:
        layer_types = self.layer_types
        if len(layer_types) != self.num_hidden_layers:
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
            "mask_token_id",
            "target_layer_ids",
        )
        return [name for name in needed if getattr(self, name) is None]


__all__ = ["MARKOV_HEAD_TYPES", "DSparkConfig"]
