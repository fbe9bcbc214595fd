"""Drafters whose proposals are known in advance, which also watch how generation feeds them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicCache

from dspark_hf import DSparkConfig, DSparkDrafter, DSparkOutput, get_drafter


class RowsCache(DynamicCache):
    """A cache that knows which rows of the call it still holds."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.rows = rows

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self.rows = [self.rows[index] for index in indices.tolist()]


class OracleDrafter(DSparkDrafter):
    """Proposes the continuations that it was told, wrong where it was told to be.

    It raises `AssertionError` if generation breaks its contract with a drafter: every accepted position of a row is
    given exactly once, the block follows it directly, starts with the anchor and holds masks after it.

    Attributes:
        seen: per block the row, the anchor's position, and the hidden states `(block, d)` that a real drafter of these
            weights has there.
    """

    def follow(self, sequence: list[int], is_wrong: Callable[[int], bool]) -> OracleDrafter:
        """`sequence` is the whole text with the prompt; `is_wrong(position)` tells which tokens to get wrong."""
        return self.follow_rows([sequence], lambda _, position: is_wrong(position))

    def follow_rows(self, sequences: list[list[int]], is_wrong: Callable[[int, int], bool]) -> OracleDrafter:
        """One text per row, without padding, and `is_wrong(row, position)`."""
        self.sequences, self.is_wrong = sequences, is_wrong
        self.seen: list[tuple[int, int, torch.Tensor]] = []
        return self

    def make_cache(self):
        return RowsCache(list(range(len(self.sequences))))

    def forward(self, input_ids, target_states, position_ids, attention_mask=None, cache=None, compute_logits=True):
        block = self.config.block_size
        assert target_states.shape[2] == len(self.config.target_layer_ids) * self.config.hidden_size
        assert not target_states.isnan().any()
        output = super().forward(input_ids, target_states, position_ids, attention_mask, cache, compute_logits=False)
        logits = torch.zeros(len(cache.rows), block, self.config.vocab_size)
        for index, row in enumerate(cache.rows):
            sequence, anchor = self.sequences[row], int(position_ids[index, -block])
            assert position_ids[index, -block:].tolist() == list(range(anchor, anchor + block))
            keys = cache.get_seq_length() if attention_mask is None else None
            context = keys if keys is not None else int(attention_mask["full_attention"][index, 0, 0].sum()) - block
            assert context == anchor, f"row {row} has {context} positions of context before position {anchor}"
            assert input_ids[index].tolist() == [sequence[anchor], *[self.config.mask_token_id] * (block - 1)]
            self.seen.append((row, anchor, output.last_hidden_state[index]))
            for slot in range(block):
                position = anchor + 1 + slot
                token = sequence[position] if position < len(sequence) else 0
                if self.is_wrong(row, position):
                    token = (token + 1) % self.config.vocab_size
                logits[index, slot, token] = 30.0
        return DSparkOutput(last_hidden_state=output.last_hidden_state, logits=logits)


def make_oracle(target, block_size: int = 4, **fields) -> OracleDrafter:
    """An oracle without heads for `target`; `fields` are further fields of its config."""
    fields = {"num_hidden_layers": 1, "markov_rank": 0, "enable_confidence_head": False} | fields
    drafter = get_drafter(target, DSparkConfig(block_size=block_size, **fields))
    drafter.__class__ = OracleDrafter
    return drafter


@torch.no_grad()
def hidden_states_of_solo_run(target, drafter, sequence: list[int], anchor: int) -> torch.Tensor:
    """Hidden states `(block, d)` of the block at `anchor`, with nothing cached and no other row."""
    ids = torch.tensor([sequence[:anchor]])
    states = target(ids, output_hidden_states=True).hidden_states
    states = torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)
    positions = torch.arange(anchor + drafter.config.block_size)[None]
    blocks = drafter.block_input_ids(torch.tensor([[sequence[anchor]]]))
    return DSparkDrafter.forward(drafter, blocks, states, positions, compute_logits=False).last_hidden_state[0]
