"""What waits for a draft, against lists of each row's own."""

from __future__ import annotations

import random

import pytest
import torch

from dspark_hf.generation.context import PendingContext

WIDTH = 3


class Texts:
    """Rows as lists of `(position, id)`, beside the context that is tested."""

    def __init__(self, first: int) -> None:
        self.context, self.rows, self.next_id = PendingContext(), [[] for _ in range(first)], 1
        self.lengths = [0] * first

    def add(self, rng: random.Random, columns: int) -> None:
        """Columns of which some rows have fewer, with padding at either end."""
        positions = torch.full((len(self.rows), columns), -1)
        ids = torch.zeros(len(self.rows), columns, dtype=torch.long)
        for row, text in enumerate(self.rows):
            count = rng.randint(1, columns)
            start = rng.choice([0, columns - count])
            for column in range(start, start + count):
                positions[row, column], ids[row, column] = self.lengths[row], self.next_id
                text.append((self.lengths[row], self.next_id))
                self.lengths[row] += 1
                self.next_id += 1
        self.context.add(states_of(ids), positions, ids)

    def keep(self, rows: list[int]) -> None:
        self.context.keep(rows)
        self.rows, self.lengths = [self.rows[row] for row in rows], [self.lengths[row] for row in rows]

    def join(self, others: list[Texts]) -> None:
        self.context.join([other.context for other in others])
        for other in others:
            self.rows += other.rows
            self.lengths += other.lengths

    def check(self, taken: tuple[torch.Tensor, torch.Tensor, torch.Tensor], aligned: bool) -> None:
        states, positions, ids = taken
        assert states.shape == (*positions.shape, WIDTH) and positions.shape == ids.shape
        assert len(positions) == len(self.rows)
        for row, text in enumerate(self.rows):
            is_text = positions[row] >= 0
            assert list(zip(positions[row][is_text].tolist(), ids[row][is_text].tolist(), strict=True)) == text
            assert torch.equal(states[row][is_text], states_of(ids[row][is_text]))
            if aligned:
                assert is_text.tolist() == sorted(is_text.tolist())
        if aligned:
            assert positions.shape[1] == max(map(len, self.rows))
        self.rows = [[] for _ in self.rows]


def states_of(ids: torch.Tensor) -> torch.Tensor:
    return ids[..., None] + torch.arange(WIDTH) / 8


@pytest.mark.parametrize("seed", range(40))
def test_rows_keep_their_text(seed):
    rng = random.Random(seed)
    texts = Texts(rng.randint(1, 4))
    texts.add(rng, rng.randint(1, 9))
    for _ in range(30):
        action = rng.choice(["add", "add", "keep", "join", "take"])
        if action == "add":
            texts.add(rng, rng.randint(1, 3))
        elif action == "keep" and len(texts.rows) > 1:
            texts.keep(sorted(rng.sample(range(len(texts.rows)), rng.randint(1, len(texts.rows)))))
        elif action == "join":
            others = [Texts(1) for _ in range(rng.randint(1, 3))]
            for number, other in enumerate(others):
                other.next_id = 1000 * (number + 1) + texts.next_id
                other.add(rng, rng.randint(1, 9))
            texts.join(others)
        elif action == "take":
            # As in a round: what is new comes after.
            aligned = rng.random() < 0.5
            texts.check(texts.context.take(aligned), aligned)
            texts.add(rng, rng.randint(1, 3))
    texts.check(texts.context.take(aligned=True), aligned=True)
    assert texts.context.rows == 0


def test_little_is_kept_of_rows_that_left():
    context = PendingContext()
    context.add(torch.zeros(8, 50, WIDTH), torch.arange(50).expand(8, -1), torch.zeros(8, 50, dtype=torch.long))
    for left in range(7, 0, -1):
        context.keep(list(range(left)))
        held = sum(tensor.untyped_storage().nbytes() for tensor in context.tensors) / (4 * WIDTH)
        assert 50 * left <= held <= 2 * 50 * left
