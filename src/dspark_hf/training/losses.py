"""What drafters are trained on: draft and target distributions compared, and what is measured beside it.

The loss of the DSpark paper (equations 8 to 12), of which those of other drafters are cases. For each slot k of a
block, with draft distribution `p^d_k` and target distribution `p^t_k`:

    L = α_ce · CE_k  +  α_tv · ‖p^d_k - p^t_k‖_1  +  α_conf · BCE(c_k, 1 - ½‖p^d_k - p^t_k‖_1)

each averaged with weights `w_k = exp(-(k-1)/γ_decay)` over all slots that count, of all processes and of all batches
that make one optimiser step. The label of the confidence is detached. The cross entropy is that of the training token,
or a soft one, `-Σ_v p^t_k(v) log p^d_k(v)`.

A drafter with a vocabulary of its own gives every other token the probability 0. The target's probabilities are those
over its whole vocabulary, so that `1 - ½‖p^d_k - p^t_k‖_1 = Σ_v min(p^d_k(v), p^t_k(v))` stays the chance that a
drafted token is accepted. A slot whose token the drafter cannot predict has no cross entropy. For the soft one, as in
EAGLE-3 and SpecForge, the target's probabilities are renormalised over the draft vocabulary, and that token is the
target's likeliest.

Logits are large, so they exist for a chunk of slots at a time: the gradients of the first two terms are formed next to
their values, in the forward pass, and the backward pass only scales them. Nothing is computed twice.

Shape symbols: `...` any leading shape, `n` blocks, `block` the block size, `slots` the slots that count, `d` the
hidden size, `r` the Markov rank, `vocab` the target's vocabulary, `draft_vocab` the tokens that the drafter predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..models import Drafter, DSparkDrafter
from ..models.heads_dspark import VanillaMarkovHead
from .normaliser import Normaliser, normalise

# MiB for logits and what is computed from them, where nothing else is said.
LOSS_MEMORY = 512.0
# Of a slot as many float32 vectors over the vocabulary live at once: draft and target logits and probabilities, and
# one more while a soft cap is applied or a sum is taken.
VECTORS_PER_SLOT = 5
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
class Comparison:
    """Draft and target distributions, compared at each slot.

    Args:
        loss: `Σ_k w_k (α_ce CE_k + α_tv ‖p^d_k - p^t_k‖_1)`, a scalar; gradients flow through it alone.
        ce: `(..., block)`, cross entropies, hard or soft, 0 where the drafter cannot predict the token; detached.
        distance: `(..., block)`, L1 distances; detached.

    Slots that do not count hold zeros.
    """

    loss: torch.Tensor
    ce: torch.Tensor
    distance: torch.Tensor


@dataclass
class DSparkLoss:
    """Loss of a batch.

    Args:
        loss: the scalar to call `backward` on; multiplied by the number of processes, whose gradients are averaged.
        terms: `ce_loss_num`, `ce_loss_den` and the like, detached numerators and denominators of this batch.
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
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    log_sum: torch.Tensor | None = None,
    is_known: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cross entropy and L1 distance of distributions given as logits, and their gradient.

    With draft probabilities q, target probabilities p, label y and weights a, b of the two, the gradient of
    `a CE + b ‖q - p‖_1` to the draft logits is `a (q - 1_y) + b q ⊙ (s - <s, q>)` where `s = sign(q - p)`; that of the
    soft cross entropy has p, renormalised over the draft vocabulary, in place of `1_y`. Autograd follows none of this.

    Args:
        draft_logits: `(..., draft_vocab)`.
        target_logits: `(..., draft_vocab)`.
        labels: `(...)`, the token after each slot, as a draft index; `None` for the soft cross entropy.
        log_sum: `(...)`, of the target over its whole vocabulary (`Normaliser`); `None` where that is the drafter's.
        is_known: `(...)`, whether the drafter predicts the target's likeliest token; `None` where it predicts all.
        weights: `(2, ...)`, `a` and `b`; `None` if no gradient is wanted.

    Returns:
        Float32 cross entropies `(...)` and distances `(...)`, and the gradient `(..., draft_vocab)` or `None`.
    """
    # Each of these is as large as the logits, so they are written over as soon as they have served.
    log_q = torch.log_softmax(draft_logits.detach(), dim=-1, dtype=torch.float32)
    if log_sum is None:
        p = torch.softmax(target_logits.detach(), dim=-1, dtype=torch.float32)
        outside = torch.zeros_like(p[..., 0])
    else:
        p = (target_logits.detach() - log_sum.unsqueeze(-1)).exp_()
        outside = (1 - p.sum(dim=-1)).clamp(min=0)
    del target_logits
    known = torch.ones_like(outside) if is_known is None else is_known.float()
    # What the target's probabilities are multiplied with, so that those of the draft vocabulary sum up to 1.
    share = known / (1 - outside).clamp(min=EPSILON)
    if labels is None:
        ce = -share * (p * log_q).sum(dim=-1)
    else:
        ce = -log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    q = log_q.exp_()
    difference = p.sub_(q)
    distance = difference.abs().sum(dim=-1) + outside
    if weights is None:
        return ce, distance, None
    a, b = weights.unsqueeze(-1)
    if labels is None:
        # p is gone, but for its difference from q.
        soft, a = difference * (a * share.unsqueeze(-1)), a * (known - share).unsqueeze(-1)
    minus_sq = difference.sign_().mul_(q)
    gradient = q.mul_(a + b * minus_sq.sum(dim=-1, keepdim=True)).addcmul_(minus_sq, b, value=-1)
    if labels is None:
        gradient.sub_(soft)
    else:
        gradient.scatter_add_(-1, labels.unsqueeze(-1), -a)
    return ce, distance, gradient.to(draft_logits.dtype)


def compare_blocks(
    drafter: Drafter,
    hidden: torch.Tensor,
    previous_ids: torch.Tensor | None,
    target_hidden: torch.Tensor,
    labels: torch.Tensor | None,
    eval_mask: torch.Tensor,
    weights: LossWeights,
    normaliser: Normaliser | None = None,
    chunk_size: int | None = None,
) -> Comparison:
    """Compares drafter and target at every slot that counts, with the logits of only a chunk of slots in memory.

    The drafter is trained, with an LM head of its own if that requires gradients; the target never is.

    Args:
        drafter: bound to its target.
        hidden: `(n, block, d)`, the drafter's states after its final norm.
        previous_ids: `(n, block)`, tokens before each slot, for a sequential head; not needed without one.
        target_hidden: `(n, block, d)`, the target's final states, after its norm, that predict the slots' tokens.
        labels: `(n, block)`, tokens after each slot; `None` for the soft cross entropy.
        eval_mask: `(n, block)`, the slots that count.
        weights: weights of the loss.
        normaliser: `(n, block)`, the target's at the slots that count, for a drafter with a reduced vocabulary;
            computed here where it is not given.
        chunk_size: slots per chunk, by default as many as fit in `LOSS_MEMORY`.
    """
    head = drafter.markov_head if isinstance(drafter, DSparkDrafter) else None
    counted = eval_mask.nonzero(as_tuple=True)
    inputs = [hidden[counted]]
    if head is not None:
        if previous_ids is None:
            raise ValueError("`previous_ids` is None; the drafter has a sequential head, which needs them.")
        # A recurrent head goes through whole blocks; its features are small, what they are projected to is not.
        inputs.append(head.features(head.embed(previous_ids), hidden)[counted])
    slots = slot_weights(eval_mask, weights.decay)[counted]
    indices, is_known = None, torch.ones_like(slots)
    if labels is not None:
        indices, is_known = _draft_indices(drafter, labels[counted])
    last = target_hidden[counted]
    if drafter.d2t is None:
        normaliser = None
    elif normaliser is not None:
        normaliser = normaliser[counted]
    else:
        normaliser = normalise(drafter.target_logits, last, slots_within(LOSS_MEMORY, drafter.config.vocab_size))
    chunks = _Chunks(
        drafter,
        head,
        inputs,
        last,
        normaliser,
        indices,
        torch.stack([weights.ce * slots * is_known, weights.tv * slots]),
        chunk_size or slots_within(LOSS_MEMORY, compared_vocab_size(drafter)),
    )
    if torch.is_grad_enabled():
        loss, terms = _FormedGradients.apply(chunks.score_with_gradients, *inputs, *chunks.parameters)
    else:
        loss, terms = chunks.score()
    ce, distance = terms.new_zeros(2, *eval_mask.shape)
    ce[counted], distance[counted] = terms[0] * is_known, terms[1]
    return Comparison(loss, ce, distance)


def slots_within(memory: float, vocab_size: int) -> int:
    """Slots, at least one, whose logits and what is computed from them take `memory` MiB."""
    return max(1, int(memory * 2**20 / (VECTORS_PER_SLOT * 4 * vocab_size)))


def compared_vocab_size(drafter: Drafter) -> int:
    """Logits of a slot that are in memory while `drafter`, bound to its target, is compared with it."""
    return drafter.config.predicted_vocab_size if drafter.spares_head else drafter.config.vocab_size


def _draft_indices(drafter: Drafter, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft indices `(slots,)` of `labels (slots,)`, and whether they have one; any index if not."""
    if drafter.d2t is None:
        return labels, torch.ones_like(labels, dtype=torch.bool)
    ids = drafter.draft_ids
    indices = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    return indices, ids[indices] == labels


