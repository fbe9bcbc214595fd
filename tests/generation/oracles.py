"""Drafters whose proposals are known in advance, which also watch how generation feeds them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark_hf import DSparkConfig, DSparkDrafter, DSparkOutput, get_drafter


class OracleDrafter(DSparkDrafter):
    """Proposes the continuation that it was told, wrong where it was told to be.

    It raises `AssertionError` if generation breaks its contract with a drafter: every accepted position is given
    exactly once and in order, the block follows it directly, starts with the anchor and holds masks after it.
    """

    def follow(self, sequence: list[int], is_wrong: Callable[[int], bool]) -> OracleDrafter:
        """`sequence` is the whole text with the prompt; `is_wrong(position)` tells which tokens to get wrong."""
        self.sequence, self.is_wrong = sequence, is_wrong
        return self

    def make_cache(self):
        self.seen = 0
        return super().make_cache()

    def forward(self, input_ids, target_states, position_ids, attention_mask=None, cache=None, compute_logits=True):
        block = self.config.block_size
        new = target_states.shape[1]
        assert position_ids[0].tolist() == list(range(self.seen, self.seen + new + block))
        assert target_states.shape[2] == len(self.config.target_layer_ids) * self.config.hidden_size
        assert not target_states.isnan().any()
        self.seen += new
        anchor = self.seen
        assert input_ids[0].tolist() == [self.sequence[anchor], *[self.config.mask_token_id] * (block - 1)]
        logits = torch.zeros(1, block, self.config.vocab_size)
        for slot in range(block):
            position = anchor + 1 + slot
            token = self.sequence[position] if position < len(self.sequence) else 0
            if self.is_wrong(position):
                token = (token + 1) % self.config.vocab_size
            logits[0, slot, token] = 30.0
        return DSparkOutput(last_hidden_state=torch.zeros(1, block, self.config.hidden_size), logits=logits)


def make_oracle(target, block_size: int = 4) -> OracleDrafter:
    """An oracle without heads for `target`."""
    config = DSparkConfig(block_size=block_size, num_hidden_layers=1, markov_rank=0, enable_confidence_head=False)
    drafter = get_drafter(target, config)
    drafter.__class__ = OracleDrafter
    return drafter
