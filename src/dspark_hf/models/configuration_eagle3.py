"""Configuration of an EAGLE-3 drafter."""

from __future__ import annotations

from dataclasses import field

from .configuration_recurrent import RecurrentConfig

NUM_CAPTURED_LAYERS = 3
"""Target layers that EAGLE-3 reads where nothing else is said."""


class Eagle3Config(RecurrentConfig):
    """Describes an EAGLE-3 drafter.

    Fields left at `None` are facts about the target; `get_drafter` fills them in. Where a checkpoint leaves
    `target_layer_ids` unset they are those of `eagle3_target_layers`, once the drafter is bound to a target.

    Raises:
        TypeError: if a field has a value of another type.
        ValueError: if a field is out of its range or two fields contradict each other.
    """

    model_type = "dspark_eagle3"

    share_target_head: bool = field(
        default=True,
        metadata={
            "help": "Where the target's embeddings are shared, share its LM head too; else the drafter has a trained "
            "head of its own, drawn at random in a new drafter."
        },
    )

    def missing_fields(self) -> list[str]:
        return [name for name in super().missing_fields() if name != "target_layer_ids"]

    @property
    def num_captured_layers(self) -> int:
        """Number of target layers whose states are fused."""
        return NUM_CAPTURED_LAYERS if self.target_layer_ids is None else len(self.target_layer_ids)


def eagle3_target_layers(num_layers: int) -> list[int]:
    """The low, the middle and the high layer that EAGLE-3 captures from a target of `num_layers`; never the last.

    These are 1, `num_layers // 2 - 1` and `num_layers - 4`. Targets with fewer than seven layers give up to three
    that are evenly spread; a single layer leaves only the embedding output, -1.
    """
    if num_layers >= 7:
        return [1, num_layers // 2 - 1, num_layers - 4]
    return sorted({0, (num_layers - 2) // 2, num_layers - 2}) if num_layers > 1 else [-1]


__all__ = ["NUM_CAPTURED_LAYERS", "Eagle3Config", "eagle3_target_layers"]
