from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf.training.anchors import (
    Anchors,
    anchor_candidates,
    block_attention_mask,
    make_blocks,
    row_seed,
    sample_anchors,
)

MASKS = st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4)


def draw(ids: torch.Tensor, mask: torch.Tensor, num_anchors: int = 4, seed: int = 0, step: int = 0) -> Anchors:
    return sample_anchors(ids, torch.ones_like(ids), mask, num_anchors, seed, step)


@settings(max_examples=50)
@given(MASKS, st.integers(1, 10))
def test_anchors_are_valid_distinct_and_as_many_as_there_can_be(masks: list[list[bool]], num_anchors: int) -> None:
    mask = torch.tensor(masks)
    ids = torch.arange(mask.numel()).view_as(mask)
    anchors = draw(ids, mask, num_anchors)
    candidates = anchor_candidates(mask)
    counts = candidates.sum(1).clamp(max=num_anchors)
    assert torch.equal(anchors.keep.sum(1), counts)
    assert anchors.positions.shape[1] == max(1, int(counts.max())), "no block is computed for nothing"
    for positions, keep, valid in zip(anchors.positions, anchors.keep, candidates):
        kept = positions[keep].tolist()
        assert kept == sorted(set(kept)) and all(valid[position] for position in kept)
        assert not positions[~keep].any() and keep.tolist() == sorted(keep.tolist(), reverse=True)


def test_seed_depends_on_the_row_and_the_step_only() -> None:
    ids, mask = torch.arange(60).view(2, 30), torch.ones(2, 30)
    anchors = draw(ids, mask)
    assert torch.equal(draw(ids.flip(0), mask).positions, anchors.positions.flip(0))
    padded = torch.nn.functional.pad(ids, (0, 7))
    real = torch.nn.functional.pad(torch.ones_like(ids), (0, 7))
    assert torch.equal(sample_anchors(padded, real, real, 4, 0, 0).positions, anchors.positions)
    torch.rand(3)  # the global generator has no part in it
    assert torch.equal(draw(ids, mask).positions, anchors.positions)
    for other in (draw(ids, mask, seed=1), draw(ids, mask, step=1)):
        assert not torch.equal(other.positions, anchors.positions)
    assert row_seed(1, 23, ids[0]) != row_seed(12, 3, ids[0])


def test_padding_is_never_an_anchor() -> None:
    ids, mask = torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8)
    real = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]])
    assert sample_anchors(ids, real, mask, 8, 0, 0).positions.tolist() == [[0, 1, 2]]


def test_blocks_by_hand() -> None:
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    mask = torch.tensor([[0, 1, 1, 1, 0, 1]])
    anchors = Anchors(torch.tensor([[1, 2, 0]]), torch.tensor([[True, True, False]]))
    blocks = make_blocks(ids, mask, anchors, block_size=4, mask_token_id=99)
    assert blocks.input_ids.tolist() == [[11, 99, 99, 99, 12, 99, 99, 99, 99, 99, 99, 99]]
    assert blocks.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 2, 3, 4, 5, 0, 1, 2, 3]
    assert blocks.previous_ids[0, :2].tolist() == [[11, 12, 13, 14], [12, 13, 14, 15]]
    assert blocks.labels[0, :2].tolist() == [[12, 13, 14, 15], [13, 14, 15, 15]]
    # Token 14 is not trained on, and nothing after it counts, though token 15 is.
    assert blocks.eval_mask[0].int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_attention_mask_by_hand() -> None:
    anchors = Anchors(torch.tensor([[2, 0]]), torch.tensor([[True, False]]))
    mask = block_attention_mask(anchors, seq=4, width=2)
    assert mask.shape == (1, 1, 4, 8)
    assert mask[0, 0].int().tolist() == [
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1],
    ]


def test_sliding_window_hides_what_generation_hides() -> None:
    anchors = Anchors(torch.tensor([[3]]), torch.tensor([[True]]))
    mask = block_attention_mask(anchors, seq=4, width=3, sliding_window=2)
    # Queries at 3, 4, 5; context at 0, 1, 2; the block at 3, 4, 5.
    assert mask[0, 0].int().tolist() == [
        [0, 0, 1, 0, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 0, 1, 1],
    ]
