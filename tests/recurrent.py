"""Recurrent drafters for tests: with random weights, or with proposals that are known in advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from dspark_hf import Eagle3Config, Eagle3Drafter, MTPConfig, MTPDrafter, get_drafter
from dspark_hf._compat import captured_states
from dspark_hf.models import RecurrentDrafter

KINDS: dict[str, Any] = {"eagle3": Eagle3Config, "mtp": MTPConfig}
"""Configurations of the recurrent drafters by name."""


def make_recurrent(target: PreTrainedModel, kind: str, draft_tokens: Any = None, **fields: Any) -> RecurrentDrafter:
    """A drafter whose every weight is random, so that nothing is hidden by a zero or a one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = KINDS[kind](**{"block_size": 4, **fields})
        drafter = get_drafter(target, config, draft_tokens=draft_tokens)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return drafter


class RecurrentOracle(RecurrentDrafter):
    """Proposes the continuations that it was told, wrong where it was told to be.

    It raises `AssertionError` if generation breaks its contract with a drafter: every accepted position of a row is
    read once, together with the token after it, in order and up to the anchor; drafted tokens follow, and see what
    was read and what was drafted before them, nothing else.

    It knows rows by what they say, so that it does not rely on the order in which generation keeps them.

    Attributes:
        seen: per draft the row, the anchor's position, and the features `(d,)` that a real drafter of these weights
            has there.
    """

    def follow(self, texts: list[list[int]], is_wrong: Callable[[int, int], bool]) -> RecurrentOracle:
        """`texts` are the whole rows without padding; `is_wrong(row, position)` tells which tokens to get wrong."""
        self.texts, self.is_wrong = texts, is_wrong
        self.seen: list[tuple[int, int, torch.Tensor]] = []
        self.rows: list[int] = []
        self.reads_context = False
        return self

    def fuse(self, target_states):
        self.reads_context = True
        assert not target_states.isnan().any()
        return super().fuse(target_states)

    def advance(self, input_ids, features, position_ids, attention_mask, cache):
        logits, features = super().advance(input_ids, features, position_ids, attention_mask, cache)
        batch, length = input_ids.shape
        # What the last position sees of the keys, of which the given ones come last.
        visible = torch.ones(batch, cache.get_seq_length(), dtype=torch.bool)
        if attention_mask is not None:
            visible = attention_mask["full_attention"][:, 0, -1].expand_as(visible)
        ends = position_ids[:, -1]
        assert visible.sum(dim=1).tolist() == (ends + 1).tolist(), f"{visible} is seen from {ends}"
        if self.reads_context:
            self.rows = [
                self._row_of(ids[is_text].tolist(), positions[is_text].tolist())
                for ids, positions, is_text in zip(input_ids, position_ids, visible[:, -length:], strict=True)
            ]
            self.seen += [
                (row, int(end) + 1, feature) for row, end, feature in zip(self.rows, ends, features[:, 0], strict=True)
            ]
        self.reads_context = False
        ids = torch.tensor([self._proposal(row, int(end) + 2) for row, end in zip(self.rows, ends, strict=True)])
        return 30.0 * torch.nn.functional.one_hot(ids, self.config.vocab_size).float(), features

    def _row_of(self, ids: list[int], positions: list[int]) -> int:
        """The row that has these tokens behind these positions."""
        assert positions == list(range(positions[0], positions[-1] + 1)), f"positions are {positions}"
        text = dict(zip(positions, ids, strict=True))
        for row, known in enumerate(self.texts):
            if all(position + 1 < len(known) and known[position + 1] == token for position, token in text.items()):
                return row
        raise AssertionError(f"no text has {text}")

    def _proposal(self, row: int, position: int) -> int:
        text = self.texts[row]
        token = text[position] if position < len(text) else 0
        return (token + self.is_wrong(row, position)) % self.config.vocab_size


class Eagle3Oracle(RecurrentOracle, Eagle3Drafter):
    """An oracle in the shape of an EAGLE-3 drafter."""


class MTPOracle(RecurrentOracle, MTPDrafter):
    """An oracle in the shape of an MTP drafter."""


def make_recurrent_oracle(target: PreTrainedModel, kind: str, **fields: Any) -> RecurrentOracle:
    """An oracle for `target`; `fields` are fields of its config."""
    drafter: Any = make_recurrent(target, kind, **fields)
    drafter.__class__ = {"eagle3": Eagle3Oracle, "mtp": MTPOracle}[kind]
    return drafter


@torch.no_grad()
def features_of_solo_run(target: PreTrainedModel, drafter: Any, text: list[int], anchor: int) -> torch.Tensor:
    """Features `(d,)` right before the anchor, with nothing cached and no other row."""
    outputs = target(torch.tensor([text[:anchor]]), output_hidden_states=True)
    states = captured_states(outputs.hidden_states, drafter.config.target_layer_ids)
    real = type(drafter).__mro__[2] if isinstance(drafter, RecurrentOracle) else type(drafter)
    features = real.fuse(drafter, states)
    following = torch.tensor([text[1 : anchor + 1]])
    return real.forward(drafter, following, features, torch.arange(anchor)[None]).features[0, -1]
