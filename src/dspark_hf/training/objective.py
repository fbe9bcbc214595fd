"""What the trainer asks of the kind of drafter that it trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..models import Drafter
from .arguments import DSparkTrainingArguments
from .losses import DSparkLoss, LossWeights, compared_vocab_size, slot_weights, slots_within
from .normaliser import complete
from .target_states import TargetStates

Batch = dict[str, torch.Tensor]


class Objective:
    """What one kind of drafter is trained on, with batches as `DrafterCollator` makes them.

    A subclass says which slots of a batch count, and computes their loss; everything else is the trainer's.

    Args:
        drafter: bound to its target.
        args: of the training.

    Attributes:
        arguments: names of those arguments that only some kinds of drafters have a use for, and this one has.
        weights: of the loss.
    """

    arguments: tuple[str, ...] = ()
    drafter: Any
    weights: LossWeights

    def __init__(self, drafter: Drafter, args: DSparkTrainingArguments) -> None:
        self.drafter, self.args = drafter, args

    def draw(self, batch: Batch, step: int) -> None:
        """Puts into `batch` what is drawn at random for it at a training step, unless it is there already."""

    def eval_mask(self, batch: Batch) -> torch.Tensor:
        """The slots that count, `(batch, ..., block)`, of a batch for which `draw` has been called."""
        raise NotImplementedError

    def used(self, batch: Batch) -> torch.Tensor:
        """Positions `(batch, seq)` whose target distribution a slot that counts is compared with; boolean."""
        raise NotImplementedError

    def total_weight(self, batch: Batch) -> torch.Tensor:
        """Sum of the weights of all slots that count, a scalar."""
        return slot_weights(self.eval_mask(batch), self.weights.decay).sum()

    def loss(
        self,
        model: nn.Module,
        batch: Batch,
        states: TargetStates,
        total_weight: torch.Tensor | None = None,
        processes: int | None = None,
    ) -> DSparkLoss:
        """Loss of a batch.

        Args:
            model: the drafter, or its wrapper in distributed training, whose forward must be the one that is called.
            batch: one for which `draw` has been called.
            states: the target's over its `input_ids`.
            total_weight: see `dspark_loss`.
            processes: see `dspark_loss`.
        """
        raise NotImplementedError

    @property
    def chunk_size(self) -> int:
        """Slots whose logits are in memory at once."""
        return slots_within(self.args.loss_memory, compared_vocab_size(self.drafter))

    def with_normaliser(self, states: TargetStates, batch: Batch) -> TargetStates:
        """`states` with what a drafter of a reduced vocabulary needs of the rest of the target's, see `Normaliser`."""
        if self.drafter.d2t is None:
            return states
        chunk_size = slots_within(self.args.loss_memory, self.drafter.config.vocab_size)
        used, logits_of = self.used(batch), self.drafter.target_logits
        return replace(states, normaliser=complete(states.normaliser, used, logits_of, states.last, chunk_size))


def padded_mask(batch: Batch) -> torch.Tensor:
    """Loss mask `(batch, seq)`, 0 at padding."""
    return batch["loss_mask"].bool() & batch["attention_mask"].bool()


__all__ = ["Batch", "Objective", "padded_mask"]