@dataclass
class _Chunks:
    """The slots that count, scored chunk by chunk.

    Args:
        drafter: bound to its target.
        head: its sequential head, if it has one.
        inputs: hidden states `(slots, d)` and, with a sequential head, its features `(slots, r)`.
        target_hidden: `(slots, d)`.
        normaliser: `(slots,)`, `None` without a reduced vocabulary.
        labels: `(slots,)`, draft indices, or `None`.
        weights: `(2, slots)`, those of cross entropy and distance.
        size: slots per chunk, at most.
    """

    drafter: Drafter
    head: VanillaMarkovHead | None
    inputs: list[torch.Tensor]
    target_hidden: torch.Tensor
    normaliser: Normaliser | None
    labels: torch.Tensor | None
    weights: torch.Tensor
    size: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained of the drafter between `inputs` and its logits."""
        modules = [self.drafter.lm_head, None if self.head is None else self.head.markov_w2]
        return [each for module in modules if module is not None for each in module.parameters() if each.requires_grad]

    def score(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and cross entropies and distances `(2, slots)`."""
        terms = torch.zeros_like(self.weights)
        for rows in self:
            logits = self._draft_logits(*(tensor[rows] for tensor in self.inputs))
            terms[0, rows], terms[1, rows], _ = self._compare(logits, rows)
        return (self.weights * terms).sum(), terms

    def score_with_gradients(self) -> tuple[tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
        """The same, and gradients of the loss to `inputs` and `parameters`, like them in shape and dtype."""
        terms = torch.zeros_like(self.weights)
        of_inputs = [torch.zeros_like(tensor) for tensor in self.inputs]
        # Many chunks are added up: too many for half precision.
        of_parameters = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in self.parameters]
        for rows in self:
            self._add_chunk(rows, terms, of_inputs, of_parameters)
        gradients = [total.to(like.dtype) for total, like in zip(of_parameters, self.parameters, strict=True)]
        return ((self.weights * terms).sum(), terms), [*of_inputs, *gradients]

    def _add_chunk(
        self,
        rows: slice,
        terms: torch.Tensor,
        of_inputs: list[torch.Tensor],
        of_parameters: list[torch.Tensor],
    ) -> None:
        """One chunk of `score_with_gradients`; what is large in it ends with this call."""
        leaves = [tensor[rows].detach().requires_grad_() for tensor in self.inputs]
        with torch.enable_grad():
            logits = self._draft_logits(*leaves)
        terms[0, rows], terms[1, rows], gradient = self._compare(logits, rows, self.weights[:, rows])
        parts = torch.autograd.grad(logits, [*leaves, *self.parameters], gradient)
        for total, part in zip(of_inputs, parts):
            total[rows] = part
        for total, part in zip(of_parameters, parts[len(leaves) :], strict=True):
            total += part

    def __iter__(self) -> Iterator[slice]:
        """Rows of each chunk; chunks are of about the same size."""
        count = len(self.target_hidden)
        step = max(1, math.ceil(count / max(1, math.ceil(count / self.size))))
        return (slice(start, start + step) for start in range(0, count, step))

    def _draft_logits(self, hidden: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        base = self.drafter.project(hidden)
        return base if self.head is None else base + self.head.bias(*features)

    def _compare(
        self, draft_logits: torch.Tensor, rows: slice, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        labels = None if self.labels is None else self.labels[rows]
        log_sum = is_known = None
        if self.normaliser is not None and self.drafter.t2d is not None:
            own = self.normaliser[rows]
            log_sum, is_known = own.log_sum, self.drafter.t2d[own.likeliest]
        # Handed on without a name here, so that the target's logits are dropped as soon as they have served.
        return compare_distributions(
            draft_logits,
            self.drafter.target_draft_logits(self.target_hidden[rows]),
            labels,
            log_sum,
            is_known,
            weights,
        )


class _FormedGradients(torch.autograd.Function):
    """A loss whose gradients are formed together with its value."""

    @staticmethod
    def forward(ctx: Any, score: Callable[[], Any], *trained: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`score` gives the loss with what was measured, and the loss's gradients to `trained`."""
        (loss, terms), gradients = score()
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(terms)
        return loss, terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        """Gradients to `trained`, by the chain rule."""
        return None, *(outer * gradient for gradient in ctx.saved_tensors)


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
    compared: Comparison,
    confidence_logits: torch.Tensor | None,
    eval_mask: torch.Tensor,
    weights: LossWeights,
    total_weight: torch.Tensor | None = None,
    processes: int | None = None,
) -> DSparkLoss:
    """Loss and metrics from what was compared at each slot.

    Args:
        compared: cross entropies and distances `(..., block)`, and their part of the loss.
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
    accept = (1 - compared.distance / 2).clamp(0, 1)
    loss, nums = compared.loss, {"ce_loss": (compared.ce * slots).sum()}
    if weights.tv > 0:
        nums["l1_loss"] = (compared.distance * slots).sum()
    if confidence_logits is not None:
        confidence_logits = confidence_logits.float()
        bce = nn.functional.binary_cross_entropy_with_logits(confidence_logits, accept, reduction="none")
        nums["confidence_loss"] = (bce * slots).sum()
        loss = loss + weights.confidence * nums["confidence_loss"]
    scale = (processes or world_size()) / (total_weight + EPSILON)
    terms = {}
    for name, num in nums.items():
        terms[f"{name}_num"], terms[f"{name}_den"] = num.detach(), local
    sums: Sums = {name: (num.detach(), local) for name, num in nums.items()}
    sums["loss"] = (loss.detach(), local)
    sums.update(acceptance_sums(accept, eval_mask))
    if confidence_logits is not None:
        sums.update(confidence_sums(confidence_logits.detach().sigmoid(), accept, eval_mask, slots))
    return DSparkLoss(loss=loss * scale, terms=terms, sums=sums)


def acceptance_sums(accept: torch.Tensor, eval_mask: torch.Tensor) -> Sums:
    """Acceptance by slot, and the accepted length of a block with its bonus token (`tau_probabilistic`).

    `accept (..., block)` is the chance that a slot is accepted if all before it are; the length that is expected of a
    block is `1 + Σ_k Π_{i≤k} accept_i`, a mean over the blocks whose first slot counts.
    """
    mask = eval_mask.float()
    valid = (accept * mask).flatten(0, -2)
    counts = mask.flatten(0, -2).sum(dim=0)
    sums: Sums = {f"accept_rate@{k}": (valid[:, k].sum(), counts[k]) for k in range(valid.shape[-1])}
    begins = mask[..., 0].flatten()
    lengths = 1 + valid.cumprod(dim=-1).sum(dim=-1)
    sums["tau_probabilistic"] = ((lengths * begins).sum(), begins.sum())
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
    "LOSS_MEMORY",
    "Comparison",
    "DSparkLoss",
    "LossWeights",
    "Sums",
    "acceptance_sums",
    "compare_blocks",
    "compare_distributions",
    "compared_vocab_size",
    "confidence_sums",
    "dspark_loss",
    "slot_weights",
    "slots_within",
    "sum_over_processes",
    "world_size",
]
