"""What `return_dict_in_generate` returns beside the sequences: one entry per new column of the batch.

Rows end at different columns. Plain decoding goes on to feed padding to a row that has ended; here such a row has left
the batch, and its entries after the end are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from .._compat import CacheRow
from .target import TargetOutput

Layers = tuple[torch.Tensor, ...]


class Record:
    """Collects scores, logits, hidden states and attention weights, row by row.

    Args:
        config: the call's generation config.
        batch: rows of the call.
        windows: sliding window of each target layer, `None` for full attention.
    """

    def __init__(self, config: GenerationConfig, batch: int, windows: list[int | None]) -> None:
        self.active = bool(config.return_dict_in_generate)
        self.wants_logits = self.active and bool(config.output_logits)
        self.wants_scores = self.active and bool(config.output_scores)
        self.windows = windows
        self.scores: list[list[torch.Tensor]] = [[] for _ in range(batch)]
        self.logits: list[list[torch.Tensor]] = [[] for _ in range(batch)]
        # The first entry of both is that of the prompts, for all rows; then one entry per token of each row.
        self.prompt_states: Layers | None = None
        self.prompt_attentions: Layers | None = None
        self.states: list[list[Layers]] = [[] for _ in range(batch)]
        self.attentions: list[list[Layers]] = [[] for _ in range(batch)]
        # What the target's cache held of each row when it left the batch.
        self.caches: dict[int, CacheRow] = {}
        self._shown: list[torch.Tensor] = []

    def add_prompt(self, output: TargetOutput, raw: torch.Tensor | None, scores: torch.Tensor) -> None:
        """The prefill, with scores `(batch, 1, vocab)`."""
        rows = range(len(self.scores))
        self._add_scores(list(rows), raw, scores, [1 for _ in rows])
        if self.active:
            self.prompt_states, self.prompt_attentions = output.hidden_states, output.attentions

    def add(
        self, rows: list[int], output: TargetOutput, raw: torch.Tensor | None, scores: torch.Tensor, counts: list[int]
    ) -> None:
        """A verification of `rows`, which gave each of them `counts` tokens, with scores `(batch, n, vocab)`."""
        if not self.active:
            return
        self._add_scores(rows, raw, scores, counts)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            for place in range(count):
                if output.hidden_states is not None:
                    self.states[row].append(tuple(state[index, place] for state in output.hidden_states))
                if output.attentions is not None:
                    self.attentions[row].append(self._attention(output.attentions, index, place))

    def _add_scores(self, rows: list[int], raw: torch.Tensor | None, scores: torch.Tensor, counts: list[int]) -> None:
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if self.wants_scores:
                self.scores[row] += scores[index, :count].unbind()
            if raw is not None:
                self.logits[row] += raw[index, :count].unbind()

    def _attention(self, weights: Layers, index: int, place: int) -> Layers:
        """One token's weights `(heads, keys)` in each layer.

        It has neither the keys drafted after it nor, in a layer with a sliding window, those before the window, which
        the first drafted tokens could still see.
        """
        layers = []
        for layer, window in zip(weights, self.windows, strict=True):
            end = layer.shape[3] - (layer.shape[2] - 1 - place)
            layers.append(layer[index, :, place, max(0, end - window) if window else 0 : end])
        return tuple(layers)

    def scores_up_to(self, columns: int) -> tuple[torch.Tensor, ...] | None:
        """Scores of the first new columns, each `(batch, vocab)`, for criteria; `None` if none are kept."""
        if not self.wants_scores:
            return None
        while len(self._shown) < columns:
            self._shown.append(_stack(self.scores, len(self._shown)))
        return tuple(self._shown[:columns])

    def columns(self, entries: Sequence[Sequence[torch.Tensor]], lengths: list[int]) -> tuple[torch.Tensor, ...]:
        """Entries of every row to one tensor `(batch, ...)` per column; `lengths` are the rows' new tokens."""
        kept = [row[:length] for row, length in zip(entries, lengths, strict=True)]
        return tuple(_stack(kept, column) for column in range(max(lengths)))

    def hidden_states(self, lengths: list[int]) -> tuple[Layers, ...] | None:
        """Per column a tuple over the layers: the prompts' `(batch, prompt, d)`, then `(batch, 1, d)`."""
        if self.prompt_states is None:
            return None
        layers = [
            self.columns([[token[layer] for token in row] for row in self.states], [length - 1 for length in lengths])
            for layer in range(len(self.prompt_states))
        ]
        return self.prompt_states, *(tuple(state[:, None] for state in column) for column in zip(*layers, strict=True))

    def attention_weights(self, lengths: list[int]) -> tuple[Layers, ...] | None:
        """Per column a tuple over the layers: the prompts' weights, then `(batch, heads, 1, keys)`."""
        if self.prompt_attentions is None:
            return None
        prompt = self.prompt_attentions[0].shape[2]
        columns = []
        for column in range(max(lengths) - 1):
            layers = []
            for layer, window in enumerate(self.windows):
                keys = self.prompt_attentions[layer].shape[3] if window is None else prompt
                width = min(keys + column + 1, window) if window else keys + column + 1
                weights = [
                    [_to_width(token[layer], width) for token in row[column : column + 1]]
                    for row in (row[: length - 1] for row, length in zip(self.attentions, lengths, strict=True))
                ]
                layers.append(_stack(weights, 0)[:, :, None])
            columns.append(tuple(layers))
        return self.prompt_attentions, *columns


def _stack(rows: Sequence[Sequence[torch.Tensor]], column: int) -> torch.Tensor:
    """Entry `column` of every row, `(batch, ...)`; zeros for rows that have none."""
    present = next(row[column] for row in rows if column < len(row))
    if len(rows) == 1:
        return present[None]
    return torch.stack([row[column] if column < len(row) else torch.zeros_like(present) for row in rows])


def _to_width(weights: torch.Tensor, width: int) -> torch.Tensor:
    """`(heads, keys)` to `(heads, width)`, of which the right end is kept and padding comes first."""
    weights = weights[:, -width:]
    return torch.nn.functional.pad(weights, (width - weights.shape[1], 0))


__all__ = ["Record"]
