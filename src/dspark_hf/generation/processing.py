"""Logits processors on rows of different lengths, on drafts that may be rejected.

Every processor has to give what it gives in plain decoding: it sees the ids of the whole row, one more at each
position, and it sees each position of the final text once, in order. Three kinds are told apart:

- those of Transformers that look at the scores alone take all positions at once;
- those of Transformers that look at a row's ids take all rows of the same length at once;
- any other may remember what it saw and may look at the row's index. It is copied for what may be rejected, and the
  original is shown the accepted positions afterwards. In a batch each row has its own copy, which sees all rows.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import nn
from transformers import LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process

from .rows import Rows

_SCORES_ONLY = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)

# Of Transformers' own, but with a state or with one entry per row of the batch.
_BY_ROW_INDEX = (
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)


def check_processors(processors: LogitsProcessorList) -> None:
    """Raises `ValueError` for a processor under which speculative decoding would not be lossless."""
    for processor in processors:
        if isinstance(processor, logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor):
            raise ValueError(
                "`guidance_scale` runs the target a second time with a cache of its own, which cannot be rolled back "
                "after a rejected draft. Call `generate` without `assistant_model`."
            )


class _Stage:
    """One processor of the call."""

    def __init__(self, processor: Any, batch: int) -> None:
        self.processor = processor
        self.scores_only = type(processor) in _SCORES_ONLY
        of_transformers = type(processor).__module__ == logits_process.__name__
        self.by_ids = of_transformers and not isinstance(processor, _BY_ROW_INDEX)
        # One per row: the originals, shown accepted positions only, and what this round's positions go through.
        self.originals: list[Any] = []
        self._trial: dict[int, Any] = {}
        if not self.scores_only and not self.by_ids:
            self.originals = [processor] if batch == 1 else [copy_processor(processor) for _ in range(batch)]
        self.is_certain = False
        # Per row, the scores of this round's verified positions as this processor got them.
        self.inputs: dict[int, list[torch.Tensor]] = {}

    def begin(self, is_certain: bool) -> None:
        """Before positions that may be rejected, or that are certain."""
        self.is_certain = is_certain
        self._trial, self.inputs = {}, {}

    def trial(self, row: int) -> Any:
        """What this round's positions of `row` go through; copies may be dear, so rows that ask for none get none."""
        if self.is_certain:
            return self.originals[row]
        if row not in self._trial:
            self._trial[row] = copy_processor(self.originals[row])
        return self._trial[row]


def copy_processor(processor: Any) -> Any:
    """A copy that shares models and tokenizers, which processors only read."""
    shared = [
        value
        for value in getattr(processor, "__dict__", {}).values()
        if isinstance(value, (nn.Module, PreTrainedTokenizerBase))
    ]
    try:
        return copy.deepcopy(processor, {id(value): value for value in shared})
    except Exception as error:
        raise ValueError(
            f"The logits processor {type(processor).__name__} cannot be copied ({error}), so what it remembers cannot "
            "be put back after a rejected draft. Give it a `__deepcopy__`, or call `generate` without "
            "`assistant_model`."
        ) from error


Positions = list[tuple[int, int, int]]
"""Index in the batch, position and text length of every score that counts."""


def _for_rows(processor: Any, rows: list[int]) -> Any:
    """The repetition penalty keeps a number per row of the batch: one with the numbers of `rows` only."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    processor = copy.copy(processor)
    processor.prompt_ignore_length = ignored[rows]
    return processor


def _by_length(
    processor: Any, active: list[int], positions: Positions, candidates: torch.Tensor, scores: torch.Tensor
) -> None:
    """Calls a processor once for each text length."""
    by_length: dict[int, tuple[list[int], list[int]]] = {}
    for index, position, length in positions:
        indices, places = by_length.setdefault(length, ([], []))
        indices.append(index)
        places.append(position)
    for length, (indices, places) in by_length.items():
        rows = [active[index] for index in indices]
        ids = candidates[rows, :length]
        scores[indices, places] = _for_rows(processor, rows)(ids, scores[indices, places])


def _row_by_row(
    stage: _Stage, active: list[int], positions: Positions, candidates: torch.Tensor, scores: torch.Tensor
) -> None:
    """Shows each position, in order, to the copy of its row, among rows that are as long."""
    for index, position, length in positions:
        row = active[index]
        given = scores[index, position].clone()
        stage.inputs.setdefault(row, []).append(given)
        scores[index, position] = _call(stage.trial(row), row, candidates[:, :length], given)


def _call(processor: Any, row: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What `processor` makes of one row's `scores (vocab,)`."""
    batch = ids.shape[0]
    result: Any = processor(ids, scores.repeat(batch, 1))
    if not isinstance(result, torch.Tensor):
        raise TypeError(
            f"The logits processor {type(processor).__name__} returned {result!r:.60}, of type "
            f"{type(result).__name__}; it must return the scores, a tensor of shape {(batch, scores.shape[0])}."
        )
    if result.shape != (batch, scores.shape[0]):
        raise ValueError(
            f"The logits processor {type(processor).__name__} made scores of shape {tuple(result.shape)} from "
            f"{(batch, scores.shape[0])}; it must keep the shape."
        )
    return result[row]


