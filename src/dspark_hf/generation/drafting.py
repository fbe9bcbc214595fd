"""Drafting: token by token, from one parallel pass over the block or from a recurrent drafter's own steps.

Shape symbols: `batch` rows that still generate, `k` drafted tokens, `new` context positions since the last draft, `m`
captured layers, `d` the hidden size, `vocab`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from .. import _compat
from ..models import Drafter, DSparkDrafter, RecurrentDrafter
from .context import PendingContext
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


CONTEXT_PIECE = 1024
"""Positions of the context that a recurrent drafter reads at a time, so that masks over long prompts stay small."""


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

    def add_context(self, states: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        """Takes what the target has read: every accepted position once, in order, also in rounds without a draft.

        Args:
            states: `(batch, new, m * d)`, captured target states.
            positions: `(batch, new)`, text positions, -1 where there is no text.
            ids: `(batch, new)`, the tokens at these positions; for recurrent drafters.
        """

    def keep(self, rows: list[int]) -> None:
        """Goes on with some rows of the batch."""

    def join(self, others: Sequence[Self]) -> None:
        """Takes in the rows of sessions that have not drafted yet, after its own."""

    def draft(
        self, active: list[int], anchor_ids: torch.Tensor, count: int, goes_on: GoesOn | None = None
    ) -> Proposal:
        """Drafts `count` tokens for each of the `active` rows, whose last tokens are `anchor_ids (batch,)`.

        Args:
            active: the rows.
            anchor_ids: see above.
            count: most tokens to draft, at least 1.
            goes_on: ends the draft before a token, but not before the first. Without a confidence head it is asked in
                sessions that want confidences only.
        """
        return self.nothing(len(active))

    def nothing(self, batch: int) -> Proposal:
        """A proposal without tokens."""
        # As no token is looked up in them, the distributions need no vocabulary.
        probs = torch.empty(batch, 0, 0, device=self.device) if self.do_sample else None
        return Proposal(torch.empty(batch, 0, dtype=torch.long, device=self.device), probs)


class Steps(Protocol):
    """One draft on its way, position by position."""

    def take(self, previous_ids: torch.Tensor) -> None:
        """Goes on to the next position, the first at first, behind the tokens `previous_ids (batch,)`."""

    def logits(self) -> torch.Tensor:
        """Draft logits `(batch, vocab)` of the position."""

    def new_confidences(self) -> list[list[float]] | None:
        """What a confidence head says, in each row, of the positions since it was last asked; `None` without one.

        The present position is the last of them; its token is not drawn yet.
        """

    def confidences(self, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A confidence head's raw logits and calibrated confidences of all positions, `(batch, k)`; `None` without.

        Args:
            previous_ids: `(batch, k)`, the token before each position.
        """

    def end(self) -> None:
        """After the last position."""


