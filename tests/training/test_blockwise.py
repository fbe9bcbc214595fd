"""Blocks in training are the blocks in generation, in both conventions of the anchor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.training import Anchors, block_attention_mask, compute_target_states, make_blocks

from ..tiny import tiny_prompt, tiny_target

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
}


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_and_generation_see_the_same(
    options: dict[str, Any], sample_from_anchor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block that `generate` drafts, against the block at the same anchor of the text that came out."""
    target = tiny_target()
    config = DSparkConfig(block_size=3, markov_rank=0, sample_from_anchor=sample_from_anchor, **options)
    drafter = get_drafter(target, config)
    width = drafter.config.block_width
    assert width == (3 if sample_from_anchor else 4)
    drafted: dict[int, torch.Tensor] = {}
    forward = drafter.forward

    def recorded(input_ids: torch.Tensor, states: Any, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = forward(input_ids, states, position_ids, **kwargs)
        drafted[int(position_ids[0, -width])] = output.last_hidden_state.clone()
        return output

    monkeypatch.setattr(drafter, "forward", recorded)
    prompt = tiny_prompt(6)
    text = target.generate(prompt, assistant_model=drafter, max_new_tokens=10, do_sample=False)
    monkeypatch.undo()
    assert min(drafted) == prompt.shape[1] and len(drafted) > 3

    anchors = Anchors(torch.tensor([sorted(drafted)]), torch.ones(1, len(drafted), dtype=torch.bool))
    everything = torch.ones_like(text)
    blocks = make_blocks(text, everything, anchors, 3, drafter.config.mask_token_id, width)
    states = compute_target_states(target, drafter.config.target_layer_ids, text, everything)
    masks = {
        layer_type: block_attention_mask(anchors, text.shape[1], width, window)
        for layer_type, window in {"full_attention": None, "sliding_attention": drafter.config.sliding_window}.items()
    }
    with torch.no_grad():
        hidden = drafter(blocks.input_ids, states.context, blocks.position_ids, masks).last_hidden_state
    for block, (_, expected) in zip(hidden.unflatten(1, (-1, 3))[0], sorted(drafted.items()), strict=True):
        torch.testing.assert_close(block, expected[0], atol=1e-5, rtol=1e-5)


def test_the_other_convention_by_hand() -> None:
    """One mask token more, one position more; what is predicted, and from which state of the target, is the same."""
    ids, mask = torch.tensor([[10, 11, 12, 13, 14, 15]]), torch.ones(1, 6)
    anchors = Anchors(torch.tensor([[1, 3]]), torch.tensor([[True, True]]))
    ours = make_blocks(ids, mask, anchors, block_size=2, mask_token_id=99)
    other = make_blocks(ids, mask, anchors, block_size=2, mask_token_id=99, width=3)
    assert other.input_ids.tolist() == [[11, 99, 99, 13, 99, 99]]
    assert other.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 1, 2, 3, 3, 4, 5]]
    for name in ("slots", "previous_ids", "labels", "eval_mask"):
        assert torch.equal(getattr(other, name), getattr(ours, name)), name
    assert other.labels.tolist() == [[[12, 13], [14, 15]]]
