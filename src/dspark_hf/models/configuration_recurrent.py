"""What the configurations of drafters that draft token by token share."""

from __future__ import annotations

from dataclasses import field

from .configuration_base import DrafterConfig


class RecurrentConfig(DrafterConfig):
    """Base of the configurations of recurrent drafters, see `RecurrentDrafter`."""

    num_hidden_layers: int = field(default=1, metadata={"help": "Number of drafter layers."})
    head_norms: bool = field(
        default=True, metadata={"help": "RMS norms on each head's queries and keys (Qwen3, Gemma; not Llama)."}
    )


__all__ = ["RecurrentConfig"]
