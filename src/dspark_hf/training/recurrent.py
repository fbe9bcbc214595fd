"""Training of recurrent drafters (EAGLE-3, multi-token prediction): as they draft, from every position at once.

In the training-time test of EAGLE-3 each position of a sequence drafts `block_size` tokens. At the first step it reads
the target's features, at each later one the features that the drafter itself gave it in the step before; the tokens
are those of the text all along. Step s (counted from 0) at position t reads the token at t + 1 + s and predicts the
one at t + 2 + s, as the target does from its state at t + 1 + s.

Shape symbols: `batch`, `seq` tokens of a training sequence, `steps` the drafter's block size, `m` captured layers, `d`
the hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import pad

from ..models import Drafter, RecurrentDrafter
from ..models.backbone import masks_by_layer_type
from .arguments import DSparkTrainingArguments
from .losses import DSparkLoss, LossWeights, compare_blocks, dspark_loss
from .objective import Batch, Objective, padded_mask
from .target_states import TargetStates


class RecurrentObjective(Objective):
    """Base of the losses of recurrent drafters: a cross entropy at every step of the training-time test."""

    drafter: RecurrentDrafter

    @property
    def steps(self) -> int:
        """Tokens that each position drafts."""
        return self.drafter.config.block_size

    def used(self, batch: Batch) -> torch.Tensor:
        """See the base class."""
        eval_mask = self.eval_mask(batch)
        seq = eval_mask.shape[1]
        return torch.stack([pad(eval_mask[..., step], (step + 1, 0))[:, :seq] for step in range(self.steps)]).any(
            dim=0
        )

    def labels(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        """The token that each step predicts, `(batch, seq, steps)`; `None` for the soft cross entropy."""
        raise NotImplementedError

    def loss(
        self,
        model: nn.Module,
        batch: Batch,
        states: TargetStates,
        total_weight: torch.Tensor | None = None,
        processes: int | None = None,
    ) -> DSparkLoss:
        """See the base class."""
        input_ids, eval_mask = batch["input_ids"], self.eval_mask(batch)
        labels = self.labels(input_ids)

        def at_slots(values: torch.Tensor) -> torch.Tensor:
            return torch.stack([ahead(values, step + 1) for step in range(self.steps)], dim=2).flatten(0, 1)

        compared = compare_blocks(
            self.drafter,
            training_time_test(model, self.drafter, input_ids, states.context).flatten(0, 1),
            None,
            at_slots(states.last),
            None if labels is None else labels.flatten(0, 1),
            eval_mask.flatten(0, 1),
            self.weights,
            None if states.normaliser is None else states.normaliser.map(at_slots),
            self.chunk_size,
        )
        return dspark_loss(
            compared, None, eval_mask.flatten(0, 1), self.weights, total_weight=total_weight, processes=processes
        )


class Eagle3Objective(RecurrentObjective):
    """The loss of EAGLE-3 as DeepSpec and SpecForge compute it.

    The loss of a step is the soft cross entropy between the target's distribution and the drafter's, averaged over the
    positions that count; that of a batch is the sum of its steps, with weights `step_loss_decay ** s`. Position t
    counts at step s where the token at t + s is in the loss mask and the one at t + 1 + s, behind which the target
    speaks, is in the sequence. All steps have one average in common: of a text that is trained on from its start the
    last steps count a few positions less. The reference divides by all positions instead, also those that do not
    count.

    A drafter of a reduced vocabulary learns the target's distribution renormalised over it, and nothing where the
    target's likeliest token is not in it; see `compare_distributions`.
    """

    arguments = ("step_loss_decay",)

    def __init__(self, drafter: Drafter, args: DSparkTrainingArguments) -> None:
        super().__init__(drafter, args)
        factors = [args.step_loss_decay**step for step in range(self.steps)]
        decay = None if args.step_loss_decay == 1 else -1 / math.log(args.step_loss_decay)
        # A sum over the steps, not their mean.
        self.weights = LossWeights(ce=sum(factors), tv=0.0, confidence=0.0, decay=decay)

    def labels(self, input_ids: torch.Tensor) -> None:
        """See the base class."""

    def eval_mask(self, batch: Batch) -> torch.Tensor:
        """See the base class; `(batch, seq, steps)`."""
        trained, is_text = padded_mask(batch), batch["attention_mask"].bool()
        counted = [ahead(trained, step) & ahead(is_text, step + 1) for step in range(self.steps)]
        return torch.stack(counted, dim=-1)


class MTPObjective(RecurrentObjective):
    """The loss of multi-token prediction (DeepSeek-V3 technical report, 2024, equations 24 and 25).

    Each step has the cross entropy of the token at t + 2 + s, given the state at t and the token at t + 1 + s; the
    loss is the mean over the steps. The report's modules are one for each step and are trained together with the
    target, with a factor λ; here one module is used again at every step, and the target is frozen, so that a factor
    would change nothing. Position t counts at step s where the predicted token is in the loss mask.
    """

    def __init__(self, drafter: Drafter, args: DSparkTrainingArguments) -> None:
        super().__init__(drafter, args)
        self.weights = LossWeights(ce=1.0, tv=0.0, confidence=0.0, decay=None)

    def labels(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return torch.stack([ahead(input_ids, step + 2) for step in range(self.steps)], dim=-1)

    def eval_mask(self, batch: Batch) -> torch.Tensor:
        """See the base class; `(batch, seq, steps)`."""
        trained = padded_mask(batch)
        return torch.stack([ahead(trained, step + 2) for step in range(self.steps)], dim=-1)


def training_time_test(
    model: nn.Module, drafter: RecurrentDrafter, input_ids: torch.Tensor, target_states: torch.Tensor
) -> torch.Tensor:
    """Drafts from every position of a batch of sequences, with the tokens known.

    A position sees the first step's keys and values of those before it and its own of all steps. Where a step would
    read a token past the end of the sequence its state means nothing.

    Args:
        model: `drafter`, or its wrapper in distributed training, whose forward must be the one that is called.
        drafter: bound to the target.
        input_ids: `(batch, seq)`, padded on the right.
        target_states: `(batch, seq, m * d)`, of the captured layers.

    Returns:
        `(batch, seq, steps, d)`, states after the final norm.
    """
    batch, seq = input_ids.shape
    positions = torch.arange(seq, device=input_ids.device)[None]
    cache = drafter.make_cache()
    allowed = torch.ones(1, seq, seq, dtype=torch.bool, device=input_ids.device).tril()
    own = torch.eye(seq, dtype=torch.bool, device=input_ids.device)[None]
    keys = positions
    features: torch.Tensor | None = None
    hidden = []
    for step in range(drafter.config.block_size):
        if step > 0:
            allowed, keys = torch.cat([allowed, own], dim=2), torch.cat([keys, positions + step], dim=1)
        output = model(
            input_ids=ahead(input_ids, step + 1),
            features=features,
            position_ids=(positions + step).expand(batch, -1),
            attention_mask=masks_by_layer_type(allowed, keys, positions + step, drafter.config.sliding_window),
            cache=cache,
            compute_logits=False,
            target_states=target_states if step == 0 else None,
        )
        features = output.features
        hidden.append(output.last_hidden_state)
    return torch.stack(hidden, dim=2)


def ahead(values: torch.Tensor, count: int) -> torch.Tensor:
    """`values (batch, seq, ...)` of the positions `count` further on; zeros (false) past the end."""
    seq = values.shape[1]
    padding = (0, 0) * (values.dim() - 2) + (0, count)
    return pad(values, padding)[:, count : count + seq]


__all__ = ["Eagle3Objective", "MTPObjective", "RecurrentObjective", "ahead", "training_time_test"]
