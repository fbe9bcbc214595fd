"""What a drafter with a reduced vocabulary needs to know of the rest of the target's.

Its loss compares probabilities over the target's whole vocabulary. Of those outside the draft vocabulary it only takes
the sum: with the logarithm of the sum over everything, the target's logits for the draft vocabulary are enough. That
logarithm belongs to a position of the text, whatever the drafter and the step: it is computed once for each position,
and may be kept with the states (`state_cache.py`). The LM head, most of a training step for a large vocabulary, then
runs for the draft vocabulary only.

Shape symbols: `...` any leading shape, `n` positions, `seq` tokens of a sequence, `d` the target's hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""The target's logits `(n, vocab)` for its last states `(n, d)`."""


@dataclass
class Normaliser:
    """Of the target's distribution at some positions.

    Args:
        log_sum: `(...)`, float32, `log Σ_v exp(logit_v)` over its whole vocabulary; NaN where it is not known.
        likeliest: `(...)`, the token with the largest logit.
    """

    log_sum: torch.Tensor
    likeliest: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Normaliser:
        """With both tensors changed in the same way."""
        return Normaliser(change(self.log_sum), change(self.likeliest))

    def __getitem__(self, index: Any) -> Normaliser:
        return self.map(lambda values: values[index])

    @classmethod
    def unknown(cls, *shape: int, device: torch.device | str | None = None) -> Normaliser:
        """One that knows of no position."""
        return cls(torch.full(shape, math.nan, device=device), torch.zeros(shape, dtype=torch.long, device=device))


@torch.no_grad()
def normalise(logits_of: LogitsOf, hidden: torch.Tensor, chunk_size: int) -> Normaliser:
    """The normaliser at positions with the last states `hidden (n, d)`, with logits of `chunk_size` in memory."""
    found = Normaliser.unknown(len(hidden), device=hidden.device)
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        logits = logits_of(hidden[rows]).float()
        found.log_sum[rows], found.likeliest[rows] = logits.logsumexp(dim=-1), logits.argmax(dim=-1)
    return found


def complete(
    known: Normaliser | None, used: torch.Tensor, logits_of: LogitsOf, last: torch.Tensor, chunk_size: int
) -> Normaliser:
    """A normaliser that knows all positions that are `used (batch, seq)`, each computed once at most.

    Args:
        known: what is known already, `(batch, seq)`.
        used: boolean.
        logits_of: see `LogitsOf`.
        last: `(batch, seq, d)`, the target's last states.
        chunk_size: see `normalise`.
    """
    known = known or Normaliser.unknown(*used.shape, device=used.device)
    missing = (used & known.log_sum.isnan()).nonzero(as_tuple=True)
    if len(missing[0]):
        found = normalise(logits_of, last[missing], chunk_size)
        known = known.map(torch.clone)
        known.log_sum[missing], known.likeliest[missing] = found.log_sum, found.likeliest
    return known


__all__ = ["LogitsOf", "Normaliser", "complete", "normalise"]