class ScoreProcessors(Protocol):
    """What a decoding loop asks of the logits processors of its rows; see `RowProcessors`."""

    @property
    def needs_ids(self) -> bool: ...

    def begin(self) -> None: ...

    def begin_certain(self) -> None: ...

    def process(
        self, active: list[int], drafts: list[list[int]], offset: int, scores: torch.Tensor
    ) -> torch.Tensor: ...

    def commit(self, active: list[int], before: list[int]) -> None: ...


class RowProcessors:
    """The logits processors of one `generate` call.

    Args:
        processors: those that `generate` prepared.
        rows: the text of all rows.
    """

    def __init__(self, processors: LogitsProcessorList, rows: Rows) -> None:
        self.rows = rows
        self.stages = [_Stage(processor, rows.batch) for processor in processors]
        self._stateful = [stage for stage in self.stages if stage.originals]
        self.needs_ids = not all(stage.scores_only for stage in self.stages)

    def begin(self) -> None:
        """Before drafting and before verifying: what the processors are shown next may be rejected."""
        for stage in self._stateful:
            stage.begin(is_certain=False)

    def begin_certain(self) -> None:
        """Before a position that nothing can reject."""
        for stage in self._stateful:
            stage.begin(is_certain=True)

    def process(self, active: list[int], drafts: list[list[int]], offset: int, scores: torch.Tensor) -> torch.Tensor:
        """Processed scores.

        Args:
            active: rows that the scores belong to.
            drafts: drafted tokens of each, after the row's text. Score i of a row follows the first `offset + i`.
            offset: see above.
            scores: `(batch, n, vocab)`; changed in place. Positions after a row's last drafted token stay as they are.
        """
        if not self.stages:
            return scores
        batch, count, vocab = scores.shape
        candidates = self._candidates(active, drafts, scores.device)
        positions = self._positions(active, drafts, offset, count) if self.needs_ids else []
        for stage in self.stages:
            if stage.scores_only:
                nothing = scores.new_zeros(batch * count, 0, dtype=torch.long)
                scores = stage.processor(nothing, scores.reshape(-1, vocab)).view(batch, count, vocab)
            elif stage.by_ids:
                _by_length(stage.processor, active, positions, candidates, scores)
            else:
                _row_by_row(stage, active, positions, candidates, scores)
        return scores

    def _candidates(self, active: list[int], drafts: list[list[int]], device: torch.device) -> torch.Tensor:
        """All rows of the call `(rows, width)`, those of `active` followed by their drafted tokens."""
        if not self.needs_ids:
            return self.rows.buffer
        longest = max(self.rows.lengths[row] + len(draft) for row, draft in zip(active, drafts, strict=True))
        buffer = self.rows.buffer
        candidates = buffer.new_full((buffer.shape[0], longest), self.rows.pad_id)
        width = min(longest, buffer.shape[1])
        candidates[:, :width] = buffer[:, :width]
        for row, draft in zip(active, drafts, strict=True):
            start = self.rows.lengths[row]
            candidates[row, start : start + len(draft)] = torch.tensor(draft, dtype=torch.long, device=buffer.device)
        return candidates.to(device)

    def _positions(self, active: list[int], drafts: list[list[int]], offset: int, count: int) -> Positions:
        """Index in the batch, position and text length of every score that counts."""
        return [
            (index, position, self.rows.lengths[row] + offset + position)
            for index, row in enumerate(active)
            for position in range(count)
            if offset + position <= len(drafts[index])
        ]

    def commit(self, active: list[int], before: list[int]) -> None:
        """Shows the accepted positions of the last verification, which began at lengths `before`, to the originals."""
        for stage in self._stateful:
            if stage.is_certain:
                continue
            for row, start in zip(active, before, strict=True):
                for length in range(start, self.rows.lengths[row]):
                    given = stage.inputs[row][length - start]
                    _call(stage.originals[row], row, self.rows.buffer[:, :length], given)


__all__ = ["RowProcessors", "ScoreProcessors", "check_processors", "copy_processor"]
