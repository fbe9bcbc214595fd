"""Configuration of a multi-token-prediction drafter."""

from __future__ import annotations

from dataclasses import field

from .configuration_recurrent import RecurrentConfig


class MTPConfig(RecurrentConfig):
    """Describes a drafter with one module of multi-token prediction (MTP).

    Fields left at `None` are facts about the target; `get_drafter` fills them in.

    Raises:
        TypeError: if a field has a value of another type.
        ValueError: if a field is out of its range or two fields contradict each other.
    """

    model_type = "dspark_mtp"

    block_size: int = field(
        default=1,
        metadata={"help": "γ, the most tokens drafted in one round; above 1 the module reads its own output."},
    )

    def _check_target_layers(self) -> None:
        super()._check_target_layers()
        if self.target_layer_ids is not None and len(self.target_layer_ids) != 1:
            raise ValueError(
                f"`target_layer_ids` is {self.target_layer_ids}; an MTP module reads one layer, the target's last. "
                "Leave it unset."
            )


__all__ = ["MTPConfig"]
