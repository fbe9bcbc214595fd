"""Configuration of a DSpark drafter."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from .configuration_base import DrafterConfig, from_target

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


class DSparkConfig(DrafterConfig):
    """Describes a DSpark drafter: its parallel backbone, its sequential head and its confidence head.

    Fields left at `None` are facts about the target; `get_drafter` fills them in. With `markov_rank=0` and
    `enable_confidence_head=False` the drafter is a plain DFlash drafter. See `DrafterConfig` for the layers.

    Raises:
        TypeError: if a field has a value of another type.
        ValueError: if a field is out of its range or two fields contradict each other.
    """

    model_type = "dspark"

    mask_token_id: int = from_target("Token that fills the block after the anchor.")
    sample_from_anchor: bool = field(
        default=True,
        metadata={
            "help": "Whether the anchor's slot predicts the first drafted token, so that a block is the anchor and "
            "γ-1 mask tokens (DSpark). Else it is the anchor and γ mask tokens, and the anchor's slot predicts "
            "nothing (z-lab's DFlash, whose own `block_size` counts the anchor and is γ+1)."
        },
    )

    # --- heads -----------------------------------------------------------------------------------------------
    markov_rank: int = field(default=256, metadata={"help": "Rank r of the sequential head; 0 for none (DFlash)."})
    markov_head_type: str = field(default="vanilla", metadata={"help": "`vanilla`, `gated` or `rnn`."})
    enable_confidence_head: bool = field(default=True, metadata={"help": "Predict each drafted token's survival."})
    confidence_head_with_markov: bool = field(
        default=True, metadata={"help": "The confidence head also sees the previous token's Markov embedding."}
    )
    confidence_temperatures: list[float] | None = field(
        default=None,
        metadata={"help": "What divides the confidence logit of each drafted position; unset while uncalibrated."},
    )

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.markov_rank == 0:
            self.confidence_head_with_markov = False

    def _check(self) -> None:
        super()._check()
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(f"`markov_head_type` is {self.markov_head_type!r}; choose one of {MARKOV_HEAD_TYPES}.")
        if self.markov_rank < 0:
            raise ValueError(f"`markov_rank` is {self.markov_rank}; use 0 for no sequential head, or a positive rank.")
        self._check_temperatures()
        if self.vocab_size is not None and self.mask_token_id is not None:
            if not 0 <= self.mask_token_id < self.vocab_size:
                raise ValueError(
                    f"`mask_token_id` is {self.mask_token_id}, outside the vocabulary of {self.vocab_size} tokens."
                )

    def _check_temperatures(self) -> None:
        temperatures = self.confidence_temperatures
        if temperatures is None:
            return
        if not self.enable_confidence_head:
            raise ValueError(
                f"`confidence_temperatures` is {temperatures} but `enable_confidence_head` is false; leave it unset."
            )
        if len(temperatures) != self.block_size:
            raise ValueError(
                f"`confidence_temperatures` has {len(temperatures)} entries for `block_size` = {self.block_size}; "
                "give one per drafted position, or leave it unset."
            )
        if min(temperatures) <= 0:
            raise ValueError(
                f"`confidence_temperatures` is {temperatures}; each must be positive, 1 where nothing is to change."
            )

    @property
    def block_width(self) -> int:
        """Tokens of a block given to the parallel stage: γ, or γ+1 where the anchor's slot predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1

    def missing_fields(self) -> list[str]:
        missing = super().missing_fields()
        return missing if self.mask_token_id is not None else [*missing, "mask_token_id"]


__all__ = ["MARKOV_HEAD_TYPES", "DSparkConfig"]
