"""Arguments of drafter training."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..conversion.loading import check_output
from .losses import LOSS_MEMORY
from .state_storage import STORAGES

_LEAST = {
    "num_anchors": 1,
    "max_length": 2,
    "ce_weight": 0,
    "tv_weight": 0,
    "confidence_weight": 0,
    "loss_decay": 0,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
}
"""Smallest value of an argument, where it is set."""


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the recipe of the DSpark paper as defaults, and the options of its loss.

    For a plain DFlash drafter (no heads) use `ce_weight=1.0, tv_weight=0.0`. `num_anchors`, `ce_weight`, `tv_weight`,
    `confidence_weight` and `loss_decay` are for drafters of blocks (DSpark, DFlash): EAGLE-3 and MTP drafters draft
    from every position, and their losses are fixed but for `step_loss_decay` of EAGLE-3.

    Raises:
        ValueError: if an option is out of its range.
    """

    num_anchors: int = field(
        default=512,
        metadata={
            "help": "Blocks drafted in each sequence, fewer where there are fewer valid anchors; not for EAGLE-3 and "
            "MTP drafters, which draft from every position."
        },
    )
    max_length: int = field(default=4096, metadata={"help": "Longest training sequence, in tokens."})
    enable_thinking: bool | None = field(
        default=None,
        metadata={"help": "Thinking mode given to the chat template, where it has one; its own default if unset."},
    )
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of the cross entropy to the training tokens."})
    tv_weight: float = field(
        default=0.9, metadata={"help": "Weight of the L1 distance between draft and target distributions."}
    )
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence head's loss."})
    loss_decay: float | None = field(
        default=4.0,
        metadata={"help": "γ_decay: position k of a block weighs exp(-(k-1)/γ_decay); 0 weighs all positions alike."},
    )
    step_loss_decay: float = field(
        default=0.8,
        metadata={
            "help": "EAGLE-3 only: step s of the training-time test weighs this to the power of s, counted from 0."
        },
    )
    loss_memory: float = field(
        default=LOSS_MEMORY,
        metadata={
            "help": "MiB for draft and target logits and what is computed from them, which exist for a chunk of "
            "positions at a time; less than one position needs means one position. Gradients of the heads come on top."
        },
    )
    states_cache: str | None = field(
        default=None,
        metadata={
            "help": "Folder for the target's states over the training data, which are computed where they are missing "
            "before the first epoch and then read from there; if unset they are computed for each batch."
        },
    )
    states_storage: str | None = field(
        default=None,
        metadata={
            "help": "What states are stored as: `bf16`, `float32` or `int8`; unset for what the folder has, `bf16` in "
            "a fresh one."
        },
    )

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate of AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule after the warm-up."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Warm-up: a number of steps, or below 1 the share of all steps."}
    )
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of AdamW."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Largest norm of the gradient; 0 for no clipping."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay false: the trainer reads columns that the drafter does not."}
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={"help": "Must stay false: the heads are applied where a search for unused parameters misses them."},
    )
    ddp_broadcast_buffers: bool | None = field(
        default=False,
        metadata={
            "help": "Must stay false: a recurrent drafter's forward runs several times before one backward, and "
            "buffers are the same in all processes."
        },
    )

    def __post_init__(self) -> None:
        self._check()
        if self.states_cache is not None:
            self.states_cache = os.path.expanduser(self.states_cache)
        super().__post_init__()

    def _check(self) -> None:
        """Raises `ValueError` for an option that no training can use."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"`{name}` is {value}; it must be at least {least}.")
        positive = {
            "learning_rate": True,
            "loss_memory": True,
            "num_train_epochs": self.max_steps == -1,
            "logging_steps": self.logging_strategy == "steps",
            "save_steps": self.save_strategy == "steps",
        }
        for name, is_used in positive.items():
            value = getattr(self, name)
            if is_used and not 0 < value < math.inf:
                raise ValueError(f"`{name}` is {value}; it must be a positive number.")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError(f"`max_steps` is {self.max_steps}; give a positive number, or -1 to count in epochs.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` is {self.seed}; it must be from 0 to {2**32 - 1}.")
        if self.ce_weight == self.tv_weight == 0:
            raise ValueError("`ce_weight` and `tv_weight` are both 0, so the drafter would learn no tokens; set one.")
        if not 0 < self.step_loss_decay <= 1:
            raise ValueError(f"`step_loss_decay` is {self.step_loss_decay}; it must be above 0 and at most 1.")
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` is True; leave it False, the trainer needs `loss_mask`.")
        if self.states_cache is not None and not os.fspath(self.states_cache):
            raise ValueError("`states_cache` is empty; give a folder.")
        if self.states_storage not in (None, *STORAGES):
            raise ValueError(f"`states_storage` is {self.states_storage!r}; choose one of {', '.join(STORAGES)}.")
        if self.states_storage is not None and self.states_cache is None:
            raise ValueError("`states_storage` is set and `states_cache` is not; give the folder, too.")
        if self.output_dir is not None:
            check_output(self.output_dir, "`output_dir`")


__all__ = ["DSparkTrainingArguments"]
