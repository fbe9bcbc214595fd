"""Training of drafters that draft a block at once (DSpark, DFlash): blocks at sampled anchors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..models import Drafter, DSparkDrafter
from .anchors import Anchors, block_attention_mask, evaluation_mask, make_blocks, sample_anchors
from .arguments import DSparkTrainingArguments
from .losses import DSparkLoss, LossWeights, compare_blocks, dspark_loss
from .objective import Batch, Objective, padded_mask
from .target_states import TargetStates


class BlockObjective(Objective):
    """The loss of `blockwise_loss`, at anchors that depend on the run's seed, the step and the row."""

    arguments = ("num_anchors", "ce_weight", "tv_weight", "confidence_weight", "loss_decay")
    drafter: DSparkDrafter

    def __init__(self, drafter: Drafter, args: DSparkTrainingArguments) -> None:
        super().__init__(drafter, args)
        self.weights = LossWeights(
            ce=args.ce_weight, tv=args.tv_weight, confidence=args.confidence_weight, decay=args.loss_decay
        )

    def draw(self, batch: Batch, step: int) -> None:
        """See the base class."""
        if "anchor_positions" in batch:
            return
        anchors = sample_anchors(
            batch["input_ids"],
            batch["attention_mask"],
            batch["loss_mask"],
            num_anchors=self.args.num_anchors,
            seed=self.args.seed,
            step=step,
        )
        batch["anchor_positions"], batch["anchor_keep"] = anchors.positions, anchors.keep

    def eval_mask(self, batch: Batch) -> torch.Tensor:
        """See the base class; `(batch, blocks, block)`."""
        return evaluation_mask(_anchors(batch), padded_mask(batch), self.drafter.config.block_size)

    def used(self, batch: Batch) -> torch.Tensor:
        """See the base class."""
        seq = batch["input_ids"].shape[1]
        steps = torch.arange(self.drafter.config.block_size, device=batch["input_ids"].device)
        slots = (batch["anchor_positions"].unsqueeze(-1) + steps).clamp(max=seq - 1).flatten(1)
        counts = self.eval_mask(batch).flatten(1).int()
        return torch.zeros_like(batch["input_ids"], dtype=torch.int).scatter_add(1, slots, counts) > 0

    def loss(
        self,
        model: nn.Module,
        batch: Batch,
        states: TargetStates,
        total_weight: torch.Tensor | None = None,
        processes: int | None = None,
    ) -> DSparkLoss:
        """See the base class."""
        return blockwise_loss(
            model,
            self.drafter,
            batch["input_ids"],
            padded_mask(batch),
            _anchors(batch),
            states,
            self.weights,
            chunk_size=self.chunk_size,
            total_weight=total_weight,
            processes=processes,
        )


def _anchors(batch: Batch) -> Anchors:
    return Anchors(batch["anchor_positions"], batch["anchor_keep"])


def blockwise_loss(
    model: nn.Module,
    drafter: DSparkDrafter,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: Anchors,
    states: TargetStates,
    weights: LossWeights,
    chunk_size: int | None = None,
    total_weight: torch.Tensor | None = None,
    processes: int | None = None,
) -> DSparkLoss:
    """Drafts the blocks at `anchors` and scores them against the target.

    Args:
        model: `drafter`, or its wrapper in distributed training, whose forward must be the one that is called.
        drafter: bound to the target.
        input_ids: `(batch, seq)`.
        loss_mask: `(batch, seq)`, 0 at padding.
        anchors: where the blocks start.
        states: the target's over `input_ids`.
        weights: weights of the loss.
        chunk_size: see `compare_blocks`.
        total_weight: see `dspark_loss`.
        processes: see `dspark_loss`.
    """
    config: Any = drafter.config  # of a built drafter, so no field is unset
    blocks = make_blocks(input_ids, loss_mask, anchors, config.block_size, config.mask_token_id, config.block_width)
    masks = {
        layer_type: block_attention_mask(
            anchors,
            input_ids.shape[1],
            config.block_width,
            config.sliding_window if layer_type == "sliding_attention" else None,
        )
        for layer_type in set(config.layer_types)
    }
    hidden = model(
        input_ids=blocks.input_ids,
        target_states=states.context,
        position_ids=blocks.position_ids,
        attention_mask=masks,
        compute_logits=False,
    ).last_hidden_state
    # One dummy stays where there is nothing else: every process must reach every parameter.
    keep = anchors.keep if bool(anchors.keep.any()) else torch.ones_like(anchors.keep)
    hidden = hidden.unflatten(1, (-1, config.block_size))[keep]
    rows = torch.arange(len(input_ids), device=input_ids.device)[:, None, None]
    target_hidden = states.last[rows, blocks.slots][keep]
    previous_ids, labels, eval_mask = blocks.previous_ids[keep], blocks.labels[keep], blocks.eval_mask[keep]
    compared = compare_blocks(
        drafter,
        hidden,
        previous_ids,
        target_hidden,
        labels,
        eval_mask,
        weights,
        None if states.normaliser is None else states.normaliser[rows, blocks.slots][keep],
        chunk_size,
    )
    return dspark_loss(
        compared,
        drafter.confidence_logits(hidden, drafter.embed_previous(previous_ids)),
        eval_mask,
        weights,
        total_weight=total_weight,
        processes=processes,
    )


__all__ = ["BlockObjective", "blockwise_loss"]
