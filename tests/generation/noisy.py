"""A drafter that knows the text and gets some of it wrong, other tokens in other rows."""

from __future__ import annotations

import torch

from dspark_hf import DSparkConfig, DSparkDrafter, DSparkOutput, get_drafter


class NoisyCopy(DSparkDrafter):
    """Proposes the continuation of whichever of `texts` has the anchor at its position, wrong at every third token of
    the first text, every fourth of the second, and so on.

    It knows rows by what they say, so that it does not rely on the order in which generation keeps them.
    """

    texts: list[list[int]]

    def follow(self, texts: list[list[int]]) -> NoisyCopy:
        """`texts` are the whole rows without padding."""
        self.texts = texts
        return self

    def forward(self, input_ids, target_states, position_ids, attention_mask=None, cache=None, compute_logits=True):
        batch, block = input_ids.shape
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        assert target_states.shape == (batch, position_ids.shape[1] - block, width)
        assert not target_states.isnan().any()
        anchors = zip(position_ids[:, -block].tolist(), input_ids[:, 0].tolist(), strict=True)
        ids = torch.tensor([self._proposal(position, token, block) for position, token in anchors])
        logits = 30.0 * torch.nn.functional.one_hot(ids, self.config.vocab_size).to(self.device, self.dtype)
        hidden = torch.zeros(batch, block, self.config.hidden_size, device=self.device, dtype=self.dtype)
        return DSparkOutput(last_hidden_state=hidden, logits=logits)

    def _proposal(self, position: int, anchor: int, block: int) -> list[int]:
        for row, text in enumerate(self.texts):
            if position < len(text) and text[position] == anchor:
                right = (text[position + 1 :] + [0] * block)[:block]
                wrong = [(position + 1 + slot + 2 * row) % (3 + row) == 0 for slot in range(block)]
                return [(token + miss) % self.config.vocab_size for token, miss in zip(right, wrong, strict=True)]
        return [0] * block


def make_noisy_copy(target, **fields) -> NoisyCopy:
    """A noisy copy without heads for `target`."""
    config = DSparkConfig(block_size=4, num_hidden_layers=1, markov_rank=0, enable_confidence_head=False, **fields)
    drafter = get_drafter(target, config)
    drafter.__class__ = NoisyCopy
    return drafter


class Batch:
    """Prompts of several lengths, as one left-padded batch."""

    def __init__(self, lengths: tuple[int, ...], vocab_size: int, pad_id: int = 0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.prompts = [torch.randint(5, vocab_size - 20, (length,), generator=generator) for length in lengths]
        self.width = max(lengths)
        self.padding = [self.width - length for length in lengths]
        padded = [torch.nn.functional.pad(ids, (self.width - len(ids), 0), value=-1) for ids in self.prompts]
        self.attention_mask = (torch.stack(padded) >= 0).long()
        self.input_ids = torch.stack(padded).masked_fill(self.attention_mask == 0, pad_id)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    def without_padding(self, sequences: torch.Tensor) -> list[list[int]]:
        return [row[padding:] for row, padding in zip(sequences.tolist(), self.padding, strict=True)]
