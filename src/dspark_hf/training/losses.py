"""The loss of the DSpark paper (equations 8 to 12) and what is measured beside it.

For each slot k of a block, with draft distribution `p^d_k` and target distribution `p^t_k`:

    L = α_ce · CE_k  +  α_tv · ‖p^d_k - p^t_k‖_1  +  α_conf · BCE(c_k, 1 - ½‖p^d_k - p^t_k‖_1)

each averaged with weights `w_k = exp(-(k-1)/γ_decay)` over all slots that count, of all processes and of all batches
that make one optimiser step. The label of the confidence is detached.

Shape symbols: `...` any leading shape, `n` blocks, `block` the block size, `d` the hidden size and
`vocab` the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..models import DSparkDrafter

# Where no chunk size is given, a tensor of logits has at most this many elements: 1 GB in float32.
MAX_LOGITS = 2**28
# Keeps a batch without any slot that counts at a loss of 0.
EPSILON = 1e-6

Sums = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class LossWeights:
    """Weights of the loss; see `DSparkTrainingArguments`."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0


@dataclass
class DSparkLoss:
    """Loss of a batch.

    Args:
        loss: the scalar to call `backward` on; multiplied by the number of processes, whose gradients are averaged.
        terms: `ce_loss_num`, `ce_loss_den` and the like, numerators and denominators of this batch.
        sums: detached numerator and denominator of every metric, to be added up over batches and processes.
    """

    loss: torch.Tensor
    terms: dict[str, torch.Tensor]
    sums: Sums = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """Means of the metrics over this batch: `accept_rate@0`, ..., `tau_probabilistic`, `ce_loss`, ..."""
        return {name: num / den.clamp(min=EPSILON) for name, (num, den) in self.sums.items()}


# --- per slot --------------------------------------------------------------------------------------------------------


