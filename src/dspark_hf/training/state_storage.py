"""How target states are stored: as they are, in half the bytes, or in a quarter.

Shape symbols: `n` tokens of an example, `parts` = m + 1 states of a token (the m captured layers, then the last), `d`
the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

STORAGES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
"""What a value is stored as; `int8` has a float32 scale for each state beside it."""

# What the header of a safetensors file says of one tensor; measured, and only matters where examples are tiny.
_HEADER_BYTES = 90
_INT8_LIMIT = 127


@dataclass(frozen=True)
class Layout:
    """The shape of stored states, and what they cost.

    Args:
        storage: one of `STORAGES`.
        parts: states of a token.
        hidden_size: values of a state.
        normalisers: whether there is a `Normaliser` beside them, whose two numbers are kept in full.
    """

    storage: str
    parts: int
    hidden_size: int
    normalisers: bool = False

    def bytes_of(self, tokens: int, examples: int = 1) -> int:
        """Bytes on disk of so many examples with so many tokens in all."""
        scale_bytes = torch.float32.itemsize if self.storage == "int8" else 0
        token_bytes = self.parts * (self.hidden_size * STORAGES[self.storage].itemsize + scale_bytes)
        tensors = 2 if scale_bytes else 1
        if self.normalisers:
            token_bytes += torch.float32.itemsize + torch.int32.itemsize
            tensors += 2
        return tokens * token_bytes + examples * tensors * _HEADER_BYTES

    def shards(self, lengths: Sequence[int], limit: float) -> Iterator[range]:
        """Examples of `lengths` tokens in shards of at most `limit` bytes; a longer example has one of its own."""
        start, filled = 0, 0
        for index, length in enumerate(lengths):
            size = self.bytes_of(length)
            if index > start and filled + size > limit:
                yield range(start, index)
                start, filled = index, 0
            filled += size
        yield range(start, len(lengths))


def pack(states: torch.Tensor, storage: str) -> dict[str, torch.Tensor]:
    """The tensors that `states (n, parts, d)` are stored as.

    In `int8` each state of a token is scaled by its own largest value: layers differ in size by orders of magnitude,
    and so do tokens. An error is at most half the scale.
    """
    if storage != "int8":
        return {"states": states.to(STORAGES[storage])}
    scales = states.float().abs().amax(dim=-1) / _INT8_LIMIT
    values = states.float() / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return {"states": values.round().to(torch.int8), "scales": scales}


def unpack(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """States `(n, parts, d)` in `dtype` from what `pack` gave."""
    states = tensors["states"]
    if "scales" in tensors:
        states = states.float() * tensors["scales"].unsqueeze(-1)
    return states.to(dtype)


__all__ = ["STORAGES", "Layout", "pack", "unpack"]