class DraftSession(NoDrafts):
    """Drafts for a batch of rows, keeping the drafter's view of their context up to date; made by `draft_session`.

    What the kinds of drafters do differently is how they start a draft and go on with it (`_begin`, `Steps`).
    The drafter's cache holds each row's context at its right end, with padding before it.

    Args:
        drafter: a drafter bound to its target.
        processors: the logits processors of the call, applied to the draft distribution too.
        do_sample: whether tokens are sampled; greedy otherwise.
        wants_confidences: whether proposals come with confidences.
    """

    def __init__(
        self, drafter: Drafter, processors: ScoreProcessors, do_sample: bool, wants_confidences: bool = False
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
        self._pending = PendingContext()

    def add_context(self, states: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        self._pending.add(states, positions, ids)

    def keep(self, rows: list[int]) -> None:
        self._pending.keep(rows)
        self.cache.batch_select_indices(torch.tensor(rows, device=self.drafter.device))
        if self._positions is not None:
            self._positions = self._positions[rows]

    def join(self, others: Sequence[Self]) -> None:
        self._pending.join([other._pending for other in others])
        if self._positions is not None:
            rows = sum(other._pending.rows for other in others)
            self._positions = pad(self._positions, (0, 0, 0, rows), value=-1)
            _compat.add_cache_rows(self.cache, rows)

    def draft(
        self, active: list[int], anchor_ids: torch.Tensor, count: int, goes_on: GoesOn | None = None
    ) -> Proposal:
        with self._mode():
            return self._draft(active, anchor_ids, count, goes_on)

    def _draft(self, active: list[int], anchor_ids: torch.Tensor, count: int, goes_on: GoesOn | None) -> Proposal:
        steps = self._begin(anchor_ids)
        ids = [anchor_ids.to(self.drafter.device)]
        probs: list[torch.Tensor] = []
        drafts: list[list[int]] = [[] for _ in active]
        self.processors.begin()
        asked: list[list[float]] = []
        largest: list[list[float]] = []
        for position in range(count):
            steps.take(ids[-1])
            is_asked = goes_on is not None and position >= goes_on.sure
            known = steps.new_confidences() if is_asked else None
            if goes_on is not None and known is not None:
                asked += known
                if not goes_on(known) and position:
                    break
            logits = steps.logits()
            if position and self.processors.needs_ids:
                for draft, token in zip(drafts, ids[-1].tolist(), strict=True):
                    draft.append(token)
            next_ids, next_probs = self._choose(active, drafts, logits)
            if goes_on is not None and self.drafter.confidence_head is None and next_probs is not None:
                # Known with the distribution. The token drawn from it has no say, and goes where the draft ends.
                largest.append(next_probs.amax(dim=-1).nan_to_num().tolist())
                if is_asked:
                    known = largest[len(asked) :]
                    asked += known
                    if not goes_on(known) and position:
                        break
            ids.append(next_ids)
            if next_probs is not None:
                probs.append(next_probs)
        steps.end()
        path = torch.stack(ids, dim=1)
        proposal = Proposal(path[:, 1:], torch.stack(probs, dim=1) if self.do_sample else None)
        if goes_on is not None:
            proposal.confidences = torch.tensor(asked[: len(ids) - 1]).T if asked else None
        elif self.wants_confidences:
            predicted = steps.confidences(path[:, :-1])
            if predicted is None:
                confidences = torch.stack([each.amax(dim=-1) for each in probs], dim=1)
            else:
                proposal.confidence_logits, confidences = predicted
            proposal.confidences = confidences.nan_to_num().cpu()
        return proposal

    def _begin(self, anchor_ids: torch.Tensor) -> Steps:
        """A new draft after the anchors `(batch,)`, for which the cache takes in the pending context."""
        raise NotImplementedError

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


class ParallelSession(DraftSession):
    """Drafts with a `DSparkDrafter`: one parallel pass, then one token after the other through the sequential head."""

    drafter: DSparkDrafter

    def _begin(self, anchor_ids: torch.Tensor) -> Steps:
        return ParallelSteps(self.drafter, *self._parallel_stage(anchor_ids[:, None]))

    def _parallel_stage(self, anchor_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states `(batch, block, d)` and base logits `(batch, block, vocab)` after the anchors `(batch, 1)`."""
        states, new, _ = self._pending.take()
        context = new if self._positions is None else torch.cat([self._positions, new], dim=1)
        steps = torch.arange(1, self.drafter.config.block_width + 1, device=new.device)
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


class ParallelSteps:
    """A draft from the hidden states `(batch, block, d)` and base logits `(batch, block, vocab)` of one pass."""

    def __init__(self, drafter: DSparkDrafter, hidden: torch.Tensor, base_logits: torch.Tensor) -> None:
        self.drafter, self.hidden, self.base_logits = drafter, hidden, base_logits
        self.position, self.asked = -1, 0
        # Of the token before each position so far.
        self.embeddings: list[torch.Tensor | None] = []
        self.state: torch.Tensor | None = None

    def take(self, previous_ids: torch.Tensor) -> None:
        self.position += 1
        self.embeddings.append(self.drafter.embed_previous(previous_ids))

    def logits(self) -> torch.Tensor:
        own = self.hidden[:, self.position]
        logits, self.state = self.drafter.draft_step(
            self.base_logits[:, self.position], own, self.embeddings[-1], self.state
        )
        return logits

    def new_confidences(self) -> list[list[float]] | None:
        first, self.asked = self.asked, self.position + 1
        previous = None if self.embeddings[0] is None else torch.stack(self.embeddings[first:], dim=1)  # type: ignore[arg-type]
        logits = self.drafter.confidence_logits(self.hidden[:, first : self.asked], previous)
        if logits is None:
            return None
        temperatures = self.drafter.config.confidence_temperatures or [1.0] * self.asked
        # Written with tanh, which does not overflow. Where the logits are NaN nothing is expected to survive.
        columns = [
            [0.5 + 0.5 * math.tanh(logit / (2.0 * temperature)) for logit in column]
            for column, temperature in zip(logits.T.tolist(), temperatures[first : self.asked], strict=True)
        ]
        return [[0.0 if math.isnan(each) else each for each in column] for column in columns]

    def confidences(self, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        hidden = self.hidden[:, : previous_ids.shape[1]]
        logits = self.drafter.confidence_logits(hidden, self.drafter.embed_previous(previous_ids))
        return None if logits is None else (logits, self.drafter.confidence_probs(logits))

    def end(self) -> None:
        pass


class RecurrentSession(DraftSession):
    """Drafts with a `RecurrentDrafter`, whose cache holds a pair of state and next token for each context position."""

    drafter: RecurrentDrafter

    def _begin(self, anchor_ids: torch.Tensor) -> Steps:
        states, new, ids = self._pending.take(aligned=True)
        new, anchor_ids = new.to(self.drafter.device), anchor_ids.to(self.drafter.device)
        # Each row's text is at the right end, so its anchor follows the last column.
        following = torch.cat([ids[:, 1:].to(anchor_ids.device), anchor_ids[:, None]], dim=1)
        context = new if self._positions is None else torch.cat([self._positions, new], dim=1)
        has_padding = bool((context < 0).any())
        cached, length = context.shape[1] - new.shape[1], new.shape[1]
        for start in range(0, length, CONTEXT_PIECE):
            piece = slice(start, min(start + CONTEXT_PIECE, length))
            logits, features = self.drafter.advance(
                following[:, piece],
                self.drafter.fuse(states[:, piece]),
                new[:, piece].clamp(min=0),
                self.drafter.causal_masks(context[:, : cached + piece.stop], new[:, piece])
                if has_padding or length > 1
                else None,
                self.cache,
            )
        self._positions = self._without_gaps(context) if has_padding else context
        return RecurrentSteps(self.drafter, self.cache, self._positions, has_padding, logits, features)


class RecurrentSteps:
    """A draft that a recurrent drafter makes step by step, with what it has cached removed at the end.

    Args:
        drafter: the drafter.
        cache: its cache, which holds the context.
        positions: `(batch, columns)`, text positions of the cache's columns, -1 for padding.
        has_padding: whether there may be padding among them.
        logits: `(batch, vocab)`, of the first position.
        features: `(batch, 1, d)`, what the first position leaves to the second.
    """

    def __init__(
        self,
        drafter: RecurrentDrafter,
        cache: Cache,
        positions: torch.Tensor,
        has_padding: bool,
        logits: torch.Tensor,
        features: torch.Tensor,
    ) -> None:
        self.drafter, self.cache, self.positions, self.has_padding = drafter, cache, positions, has_padding
        self.step = -1
        self._logits, self._features = logits, features

    def take(self, previous_ids: torch.Tensor) -> None:
        self.step += 1
        if self.step == 0:
            return
        # The pair with a drafted token stands at the position before it.
        position = self.positions[:, -1:] + 1
        self.positions = torch.cat([self.positions, position], dim=1)
        masks = self.drafter.causal_masks(self.positions, position) if self.has_padding else None
        self._logits, self._features = self.drafter.advance(
            previous_ids[:, None], self._features, position, masks, self.cache
        )

    def logits(self) -> torch.Tensor:
        return self._logits

    def new_confidences(self) -> list[list[float]] | None:
        return None

    def confidences(self, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None

    def end(self) -> None:
        if self.step > 0:
            self.cache.crop(-self.step)


def draft_session(
    drafter: Drafter, processors: ScoreProcessors, do_sample: bool, wants_confidences: bool = False
) -> DraftSession:
    """A session of the kind that `drafter` needs; arguments as for `DraftSession`."""
    kind = RecurrentSession if drafter.is_recurrent else ParallelSession
    return kind(drafter, processors, do_sample, wants_confidences)


def _text_columns(positions: torch.Tensor) -> torch.Tensor:
    """Order of the columns of `positions (batch, n)` with padding (-1) first, without what is padding in all rows."""
    is_text = positions >= 0
    longest = int(is_text.sum(dim=1).max())
    return is_text.to(torch.int8).argsort(dim=1, stable=True)[:, -longest:]


__all__ = ["DraftSession", "NoDrafts", "Proposal", "draft_session"]
