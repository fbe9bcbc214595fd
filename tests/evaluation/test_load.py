"""Decoding under load: requests follow one another, policies take turns, figures count what happened."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.evaluation.load import LoadedEngine, LoadFigures, take_turns
from dspark_hf.generation.schedulers import Fixed, Plain

from ..tiny import tiny_prompt, tiny_target

BLOCK = 3


@pytest.fixture(scope="module")
def pair():
    target = tiny_target("qwen3")
    config = DSparkConfig(block_size=BLOCK, num_hidden_layers=1, intermediate_size=32, markov_rank=4, mask_token_id=0)
    return target, get_drafter(target, config)


@pytest.fixture
def start(pair):
    """Starts an engine that is closed in the end."""
    engines = []

    def make(scheduler, load=2, **options):
        prompts = [tiny_prompt(length) for length in (5, 9, 3)]
        engines.append(LoadedEngine(*pair, scheduler, prompts, load, mean_tokens=6, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_plain_decoding_brings_a_token_per_row_and_round(start):
    figures = start(Plain()).decode(40)
    assert 40 <= figures.emitted <= 41 and (figures.accepted_length, figures.budget) == (1, 0)
    assert figures.tokens_per_second == figures.emitted / figures.seconds > 0


@pytest.mark.parametrize("load", [1, 4])
def test_requests_follow_one_another(start, load):
    """Rounds are full though each request ends after a few tokens."""
    engine = start(Fixed(2), load, num_draft_tokens=2)
    figures = engine.decode(60) + engine.decode(60)
    assert figures.emitted >= 120 and len(engine._requests) == load
    assert figures.rows % load == 0
    assert 1 <= figures.accepted_length <= 3 and 1 <= figures.budget <= 2


def test_figures_add_up():
    both = LoadFigures(2.0, 30, 10, 40) + LoadFigures(1.0, 30, 20, 20)
    assert (both.tokens_per_second, both.accepted_length, both.budget) == (20.0, 2.0, 2.0)


class Recorded:
    """Decodes nothing, and remembers when it was asked."""

    def __init__(self, name: str, load: int, calls: list[tuple[str, int]]) -> None:
        self.name, self.load, self.calls = name, load, calls

    def decode(self, tokens: int) -> LoadFigures:
        self.calls.append((self.name, tokens))
        return LoadFigures(1.0, tokens, tokens, 0)


@pytest.mark.parametrize(("load", "turn"), [(1, 64), (8, 64), (32, 256)])
def test_policies_take_short_turns_in_changing_order(load, turn):
    calls: list[tuple[str, int]] = []
    figures = take_turns({name: Recorded(name, load, calls) for name in "abc"}, 1024, seed=1)
    assert {tokens for _, tokens in calls} == {turn}
    orders = ["".join(name for name, _ in calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert any(before != after for before, after in pairwise(orders))
    assert all(found.emitted == 1024 for found in figures.values())


def test_a_short_run_is_one_turn():
    calls: list[tuple[str, int]] = []
    take_turns({"a": Recorded("a", 1, calls)}, 10)
    assert calls == [("a", 10)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load": 0}, "`load` is 0; it must be at least 1"),
        ({"mean_tokens": -1}, "`mean_tokens` is -1"),
        ({"prompts": []}, "`prompts` is empty"),
    ],
)
def test_wrong_arguments(pair, changes, message):
    target, drafter = pair
    arguments = {"prompts": [torch.tensor([[1, 2]])], "load": 1, "mean_tokens": 4} | changes
    with pytest.raises(ValueError, match=message):
        LoadedEngine(target, drafter, Plain(), **arguments)


def test_nothing_to_do():
    with pytest.raises(ValueError, match="`total_tokens` is 0"):
        take_turns({"a": Recorded("a", 1, [])}, 0)
    with pytest.raises(ValueError, match="`engines` is empty"):
        take_turns({}, 10)