def compare_distributions(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, labels: torch.Tensor, tv_gradient: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy to `labels (...)` and L1 distance of two distributions given as logits `(..., vocab)`.

    Args:
        draft_logits: the drafter's.
        target_logits: the target's; no gradient flows into them.
        labels: the token after each slot.
        tv_gradient: whether the distance is trained on, not only measured.

    Returns:
        Two float32 tensors `(...)`.
    """
    draft = torch.log_softmax(draft_logits.float(), dim=-1)
    ce = -draft.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if not tv_gradient:
        draft = draft.detach()
    target = torch.softmax(target_logits.detach().float(), dim=-1)
    return ce, (draft.exp() - target).abs().sum(dim=-1)


def compare_blocks(
    drafter: DSparkDrafter,
    hidden: torch.Tensor,
    previous_ids: torch.Tensor,
    target_hidden: torch.Tensor,
    labels: torch.Tensor,
    tv_gradient: bool = True,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy and L1 distance of every slot, with only a chunk of the logits in memory.

    Logits of a chunk are dropped after the forward pass and computed again in the backward pass; one chunk that takes
    all blocks keeps them.

    Args:
        drafter: bound to its target.
        hidden: `(n, block, d)`, the backbone's output.
        previous_ids: `(n, block)`, tokens before each slot.
        target_hidden: `(n, block, d)`, the target's final states, after its norm, at each slot's position.
        labels: `(n, block)`, tokens after each slot.
        tv_gradient: see `compare_distributions`.
        chunk_size: slots per chunk, by default as many as keep the logits below `MAX_LOGITS`.

    Returns:
        Two float32 tensors `(n, block)`.
    """

    def compare(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, previous_ids, target_hidden, labels = parts
        draft_logits = drafter.sequential_logits(drafter.project(hidden), hidden, previous_ids)
        with torch.no_grad():
            target_logits = drafter.project(target_hidden)
        return compare_distributions(draft_logits, target_logits, labels, tv_gradient)

    if chunk_size is None:
        vocab_size: Any = drafter.config.vocab_size
        chunk_size = MAX_LOGITS // vocab_size
    blocks_per_chunk = max(1, chunk_size // hidden.shape[1])
    inputs = (hidden, previous_ids, target_hidden, labels)
    if len(hidden) <= blocks_per_chunk:
        return compare(*inputs)
    chunks = zip(*(tensor.split(blocks_per_chunk) for tensor in inputs), strict=True)
    outputs = [checkpoint(compare, *chunk, use_reentrant=False) for chunk in chunks]
    ce, distance = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return ce, distance


# --- sums over slots -------------------------------------------------------------------------------------------------


def slot_weights(eval_mask: torch.Tensor, decay: float | None) -> torch.Tensor:
    """Weights `w_k`: `eval_mask (..., block)` to float32 of the same shape, 0 where a slot does not count."""
    weights = eval_mask.float()
    if not decay:
        return weights
    return weights * torch.exp(-torch.arange(weights.shape[-1], device=weights.device) / decay)


def world_size() -> int:
    """Number of training processes."""
    return torch.distributed.get_world_size() if _is_distributed() else 1


def sum_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Sum of `values` over all processes, as a new tensor; every process must call it."""
    total = values.detach().clone()
    if _is_distributed():
        torch.distributed.all_reduce(total)
    return total


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def dspark_loss(
    ce: torch.Tensor,
    distance: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    eval_mask: torch.Tensor,
    weights: LossWeights,
    total_weight: torch.Tensor | None = None,
    processes: int | None = None,
) -> DSparkLoss:
    """Loss and metrics from what was compared at each slot.

    Args:
        ce: `(..., block)`, cross entropies.
        distance: `(..., block)`, L1 distances.
        confidence_logits: `(..., block)`, `None` without a confidence head.
        eval_mask: `(..., block)`, the slots that count.
        weights: weights of the terms.
        total_weight: sum of the slots' weights over everything that makes one step; by default the sum over this
            batch of every process, which then must all call this function.
        processes: the factor against averaged gradients, by default the number of processes.
    """
    slots = slot_weights(eval_mask, weights.decay)
    local = slots.sum()
    if total_weight is None:
        total_weight = sum_over_processes(local)
    accept = (1 - distance.detach() / 2).clamp(0, 1)
    parts = {"ce_loss": (weights.ce, ce), "l1_loss": (weights.tv, distance)}
    if weights.tv == 0:
        del parts["l1_loss"]
    if confidence_logits is not None:
        confidence_logits = confidence_logits.float()
        bce = nn.functional.binary_cross_entropy_with_logits(confidence_logits, accept, reduction="none")
        parts["confidence_loss"] = (weights.confidence, bce)
    nums = {name: (values * slots).sum() for name, (_, values) in parts.items()}
    scale = (processes or world_size()) / (total_weight + EPSILON)
    weighted = [weight * nums[name] for name, (weight, _) in parts.items()]
    terms = {}
    for name, num in nums.items():
        terms[f"{name}_num"], terms[f"{name}_den"] = num, local
    sums: Sums = {name: (num.detach(), local) for name, num in nums.items()}
    sums["loss"] = (torch.stack(weighted).sum().detach(), local)
    sums.update(acceptance_sums(accept, eval_mask))
    if confidence_logits is not None:
        sums.update(confidence_sums(confidence_logits.detach().sigmoid(), accept, eval_mask, slots))
    return DSparkLoss(loss=torch.stack(weighted).sum() * scale, terms=terms, sums=sums)


def acceptance_sums(accept: torch.Tensor, eval_mask: torch.Tensor) -> Sums:
    """Acceptance by slot, and the accepted length of a block with its bonus token (`tau_probabilistic`).

    `accept (..., block)` is the chance that a slot is accepted if all before it are; the length that is expected of a
    block is `1 + Σ_k Π_{i≤k} accept_i`.
    """
    mask = eval_mask.float()
    valid = (accept * mask).flatten(0, -2)
    counts = mask.flatten(0, -2).sum(dim=0)
    sums: Sums = {f"accept_rate@{k}": (valid[:, k].sum(), counts[k]) for k in range(valid.shape[-1])}
    has_slots = eval_mask.any(dim=-1).float().flatten()
    lengths = 1 + valid.cumprod(dim=-1).sum(dim=-1)
    sums["tau_probabilistic"] = ((lengths * has_slots).sum(), has_slots.sum())
    return sums


def confidence_sums(
    confidence: torch.Tensor, accept: torch.Tensor, eval_mask: torch.Tensor, slots: torch.Tensor
) -> Sums:
    """How far the confidence `(..., block)` is from the acceptance, slot by slot and as products over prefixes."""
    error = confidence - accept
    mask = eval_mask.float()
    prefix_error = (confidence * mask).cumprod(dim=-1) - (accept * mask).cumprod(dim=-1)
    total = slots.sum()
    return {
        "confidence_abs_error": ((error.abs() * slots).sum(), total),
        "confidence_bias": ((error * slots).sum(), total),
        "confidence_cumprod_bias": ((prefix_error * slots).sum(), total),
    }


__all__ = [
    "DSparkLoss",
    "LossWeights",
    "Sums",
    "acceptance_sums",
    "compare_blocks",
    "compare_distributions",
    "confidence_sums",
    "dspark_loss",
    "slot_weights",
    "sum_over_processes",
    "world_size",
]
