"""The draft vocabulary: those of the target's tokens that a drafter predicts, where it does not predict them all.

It is stored as EAGLE-3 drafters store it (SpecForge, speculators, vLLM), in two tables. `d2t (draft_vocab,)` holds
offsets: draft index i stands for the target's token `i + d2t[i]`. `t2d (vocab,)` is true for tokens that have a draft
index. Draft indices rise with the tokens, so either table follows from the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn


def make_tables(
    token_ids: Iterable[int], draft_vocab_size: int | None, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`d2t` and `t2d` of the draft vocabulary `token_ids`.

    Raises:
        ValueError: if these are not `draft_vocab_size` different tokens of a vocabulary of `vocab_size`.
    """
    ids = sorted({int(token) for token in token_ids})
    if len(ids) != draft_vocab_size:
        raise ValueError(
            f"The draft tokens are {len(ids)} different ones but `draft_vocab_size` is {draft_vocab_size}; give as "
            "many as that."
        )
    if ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(
            f"The draft tokens go from {ids[0]} to {ids[-1]}; the target's tokens are 0 to {vocab_size - 1}."
        )
    tokens = torch.tensor(ids, device="cpu")
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    t2d[tokens] = True
    return tokens - torch.arange(len(ids), device="cpu"), t2d


def check_tables(d2t: torch.Tensor, t2d: torch.Tensor, name: str) -> None:
    """Raises `OSError` where the tables of the checkpoint `name` do not belong together."""
    if not torch.equal(t2d.nonzero().squeeze(1), d2t + torch.arange(len(d2t), device=d2t.device)):
        raise OSError(
            f"The drafter {name} has tables `d2t` and `t2d` that name different tokens. `d2t` must hold offsets "
            "(token minus draft index, tokens rising) and `t2d` be true for these tokens; take both from the "
            "original checkpoint."
        )


class HeadRows:
    """The rows of a target's LM head that belong to the draft vocabulary.

    They are gathered once, and again when the head, its weights or the tables are others than before. What they were
    gathered from is not kept alive, and copies of a drafter do not take them along.
    """

    def __init__(self) -> None:
        self._rows: nn.Linear | None = None
        self._sources: list[tuple[weakref.ref[torch.Tensor], int, int]] = []

    def __reduce__(self) -> tuple[type[HeadRows], tuple[()]]:
        return HeadRows, ()

    def of(self, head: nn.Module, d2t: torch.Tensor) -> nn.Linear | None:
        """A head over the draft vocabulary; `None` where rows cannot be gathered (quantised, offloaded, sharded)."""
        if not (type(head) is nn.Linear and type(head.weight) is nn.Parameter and _is_whole(head)):
            return None
        if not self._is_current(head.weight, d2t):
            # Not an inference tensor, which training could not use.
            with torch.inference_mode(False), torch.no_grad():
                self._rows = _gather(head, d2t)
            self._sources = [(weakref.ref(tensor), *_stamp(tensor)) for tensor in (head.weight, d2t)]
        return self._rows

    def _is_current(self, *tensors: torch.Tensor) -> bool:
        return len(self._sources) == len(tensors) and all(
            source() is tensor and (pointer, version) == _stamp(tensor)
            for (source, pointer, version), tensor in zip(self._sources, tensors, strict=True)
        )


def _is_whole(head: nn.Linear) -> bool:
    return not head.weight.is_meta and head.weight.shape == (head.out_features, head.in_features)


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when the tensor is moved, replaced or written to."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _gather(head: nn.Linear, d2t: torch.Tensor) -> nn.Linear:
    ids = (d2t + torch.arange(len(d2t), device=d2t.device)).to(head.weight.device)
    rows = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    rows.load_state_dict({name: tensor[ids] for name, tensor in head.state_dict().items()}, assign=True)
    return rows.requires_grad_(False)


__all__ = ["HeadRows", "check_tables", "make_tables"]
