"""Accepted length, acceptance by position and wasted tokens, from what verification did in each round.

A round of one row verifies some drafted tokens, of which some survive, from the first on, and adds to the text those
and the target's own (bonus) token. Shape symbols: `n` rounds, K positions of a block, counted from 0 in arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


class Fates:
    """What became of the drafted tokens of `n` rounds.

    Attributes:
        verified: `(n,)`, drafted tokens that were verified.
        survived: `(n,)`, how many of them verification accepted, from the first on.
    """

    verified: np.ndarray
    survived: np.ndarray

    def reached(self, position: int) -> np.ndarray:
        """`(n,)`: whether the token at `position`, from 0, was verified and all before it survived."""
        return (self.verified > position) & (self.survived >= position)

    def was_verified(self, position: int) -> np.ndarray:
        """`(n,)`: whether the token at `position` was verified, so that the fate of the prefix up to it is known."""
        return self.verified > position

    def survives(self, position: int) -> np.ndarray:
        """`(n,)`: whether the token at `position` and all before it were accepted."""
        return self.survived > position


@dataclass(frozen=True)
class Rounds(Fates):
    """Rounds of verification, each of one row.

    Attributes:
        verified: `(n,)`, drafted tokens that were verified.
        survived: `(n,)`, how many of them verification accepted, from the first on.
        emitted: `(n,)`, tokens added to the text: those and the bonus token, less what an end cut off.

    Raises:
        ValueError: if these are no whole numbers of one shape, or cannot be counts of rounds.
    """

    verified: np.ndarray
    survived: np.ndarray
    emitted: np.ndarray

    def __post_init__(self) -> None:
        for name in ("verified", "survived", "emitted"):
            object.__setattr__(self, name, _counts(name, getattr(self, name), np.shape(self.verified)))
        if (self.survived > self.verified).any():
            raise ValueError("`survived` is more than `verified` in a round; it counts verified tokens.")
        if (self.emitted > self.survived + 1).any():
            raise ValueError("`emitted` is more than `survived` and the bonus token in a round.")

    @staticmethod
    def join(parts: Sequence[Rounds]) -> Rounds:
        """All rounds of several."""
        names = ("verified", "survived", "emitted")
        return Rounds(*(np.concatenate([np.zeros(0, int), *(getattr(p, name) for p in parts)]) for name in names))

    @staticmethod
    def of(stats: Any) -> Rounds:
        """The rounds of all rows of a `generate` call, from its `GenerationStats`."""
        fields = ("verified_by_row", "survived_by_row", "emitted_by_row")
        counts = ([count for entry in stats.rounds for count in getattr(entry, name)] for name in fields)
        return Rounds(*(np.array(values, dtype=int) for values in counts))

    def __len__(self) -> int:
        return len(self.verified)

    @property
    def positions(self) -> int:
        """K, the most tokens that a round verified."""
        return int(self.verified.max(initial=0))

    @property
    def kept(self) -> np.ndarray:
        """`(n,)`: verified tokens that are in the text."""
        return np.minimum(self.survived, self.emitted)

    @property
    def wasted(self) -> np.ndarray:
        """`(n,)`: verified tokens that are not: rejected, after a rejected one, or behind an end."""
        return self.verified - self.kept

    @property
    def accepted_length(self) -> float:
        """Mean tokens per round, the bonus token included (τ of equation 1); NaN without rounds."""
        return float(share(self.emitted.sum(), len(self)))

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified tokens that are in the text; NaN where none was verified."""
        return float(share(self.kept.sum(), self.verified.sum()))

    def conditional_acceptance(self) -> list[float]:
        """For each position, the share of tokens that survived of those that were verified after survivors only."""
        _, reached, survived = self.position_counts(self.positions)
        return share(survived, reached).tolist()

    def prefix_acceptance(self) -> list[float]:
        """For each position, the share of rounds in which it survived of those in which it was verified."""
        verified, _, survived = self.position_counts(self.positions)
        return share(survived, verified).tolist()

    @property
    def predicted_length(self) -> float:
        """Accepted length as the conditional acceptances have it, see `predicted_length`."""
        return float(predicted_length(self.conditional_acceptance()))

    def position_counts(self, positions: int) -> np.ndarray:
        """`(3, positions)`: rounds in which each position was verified, was reached (`reached`) and survived."""
        fates = (self.was_verified, self.reached, self.survives)
        counts = [[int(fate(place).sum()) for place in range(positions)] for fate in fates]
        return np.array(counts, dtype=int).reshape(3, positions)


def _counts(name: str, values: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(values)
    if not array.size:
        array = array.astype(int)
    if array.ndim != 1 or array.shape != shape or array.dtype.kind not in "iu":
        raise ValueError(
            f"`{name}` has the shape {array.shape} and the type {array.dtype}; give one list of whole numbers, as "
            "long as `verified`."
        )
    if (array < 0).any():
        raise ValueError(f"`{name}` has a negative number; it counts tokens.")
    return array.astype(int)


def share(happened: ArrayLike, cases: ArrayLike) -> np.ndarray:
    """`happened / cases`, NaN where there are no cases."""
    with np.errstate(invalid="ignore", divide="ignore"):
        cases = np.asarray(cases, dtype=float)
        return np.where(cases > 0, np.asarray(happened, dtype=float) / cases, np.nan)


def predicted_length(conditional: ArrayLike) -> np.ndarray:
    """`1 + p_1 + p_1 p_2 + ...`: the accepted length if each round verified a whole block and no text ended.

    Args:
        conditional: `(..., K)`, conditional acceptances p; NaN from a position on that was never reached.
    """
    return 1 + np.nan_to_num(np.cumprod(np.asarray(conditional, dtype=float), axis=-1)).sum(axis=-1)


def rounds_by_row(stats: Any, new_tokens: Sequence[int]) -> list[Rounds]:
    """The rounds of each row of a `generate` call, whose statistics name the rows that took part by order only.

    Args:
        stats: `GenerationStats` of the call.
        new_tokens: new tokens of each row, up to and with its end.

    Raises:
        ValueError: if these are not of one call.
    """
    left = [count - 1 for count in new_tokens]  # the prefill gives each row its first token
    found: list[list[tuple[int, int, int]]] = [[] for _ in new_tokens]
    for entry in stats.rounds:
        active = [row for row, count in enumerate(left) if count > 0]
        if len(active) != entry.rows:
            raise ValueError(
                f"`stats` has a round of {entry.rows} rows where {len(active)} are left; it is of another call than "
                "`new_tokens`."
            )
        counts = zip(entry.verified_by_row, entry.survived_by_row, entry.emitted_by_row, strict=True)
        for row, (verified, survived, emitted) in zip(active, counts, strict=True):
            found[row].append((verified, survived, emitted))
            left[row] -= emitted
    if any(left):
        raise ValueError("`stats` has another number of tokens than `new_tokens`; it is of another call.")
    return [Rounds(*np.array(rounds, dtype=int).reshape(-1, 3).T) for rounds in found]


__all__ = ["Fates", "Rounds", "predicted_length", "rounds_by_row", "share"]
