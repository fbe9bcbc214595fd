"""Drafting: one parallel pass over the block, then one token after the other through the sequential head.

Shape symbols: `batch`, `k` drafted tokens, `new` context positions since the last draft, `m` captured layers, `d` the
hidden size, `vocab`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList

from ..models import DSparkDrafter
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
    """Drafts for one sequence, keeping the drafter's view of the context up to date.

    Args:
        drafter: a drafter bound to its target.
        processors: the logits processors of the call, applied to the draft distribution too.
        settings: the call's settings.
    """

    def __init__(self, drafter: DSparkDrafter, processors: LogitsProcessorList, settings: DecodingSettings) -> None:
        self.drafter = drafter
        self.processors = processors
        self.settings = settings
        self.cache = drafter.make_cache()
        self._new_states: list[torch.Tensor] = []
        self._new_positions: list[torch.Tensor] = []

    def add_context(self, states: torch.Tensor, positions: torch.Tensor) -> None:
        """Takes captured target states `(batch, new, m * d)` at `positions (batch, new)`.

        Every accepted position must pass here once, in order, also those of rounds without a draft.
        """
        self._new_states.append(states)
        self._new_positions.append(positions)

    def draft(self, sequence_ids: torch.Tensor, count: int) -> Proposal:
        """Drafts `count` tokens after `sequence_ids (batch, length)`, whose last token is the anchor."""
        hidden, base_logits = self._parallel_stage(sequence_ids[:, -1:])
        sequence_ids = sequence_ids.to(hidden.device)
        ids, probs, state = [sequence_ids[:, -1]], [], None
        for position in range(count):
            logits, state = self.drafter.draft_step(base_logits[:, position], hidden[:, position], ids[-1], state)
            if position and len(self.processors) > 0:
                sequence_ids = torch.cat([sequence_ids, ids[-1][:, None]], dim=1)
            next_ids, next_probs = self._choose(sequence_ids, logits)
            ids.append(next_ids)
            if next_probs is not None:
                probs.append(next_probs)
        path = torch.stack(ids, dim=1)
        wants_confidence = self.settings.confidence_threshold > 0
        return Proposal(
            ids=path[:, 1:],
            probs=torch.stack(probs, dim=1) if probs else None,
            confidence_logits=(
                self.drafter.confidence_logits(hidden[:, :count], path[:, :-1]) if wants_confidence else None
            ),
        )

    def _parallel_stage(self, anchor_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states `(batch, block, d)` and base logits `(batch, block, vocab)` after the anchors `(batch, 1)`."""
        states = torch.cat(self._new_states, dim=1)
        context_positions = torch.cat(self._new_positions, dim=1)
        self._new_states, self._new_positions = [], []
        block = torch.arange(1, self.drafter.config.block_size + 1, device=context_positions.device)
        output = self.drafter(
            self.drafter.block_input_ids(anchor_ids),
            states,
            torch.cat([context_positions, context_positions[:, -1:] + block], dim=1),
            cache=self.cache,
        )
        return output.last_hidden_state, output.logits

    def _choose(self, sequence_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Next ids `(batch,)` and the distribution `(batch, vocab)` they come from, `None` when greedy."""
        scores = self.processors(sequence_ids, logits.to(torch.float32, copy=True))
        if not self.settings.do_sample:
            return scores.argmax(dim=-1), None
        probs = torch.softmax(scores, dim=-1)
        return sample(probs), probs

    def confident_length(self, proposal: Proposal) -> int:
        """Tokens of a one-row proposal before the first whose confidence is below the threshold.

        A token's confidence never looks at the token itself, so the cut leaves the output's law unchanged.
        """
        if self.settings.confidence_threshold == 0 or proposal.confidence_logits is None:
            return proposal.ids.shape[1]
        confident = proposal.confidence_logits.sigmoid() >= self.settings.confidence_threshold
        return int(leading_true(confident).item())


def length_up_to_end(ids: torch.Tensor, eos_ids: torch.Tensor | None) -> int:
    """Tokens of `ids (1, k)` up to and with the first end of sequence; nothing after it could be kept."""
    if eos_ids is None or ids.shape[1] == 0:
        return ids.shape[1]
    before_end = ~torch.isin(ids[:, :-1], eos_ids.to(ids.device))
    return int(leading_true(before_end).item()) + 1
