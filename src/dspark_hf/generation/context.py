"""Target states that the drafter has yet to read, of rows that join, leave, and may wait long for a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class _Part:
    """What came at one time.

    Attributes:
        keys: which rows these are, `rows` of them.
        states: `(rows, n, m * d)`, captured target states.
        positions: `(rows, n)`, text positions, -1 where there is no text.
        ids: `(rows, n)`.
    """

    keys: list[int]
    states: torch.Tensor
    positions: torch.Tensor
    ids: torch.Tensor

    @property
    def columns(self) -> int:
        return self.positions.shape[1]

    def select(self, keys: set[int]) -> _Part:
        """The rows with these keys, as tensors of their own."""
        rows = [row for row, key in enumerate(self.keys) if key in keys]
        return _Part([self.keys[row] for row in rows], self.states[rows], self.positions[rows], self.ids[rows])


class PendingContext:
    """The context that no draft has read yet, kept as it came until one does.

    Between two drafts there may be hundreds of rounds in which rows come and go. So a round only adds what it has; who
    is who is found out when the context is taken. Of rows that have left no more is kept than of those that stay.
    """

    def __init__(self) -> None:
        # Rows of the batch are known by keys, which stay theirs while others leave.
        self._keys: list[int] = []
        self._parts: list[_Part] = []
        # Columns held of each row, of those that have left, too.
        self._columns: dict[int, int] = {}

    @property
    def rows(self) -> int:
        """How many rows it waits for; 0 if it is empty."""
        return len(self._keys)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """States as they are kept."""
        return [part.states for part in self._parts]

    def add(self, states: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        """Takes the next `n` columns of all rows.

        Args:
            states: `(rows, n, m * d)`, captured target states.
            positions: `(rows, n)`, text positions, -1 where there is no text.
            ids: `(rows, n)`, the tokens at these positions.
        """
        if not self._parts:
            self._keys = list(range(len(states)))
            self._columns = dict.fromkeys(self._keys, 0)
        part = _Part(self._keys, states, positions, ids)
        self._parts.append(part)
        for key in self._keys:
            self._columns[key] += part.columns

    def keep(self, rows: list[int]) -> None:
        """Goes on with some of the rows."""
        if not self._parts:
            return
        self._keys = [self._keys[row] for row in rows]
        staying = set(self._keys)
        held = sum(self._columns.values())
        if held > 2 * sum(self._columns[key] for key in staying):
            self._parts = [part.select(staying) for part in self._parts if not staying.isdisjoint(part.keys)]
            self._columns = {key: self._columns[key] for key in self._keys}

    def join(self, others: Sequence[PendingContext]) -> None:
        """Takes in rows after its own."""
        for other in others:
            offset = 1 + max(self._columns, default=-1)
            self._keys = self._keys + [key + offset for key in other._keys]
            self._columns |= {key + offset: columns for key, columns in other._columns.items()}
            self._parts += [
                _Part([key + offset for key in part.keys], part.states, part.positions, part.ids)
                for part in other._parts
            ]

    def take(self, aligned: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States `(rows, n, m * d)`, positions and ids `(rows, n)` of all rows, and is empty then.

        Args:
            aligned: whether each row's text has to be at its right end. Where the rows have no common history it is.
        """
        keys, parts = self._keys, self._parts
        self._keys, self._parts, self._columns = [], [], {}
        if not aligned and all(part.keys == keys for part in parts):
            states, positions, ids = zip(*((part.states, part.positions, part.ids) for part in parts), strict=True)
            return torch.cat(states, dim=1), torch.cat(positions, dim=1), torch.cat(ids, dim=1)
        return _align(keys, parts)


def _align(keys: list[int], parts: list[_Part]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row's text at its right end, with padding before it; without columns that are padding in all rows."""
    places = {key: row for row, key in enumerate(keys)}
    positions = torch.cat([part.positions.reshape(-1) for part in parts])
    device = positions.device
    owners = [places.get(key, -1) for part in parts for key in part.keys]
    repeats = [part.columns for part in parts for _ in part.keys]
    rows = torch.tensor(owners, device=device).repeat_interleave(torch.tensor(repeats, device=device))
    # Text in the order of rows, and within a row in the order in which it came.
    text = ((positions >= 0) & (rows >= 0)).nonzero().squeeze(1)
    text = text[rows[text].argsort(stable=True)]
    rows = rows[text]
    counts = rows.bincount(minlength=len(keys))
    width = int(counts.max())
    columns = torch.arange(len(text), device=device) - (counts.cumsum(0) - width)[rows]

    def spread(flat: torch.Tensor, padding: int) -> torch.Tensor:
        """Values `(tokens, ...)` of all parts in their places, `(rows, width, ...)`."""
        spread = flat.new_full((len(keys), width, *flat.shape[1:]), padding)
        spread[rows.to(flat.device), columns.to(flat.device)] = flat[text.to(flat.device)]
        return spread

    states = torch.cat([part.states.flatten(0, 1) for part in parts])
    ids = torch.cat([part.ids.reshape(-1) for part in parts])
    return spread(states, 0), spread(positions, -1), spread(ids, 0)


__all__ = ["PendingContext"]
