"""Drafting: one parallel pass over the block, then one token after the other through the sequential head.

Shape symbols: `batch` rows that still generate, `k` drafted tokens, `new` context positions since the last draft, `m`
captured layers, `d` the hidden size, `vocab`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import _compat
from ..models import DSparkDrafter
from .processing import RowProcessors
from .settings import DecodingSettings
from .verification import leading_true, sample


@dataclass
class Proposal:
    """Drafted tokens of one round.

    Attributes:
        ids: `(batch, k)`.
        probs: `(batch, k, vocab)`, the processed distributions that `ids` were drawn from; `None` when greedy.
        confidence_logits: `(batch, k)`; `None` without a confidence head, or where no threshold asks for it.
    """

    ids: torch.Tensor
    probs: torch.Tensor | None
    confidence_logits: torch.Tensor | None

    def cut(self, length: int) -> Proposal:
        """The first `length` tokens. Ids and distributions are cut together, else the bonus token would be biased."""
        return Proposal(
            self.ids[:, :length],
            None if self.probs is None else self.probs[:, :length],
            None if self.confidence_logits is None else self.confidence_logits[:, :length],
        )


class DraftSession:
    """Drafts for a batch of rows, keeping the drafter's view of their context up to date.

    The drafter's cache holds each row's context at its right end, with padding before it.

    Args:
        drafter: a drafter bound to its target.
        processors: the logits processors of the call, applied to the draft distribution too.
        settings: the call's settings.
    """

    def __init__(self, drafter: DSparkDrafter, processors: RowProcessors, settings: DecodingSettings) -> None:
        self.drafter = drafter
        self.processors = processors
        self.settings = settings
        self.cache = drafter.make_cache()
        # Text positions of the cache's columns, -1 for padding.
        self._positions: torch.Tensor | None = None
        self._new_states: list[torch.Tensor] = []
        self._new_positions: list[torch.Tensor] = []

    def add_context(self, states: torch.Tensor, positions: torch.Tensor) -> None:
        """Takes captured target states `(batch, new, m * d)` at `positions (batch, new)`, -1 where there is no text.

        Every accepted position must pass here once, in order, also those of rounds without a draft.
        """
        self._new_states.append(states)
        self._new_positions.append(positions)

    def keep(self, rows: list[int]) -> None:
        """Goes on with some rows of the batch."""
        self._new_states = [states[rows] for states in self._new_states]
        self._new_positions = [positions[rows] for positions in self._new_positions]
        self.cache.batch_select_indices(torch.tensor(rows, device=self.drafter.device))
        if self._positions is not None:
            self._positions = self._positions[rows]

    def draft(self, active: list[int], anchor_ids: torch.Tensor, count: int) -> Proposal:
        """Drafts `count` tokens for each of the `active` rows, whose last tokens are `anchor_ids (batch,)`."""
        hidden, base_logits = self._parallel_stage(anchor_ids[:, None])
        ids, probs, state = [anchor_ids.to(hidden.device)], [], None
        drafts: list[list[int]] = [[] for _ in active]
        self.processors.begin()
        for position in range(count):
            logits, state = self.drafter.draft_step(base_logits[:, position], hidden[:, position], ids[-1], state)
            if position and self.processors.needs_ids:
                for draft, token in zip(drafts, ids[-1].tolist(), strict=True):
                    draft.append(token)
            next_ids, next_probs = self._choose(active, drafts, logits)
            ids.append(next_ids)
            if next_probs is not None:
                probs.append(next_probs)
        path = torch.stack(ids, dim=1)
        wants_confidence = self.settings.confidence_threshold > 0 or self.drafter.record_confidence
        return Proposal(
            ids=path[:, 1:],
            probs=torch.stack(probs, dim=1) if probs else None,
            confidence_logits=(
                self.drafter.confidence_logits(hidden[:, :count], path[:, :-1]) if wants_confidence else None
            ),
        )

    def nothing(self, batch: int) -> Proposal:
        """A proposal without tokens."""
        device, vocab = self.drafter.device, self.drafter.config.vocab_size
        probs = torch.empty(batch, 0, vocab, device=device) if self.settings.do_sample else None
        return Proposal(torch.empty(batch, 0, dtype=torch.long, device=device), probs, None)

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
        is_text = positions >= 0
        longest = int(is_text.sum(dim=1).max())
        columns = is_text.to(torch.int8).argsort(dim=1, stable=True)[:, -longest:]
        rows = torch.arange(len(positions), device=positions.device)
        _compat.realign_cache(self.cache, rows, columns, positions.shape[1])
        return positions.gather(1, columns)

    def _choose(
        self, active: list[int], drafts: list[list[int]], logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Next ids `(batch,)` and the distribution `(batch, vocab)` they come from, `None` when greedy."""
        scores = logits.to(torch.float32, copy=True)[:, None]
        scores = self.processors.process(active, drafts, len(drafts[0]), scores).squeeze(1)
        if not self.settings.do_sample:
            return scores.argmax(dim=-1), None
        probs = torch.softmax(scores, dim=-1)
        # What is no distribution is found when it is verified.
        return sample(probs).clamp(min=0), probs

    def confident_lengths(self, proposal: Proposal) -> list[int]:
        """For each row, the tokens of its proposal before the first whose confidence is below the threshold.

        A token's confidence never looks at the token itself, so the cut leaves the output's law unchanged.
        """
        batch, drafted = proposal.ids.shape
        if self.settings.confidence_threshold == 0 or proposal.confidence_logits is None:
            return [drafted] * batch
        confident = self.drafter.confidence_probs(proposal.confidence_logits) >= self.settings.confidence_threshold
        lengths: list[int] = leading_true(confident).tolist()
        return lengths


__all__ = ["DraftSession", "Proposal"]
