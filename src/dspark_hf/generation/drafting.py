"""Drafting: one parallel pass over the block, then one token after the other through the sequential head.

Shape symbols: `batch` rows that still generate, `k` drafted tokens, `new` context positions since the last draft, `m`
captured layers, `d` the hidden size, `vocab`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import pad

from .. import _compat
from ..models import DSparkDrafter
from .inference import ForwardMode, forward_mode, is_altered
from .processing import ScoreProcessors
from .verification import draw

if TYPE_CHECKING:
    from typing_extensions import Self


class GoesOn(Protocol):
    """Says whether a draft goes on.

    Attributes:
        sure: tokens of each row that are drafted without asking.
    """

    sure: int

    def __call__(self, confidences: list[list[float]]) -> bool:
        """Whether to draft the next token, given its confidence in each row, after those not given before."""


@dataclass
class Proposal:
    """Drafted tokens of one round.

    Attributes:
        ids: `(batch, k)`.
        probs: `(batch, k, vocab)`, the processed distributions that `ids` were drawn from; `None` when greedy.
        confidences: `(batch, k)`, on the CPU: how likely each token is to be kept if those before it are; `None` where
            nothing asks for them. Those of the confidence head, calibrated where the drafter is; without such a head
            the largest probability of the distribution that the token was drawn from, which does not depend on it.
        confidence_logits: `(batch, k)`, raw; `None` without a confidence head, or where nothing asks for them.
    """

    ids: torch.Tensor
    probs: torch.Tensor | None
    confidences: torch.Tensor | None = None
    confidence_logits: torch.Tensor | None = None

    def first(self, length: int) -> Proposal:
        """The first `length` tokens. Ids and distributions are cut together, else the bonus token would be biased."""
        return Proposal(self.ids[:, :length], None if self.probs is None else self.probs[:, :length])


class NoDrafts:
    """Drafts nothing: plain decoding in the loop of speculative decoding; the base of `DraftSession`.

    Args:
        device: where proposals are.
        do_sample: whether tokens are sampled; greedy otherwise.
    """

    def __init__(self, device: torch.device, do_sample: bool) -> None:
        self.device, self.do_sample = device, do_sample

    def add_context(self, states: torch.Tensor, positions: torch.Tensor) -> None:
        """Takes captured target states `(batch, new, m * d)` at `positions (batch, new)`, -1 where there is no text.

        Every accepted position must pass here once, in order, also those of rounds without a draft.
        """

    def keep(self, rows: list[int]) -> None:
        """Goes on with some rows of the batch."""

    def join(self, other: Self) -> None:
        """Takes in the rows of a session that has not drafted yet, after its own."""

    def draft(
        self, active: list[int], anchor_ids: torch.Tensor, count: int, goes_on: GoesOn | None = None
    ) -> Proposal:
        """Drafts `count` tokens for each of the `active` rows, whose last tokens are `anchor_ids (batch,)`.

        Args:
            active: the rows.
            anchor_ids: see above.
            count: most tokens to draft, at least 1.
            goes_on: ends the draft before a token, but not before the first. The drafter must have a confidence head.
        """
        return self.nothing(len(active))

    def nothing(self, batch: int) -> Proposal:
        """A proposal without tokens."""
        # As no token is looked up in them, the distributions need no vocabulary.
        probs = torch.empty(batch, 0, 0, device=self.device) if self.do_sample else None
        return Proposal(torch.empty(batch, 0, dtype=torch.long, device=self.device), probs)


class DraftSession(NoDrafts):
    """Drafts for a batch of rows, keeping the drafter's view of their context up to date.

    The drafter's cache holds each row's context at its right end, with padding before it.

    Args:
        drafter: a drafter bound to its target.
        processors: the logits processors of the call, applied to the draft distribution too.
        do_sample: whether tokens are sampled; greedy otherwise.
        wants_confidences: whether proposals come with confidences.
    """

    def __init__(
        self, drafter: DSparkDrafter, processors: ScoreProcessors, do_sample: bool, wants_confidences: bool = False
    ) -> None:
        super().__init__(drafter.device, do_sample)
        self.drafter = drafter
        self.processors = processors
        self.wants_confidences = wants_confidences
        self.cache = drafter.make_cache()
        # Processors of the user may keep what they are given, and so may hooks on the target's head.
        may_keep = processors.needs_ids or any(map(is_altered, drafter.target_modules))
        self._mode: ForwardMode = torch.no_grad if may_keep else forward_mode(drafter, self.cache)
        # Text positions of the cache's columns, -1 for padding.
        self._positions: torch.Tensor | None = None
        self._new_states: list[torch.Tensor] = []
        self._new_positions: list[torch.Tensor] = []

    def add_context(self, states: torch.Tensor, positions: torch.Tensor) -> None:
        self._new_states.append(states)
        self._new_positions.append(positions)

    def keep(self, rows: list[int]) -> None:
        self._new_states = [states[rows] for states in self._new_states]
        self._new_positions = [positions[rows] for positions in self._new_positions]
        self.cache.batch_select_indices(torch.tensor(rows, device=self.drafter.device))
        if self._positions is not None:
            self._positions = self._positions[rows]

    def join(self, other: Self) -> None:
        pending = [self._pending(), other._pending()]
        width = max(positions.shape[1] for _, positions in pending)
        pads = [(width - positions.shape[1], 0) for _, positions in pending]
        self._new_states = [
            torch.cat([pad(states, (0, 0, *left)) for (states, _), left in zip(pending, pads, strict=True)])
        ]
        self._new_positions = [
            torch.cat([pad(positions, left, value=-1) for (_, positions), left in zip(pending, pads, strict=True)])
        ]
        if self._positions is not None:
            rows = len(self._new_positions[0]) - len(self._positions)
            self._positions = pad(self._positions, (0, 0, 0, rows), value=-1)
            _compat.add_cache_rows(self.cache, rows)

    def _pending(self) -> tuple[torch.Tensor, torch.Tensor]:
        """States and positions that are not in the cache yet, without columns that are padding in all rows.

        While nothing is drafted, rows that have left would leave ever more of these behind.
        """
        states, positions = torch.cat(self._new_states, dim=1), torch.cat(self._new_positions, dim=1)
        columns = _text_columns(positions)
        return states.gather(1, columns[..., None].expand(-1, -1, states.shape[2])), positions.gather(1, columns)

    def draft(
        self, active: list[int], anchor_ids: torch.Tensor, count: int, goes_on: GoesOn | None = None
    ) -> Proposal:
        with self._mode():
            return self._draft(active, anchor_ids, count, goes_on)

    def _draft(self, active: list[int], anchor_ids: torch.Tensor, count: int, goes_on: GoesOn | None) -> Proposal:
        hidden, base_logits = self._parallel_stage(anchor_ids[:, None])
        ids, state = [anchor_ids.to(hidden.device)], None
        probs: list[torch.Tensor] = []
        drafts: list[list[int]] = [[] for _ in active]
        self.processors.begin()
        asked: list[list[float]] = []
        embeddings: list[torch.Tensor | None] = []
        for position in range(count):
            own, embedding = hidden[:, position], self.drafter.embed_previous(ids[-1])
            embeddings.append(embedding)
            if goes_on is not None and position >= goes_on.sure:
                new = self._new_confidences(hidden, embeddings, len(asked))
                asked += new
                if not goes_on(new) and position:
                    break
            logits, state = self.drafter.draft_step(base_logits[:, position], own, embedding, state)
            if position and self.processors.needs_ids:
                for draft, token in zip(drafts, ids[-1].tolist(), strict=True):
                    draft.append(token)
            next_ids, next_probs = self._choose(active, drafts, logits)
            ids.append(next_ids)
            if next_probs is not None:
                probs.append(next_probs)
        path = torch.stack(ids, dim=1)
        proposal = Proposal(path[:, 1:], torch.stack(probs, dim=1) if self.do_sample else None)
        if goes_on is not None:
            proposal.confidences = torch.tensor(asked[: len(ids) - 1]).T if asked else None
        elif self.wants_confidences:
            proposal.confidence_logits, proposal.confidences = self._confidences(
                hidden[:, :count], path[:, :-1], probs
            )
        return proposal

    def _new_confidences(
        self, hidden: torch.Tensor, embeddings: list[torch.Tensor | None], first: int
    ) -> list[list[float]]:
        """Confidences of drafted tokens, in each row, from the `first` to the next one, before that is drawn.

        Args:
            hidden: `(batch, block, d)`.
            embeddings: `(batch, r)` of the token before each, up to the next one.
            first: see above.
        """
        previous = None if embeddings[0] is None else torch.stack(embeddings[first:], dim=1)
        logits = self.drafter.confidence_logits(hidden[:, first : len(embeddings)], previous)
        columns = [[]] * (len(embeddings) - first) if logits is None else logits.T.tolist()
        temperatures = self.drafter.config.confidence_temperatures or [1.0] * len(embeddings)
        # Written with tanh, which does not overflow. Where the logits are NaN nothing is expected to survive.
        sigmoids = (
            [0.5 + 0.5 * math.tanh(logit / (2.0 * temperature)) for logit in column]
            for column, temperature in zip(columns, temperatures[first:], strict=False)
        )
        return [[0.0 if math.isnan(each) else each for each in column] for column in sigmoids]

    def _confidences(
        self, hidden: torch.Tensor, previous_ids: torch.Tensor, probs: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Raw logits, `None` without a head, and confidences on the CPU, both `(batch, k)`; see `Proposal`."""
        logits = self.drafter.confidence_logits(hidden, self.drafter.embed_previous(previous_ids))
        confidences = (
            torch.stack([each.amax(dim=-1) for each in probs], dim=1)
            if logits is None
            else self.drafter.confidence_probs(logits)
        )
        return logits, confidences.nan_to_num().cpu()

    def _parallel_stage(self, anchor_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states `(batch, block, d)` and base logits `(batch, block, vocab)` after the anchors `(batch, 1)`."""
        states = torch.cat(self._new_states, dim=1)
        new = torch.cat(self._new_positions, dim=1)
        self._new_states, self._new_positions = [], []
        context = new if self._positions is None else torch.cat([self._positions, new], dim=1)
        steps = torch.arange(1, self.drafter.config.block_size + 1, device=new.device)
        block = context.amax(dim=1, keepdim=True) + steps
        has_padding = bool((context < 0).any())
        output = self.drafter(
            self.drafter.block_input_ids(anchor_ids),
            states,
            torch.cat([new.clamp(min=0), block], dim=1),
            attention_mask=self.drafter.block_masks(context, block) if has_padding else None,
            cache=self.cache,
        )
        self._positions = self._without_gaps(context) if has_padding else context
        return output.last_hidden_state, output.logits

    def _without_gaps(self, positions: torch.Tensor) -> torch.Tensor:
        """Moves padding among the cache's columns to the left and drops what is padding in all rows."""
        columns = _text_columns(positions)
        rows = torch.arange(len(positions), device=positions.device)
        _compat.realign_cache(self.cache, rows, columns, positions.shape[1])
        return positions.gather(1, columns)

    def _choose(
        self, active: list[int], drafts: list[list[int]], logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Next ids `(batch,)` and the distribution `(batch, vocab)` that they come from, `None` if nobody needs it."""
        own = self.drafter.over_vocabulary(logits.float())
        is_reduced = self.drafter.d2t is not None
        # Processors may change what they are given; without a reduced vocabulary nobody looks at it again.
        given = own[:, None].clone() if is_reduced else own[:, None]
        scores = self.processors.process(active, drafts, len(drafts[0]), given).squeeze(1)
        if is_reduced:
            # Processors may leave nothing of the draft vocabulary, or not bear -inf: any draft will do then.
            scores = scores.where(scores.amax(dim=-1, keepdim=True).isfinite(), own)
        needs_probs = self.do_sample or (self.wants_confidences and self.drafter.confidence_head is None)
        probs = torch.softmax(scores, dim=-1) if needs_probs else None
        if probs is None or not self.do_sample:
            return scores.argmax(dim=-1), probs
        # What is no distribution is found when it is verified.
        return draw(probs), probs


def _text_columns(positions: torch.Tensor) -> torch.Tensor:
    """Order of the columns of `positions (batch, n)` with padding (-1) first, without what is padding in all rows."""
    is_text = positions >= 0
    longest = int(is_text.sum(dim=1).max())
    return is_text.to(torch.int8).argsort(dim=1, stable=True)[:, -longest:]


__all__ = ["DraftSession", "NoDrafts", "Proposal"]
