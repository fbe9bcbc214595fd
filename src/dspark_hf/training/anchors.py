"""Anchors and the blocks that start at them.

A training sequence is drafted from many places at once: each sampled anchor starts a block of its own, and all blocks
of a sequence go through the drafter in a row, kept apart by an attention mask.

Shape symbols: `batch`, `seq` tokens of a training sequence, `blocks` anchors per sequence, `block` the block size γ,
`width` tokens of a block given to the drafter (γ, or γ + 1 where the anchor's slot predicts nothing), `queries` =
blocks * width, `keys` = seq + queries.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


@dataclass
class Anchors:
    """Where the blocks of a batch start.

    Args:
        positions: `(batch, blocks)`, rising in each row; 0 in the dummy entries at the end of a row with fewer.
        keep: `(batch, blocks)`, boolean, false for dummies.
    """

    positions: torch.Tensor
    keep: torch.Tensor


@dataclass
class Blocks:
    """What the drafter and the loss need of the blocks at some anchors.

    Slot k of the block at anchor p predicts the token at p + k + 1, as the target does from its state at p + k. Where
    the anchor's slot predicts, it is that at position p + k, which embeds the anchor (k = 0) or a mask token; else it
    is the mask token one further on.

    Args:
        input_ids: `(batch, queries)`, the anchor and mask tokens of each block.
        position_ids: `(batch, keys)`, positions of the sequence, then of the blocks.
        slots: `(batch, blocks, block)`, the position p + k of each slot, cut off at the end of the sequence.
        previous_ids: `(batch, blocks, block)`, the token at p + k (teacher forcing).
        labels: `(batch, blocks, block)`, the token that each slot predicts.
        eval_mask: `(batch, blocks, block)`, boolean, the slots that count: those whose labels up to there lie inside
            the sequence and the loss mask. Always false in dummies.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    previous_ids: torch.Tensor
    labels: torch.Tensor
    eval_mask: torch.Tensor


def anchor_candidates(loss_mask: torch.Tensor) -> torch.Tensor:
    """Valid anchors: `loss_mask (batch, seq)` to booleans `(batch, seq - 1)`.

    The token and the one after it must be in the loss mask.
    """
    mask = loss_mask.bool()
    return mask[:, :-1] & mask[:, 1:]


def row_seed(seed: int, step: int, input_ids: torch.Tensor) -> int:
    """Seed of one row, from the run's seed, the step and the row's tokens `(n,)`.

    It does not depend on the process, the place in the batch or the padding, so that a resumed run, or one on another
    number of processes, draws the same anchors.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/".encode(), digest_size=8)
    digest.update(input_ids.to(device="cpu", dtype=torch.int64).numpy().tobytes())
    # `torch.Generator` takes signed 64-bit seeds.
    return int.from_bytes(digest.digest(), "little") >> 1


def sample_anchors(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    num_anchors: int,
    seed: int,
    step: int,
) -> Anchors:
    """Draws up to `num_anchors` anchors per row, without replacement.

    Args:
        input_ids: `(batch, seq)`, padded on the right.
        attention_mask: `(batch, seq)`, 0 at padding.
        loss_mask: `(batch, seq)`, 1 where a token is trained on.
        num_anchors: the most anchors in a row.
        seed: the run's seed.
        step: the training step, so that another epoch draws other anchors.

    Returns:
        `Anchors` with as many columns as the row with the most anchors has (at least one), on the device of
        `input_ids`.
    """
    device = input_ids.device
    input_ids, attention_mask = input_ids.cpu(), attention_mask.cpu().bool()
    candidates = anchor_candidates(loss_mask.cpu().bool() & attention_mask)
    rows = []
    for ids, real, valid in zip(input_ids, attention_mask, candidates, strict=True):
        found = valid.nonzero().squeeze(-1)
        generator = torch.Generator().manual_seed(row_seed(seed, step, ids[real]))
        chosen = torch.randperm(found.numel(), generator=generator)[:num_anchors]
        rows.append(found[chosen].sort().values)
    width = max(1, *(row.numel() for row in rows))
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    keep = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        positions[index, : row.numel()] = row
        keep[index, : row.numel()] = True
    return Anchors(positions.to(device), keep.to(device))


def evaluation_mask(anchors: Anchors, loss_mask: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots that count, `(batch, blocks, block)`; see `Blocks`. `loss_mask (batch, seq)` must be 0 at padding."""
    seq = loss_mask.shape[1]
    targets = anchors.positions.unsqueeze(-1) + torch.arange(1, block_size + 1, device=loss_mask.device)
    allowed = gather_positions(loss_mask.bool(), targets.clamp(max=seq - 1))
    valid = allowed & (targets < seq) & anchors.keep.unsqueeze(-1)
    return valid.int().cumprod(dim=-1).bool()


def make_blocks(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: Anchors,
    block_size: int,
    mask_token_id: int,
    width: int | None = None,
) -> Blocks:
    """The blocks at `anchors` of `input_ids (batch, seq)`; `loss_mask (batch, seq)` must be 0 at padding.

    `width` is `block_size` if unset.
    """
    batch, seq = input_ids.shape
    given = anchors.positions.unsqueeze(-1) + torch.arange(width or block_size, device=input_ids.device)
    positions = given[..., :block_size]
    slots = positions.clamp(max=seq - 1)
    previous_ids = gather_positions(input_ids, slots)
    block_ids = torch.full_like(given, mask_token_id)
    block_ids[..., 0] = previous_ids[..., 0].masked_fill(~anchors.keep, mask_token_id)
    sequence_positions = torch.arange(seq, device=input_ids.device).expand(batch, -1)
    return Blocks(
        input_ids=block_ids.flatten(1),
        position_ids=torch.cat([sequence_positions, given.flatten(1)], dim=1),
        slots=slots,
        previous_ids=previous_ids,
        labels=gather_positions(input_ids, (positions + 1).clamp(max=seq - 1)),
        eval_mask=evaluation_mask(anchors, loss_mask, block_size),
    )


def block_attention_mask(anchors: Anchors, seq: int, width: int, sliding_window: int | None = None) -> torch.Tensor:
    """Boolean mask `(batch, 1, queries, keys)`: a block sees the context strictly before its anchor, and itself.

    Dummies see themselves too, since a row of attention that allows nothing gives NaN. A `sliding_window` hides keys
    that are so many positions or more before the query.
    """
    device = anchors.positions.device
    blocks = anchors.positions.shape[1]
    context = torch.arange(seq, device=device)
    sees_context = (context < anchors.positions.unsqueeze(-1)) & anchors.keep.unsqueeze(-1)
    mask = sees_context.repeat_interleave(width, dim=1)
    owner = torch.arange(blocks, device=device).repeat_interleave(width)
    sees_block = (owner[:, None] == owner).expand(len(mask), -1, -1)
    if sliding_window is not None:
        offsets = torch.arange(width, device=device)
        queries = (anchors.positions.unsqueeze(-1) + offsets).flatten(1)
        mask = mask & (queries.unsqueeze(-1) - context < sliding_window)
        slots = offsets.repeat(blocks)
        sees_block = sees_block & (slots[:, None] - slots < sliding_window)
    return torch.cat([mask, sees_block], dim=-1).unsqueeze(1)


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`values (batch, seq)` at `positions (batch, blocks, block)`, in the shape of `positions`."""
    return values.gather(1, positions.flatten(1)).view_as(positions)


__all__ = [
    "Anchors",
    "Blocks",
    "anchor_candidates",
    "block_attention_mask",
    "evaluation_mask",
    "gather_positions",
    "make_blocks",
    "row_seed",
    "sample_anchors",
]
