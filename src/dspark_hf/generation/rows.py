"""The text of every row of a `generate` call, and where each row ends.

Rows are written at their own pace, but criteria of the user and streamers see what they see in plain decoding: one
column of the batch after the other, each as soon as every row that still generates has reached it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from .. import _compat

# Criteria that judge each row by its own ids, so that a row need not wait for the others.
_ROW_CRITERIA = (MaxTimeCriteria, StopStringCriteria)

ScoresUpTo = Callable[[int], "tuple[torch.Tensor, ...] | None"]


class TextRows(Protocol):
    """What a decoding loop asks of the text of its rows; rows are named by numbers."""

    @property
    def device(self) -> torch.device: ...

    @property
    def batch(self) -> int: ...

    @property
    def active(self) -> list[int]: ...

    @property
    def lengths(self) -> Sequence[int] | Mapping[int, int]: ...

    @property
    def ended(self) -> Sequence[bool] | Mapping[int, bool]: ...

    def room(self, row: int) -> int: ...

    def last_ids(self, rows: list[int]) -> torch.Tensor: ...

    def length_to_verify(self, tokens: list[int], row: int) -> int: ...

    def append(self, rows: list[int], tokens: list[list[int]]) -> list[int]: ...


class Rows:
    """Ids of all rows, left-aligned in one buffer that is padded after each row's last token.

    Args:
        input_ids: `(batch, prompt)`, with the prompts' own padding.
        config: the call's generation config.
        criteria: stopping criteria that `generate` prepared.
        streamer: gets the new tokens, a column `(batch,)` at a time.
        scores_up_to: the scores of the first n new columns, for criteria of the user; `None` where none are kept.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None = None,
        scores_up_to: ScoresUpTo = lambda _: None,
    ) -> None:
        self.batch, self.prompt_length = input_ids.shape
        self.max_length = int(config.max_length)
        self.pad_id = _compat.pad_token_id(config)
        self.buffer = input_ids.clone()
        self.lengths = [self.prompt_length] * self.batch
        self.ended = [False] * self.batch
        self._flagged: list[int | None] = [None] * self.batch
        self._column = self.prompt_length
        self._streamer = streamer
        self._scores_up_to = scores_up_to
        # Without an end-of-sequence token, plain decoding lets all rows go on until every one has met a criterion.
        self._ends_alone = any(isinstance(entry, EosTokenCriteria) for entry in criteria)
        self._eos_ids = set(_compat.eos_token_ids(config)) if self._ends_alone else set()
        self._row_criteria = [entry for entry in criteria if type(entry) in _ROW_CRITERIA]
        known = (MaxLengthCriteria, EosTokenCriteria, *_ROW_CRITERIA)
        self._user_criteria = StoppingCriteriaList(entry for entry in criteria if type(entry) not in known)

    @property
    def device(self) -> torch.device:
        """Where the ids are."""
        return self.buffer.device

    @property
    def active(self) -> list[int]:
        """Rows that still generate."""
        return [row for row, ended in enumerate(self.ended) if not ended]

    def room(self, row: int) -> int:
        """Tokens that the length limit has room for."""
        return self.max_length - self.lengths[row]

    def last_ids(self, rows: list[int]) -> torch.Tensor:
        """The last token of each of `rows`, `(n,)`."""
        return self.buffer[rows, [self.lengths[row] - 1 for row in rows]]

    def length_to_verify(self, tokens: list[int], row: int) -> int:
        """How many of a row's drafted tokens could be kept.

        None after a drafted end of sequence (the cut comes after it, never before), and one less than the length
        limit has room for, as one token is the target's own.
        """
        return self._length_up_to_end(tokens[: max(0, self.room(row) - 1)])

    def _length_up_to_end(self, tokens: list[int]) -> int:
        """Tokens up to and with the first end of sequence."""
        return next((index + 1 for index, token in enumerate(tokens) if token in self._eos_ids), len(tokens))

    def append(self, rows: list[int], tokens: list[list[int]]) -> list[int]:
        """Adds new tokens to each of `rows`, up to where the row ends; returns how many each got.

        Raises:
            ValueError: for a negative token, which is what a draw gives where there is no distribution.
        """
        before = [self.lengths[row] for row in rows]
        for row, new in zip(rows, tokens, strict=True):
            self._append(row, new)
        self._settle()
        return [max(0, self.lengths[row] - start) for row, start in zip(rows, before, strict=True)]

    def _append(self, row: int, tokens: list[int]) -> None:
        if min(tokens) < 0:
            raise ValueError(
                "The probabilities of the next token are not finite: the target or the drafter gave NaN or infinite "
                "logits. Half precision may overflow; load both in bfloat16 or float32."
            )
        start = self.lengths[row]
        count = self._length_up_to_end(tokens[: self.room(row)])
        at_end = count > 0 and tokens[count - 1] in self._eos_ids
        self._reserve(start + count)
        self.buffer[row, start : start + count] = torch.tensor(tokens[:count], device=self.buffer.device)
        if self._row_criteria and self._flagged[row] is None:
            for length in range(start + 1, start + count + 1):
                ids = self.buffer[row : row + 1, :length]
                if any(bool(criterion(ids, None).all()) for criterion in self._row_criteria):
                    self._flagged[row] = length
                    break
        if at_end and self._flagged[row] is None:
            self._flagged[row] = start + count
        self._cut(row, start + count)
        self.ended[row] = self.lengths[row] >= self.max_length or (self._ends_alone and self._flagged[row] is not None)

    def _reserve(self, length: int) -> None:
        """Makes the buffer at least `length` wide."""
        if length > self.buffer.shape[1]:
            wider = max(length, 2 * self.buffer.shape[1]) - self.buffer.shape[1]
            self.buffer = torch.cat([self.buffer, self.buffer.new_full((self.batch, wider), self.pad_id)], dim=1)

    def _cut(self, row: int, length: int) -> None:
        """Ends row at `length`, or before it where it is flagged and ends alone."""
        flag, written = self._flagged[row], max(length, self.lengths[row])
        if self._ends_alone and flag is not None:
            length = min(length, flag)
        if length < written:
            self.buffer[row, length:] = self.pad_id
        self.lengths[row] = length

    def _settle(self) -> None:
        """Shows complete columns to the streamer and the user's criteria, and ends rows where these say so."""
        self._end_together()
        if self._streamer is None and not self._user_criteria:
            return
        while self._column < self._complete_length():
            self._column += 1
            self._show_column()
            self._end_together()

    def _end_together(self) -> None:
        """Without an end-of-sequence token: ends all rows at the column at which the last of them met a criterion."""
        flags = [flag for flag in self._flagged if flag is not None]
        if self._ends_alone or len(flags) < self.batch:
            return
        self.max_length = max(flags)
        for row, length in enumerate(self.lengths):
            self._cut(row, min(length, self.max_length))
            self.ended[row] = length >= self.max_length

    def _complete_length(self) -> int:
        """Length up to which every row has either a token or its end."""
        generating = [length for length, ended in zip(self.lengths, self.ended, strict=True) if not ended]
        return min(generating, default=max(self.lengths))

    def _show_column(self) -> None:
        """Column `_column - 1` is complete."""
        if self._streamer is not None:
            self._streamer.put(self.buffer[:, self._column - 1].cpu())
        if not self._user_criteria:
            return
        stops = self._user_criteria(
            self.buffer[:, : self._column], self._scores_up_to(self._column - self.prompt_length)
        )
        for row, stop in enumerate(torch.as_tensor(stops).expand(self.batch).tolist()):
            flag = self._flagged[row]
            if stop and (flag is None or flag > self._column):
                self._flagged[row] = self._column
                self._cut(row, self.lengths[row])
                self.ended[row] = self.ended[row] or self._ends_alone

    def sequences(self) -> torch.Tensor:
        """`(batch, longest)`, padded on the right."""
        return self.buffer[:, : max(self.lengths)]
