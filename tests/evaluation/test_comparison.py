"""Plain and speculative decoding side by side: the figures are those of the runs."""

from __future__ import annotations

import pytest
import torch

from dspark_hf.evaluation import Comparison, compare, repeated_share
from dspark_hf.evaluation.comparison import timed_generate
from dspark_hf.generation import GenerationStats, RoundStats

from ..generation.oracles import make_oracle
from ..parity.fixtures import load_drafter, load_target, load_tensors
from ..tiny import tiny_prompt, tiny_target

CASE = "qwen3-dspark-vanilla"


@pytest.fixture(scope="module")
def pair():
    target = load_target(CASE)
    target.generation_config.eos_token_id = None
    return target, load_drafter(CASE), load_tensors(CASE)["input_ids"]


def stats_of(*rounds: tuple[int, int]) -> GenerationStats:
    """Statistics with `(accepted, emitted)` in each round of one row."""
    rounds = [
        RoundStats(
            *(1, 4, 4, 4, accepted, emitted, 0.1, 0.1),
            emitted_by_row=(emitted,),
            verified_by_row=(4,),
            survived_by_row=(accepted,),
        )
        for accepted, emitted in rounds
    ]
    return GenerationStats(rounds, total_seconds=1.0)


def comparison(**fields) -> Comparison:
    defaults = {
        "prompt_ids": torch.zeros(1, 2, dtype=torch.long),
        "plain_ids": torch.arange(7)[None],
        "draft_ids": torch.arange(7)[None],
        "plain_seconds": [2.0],
        "draft_seconds": [1.0],
        "plain_tokens": [7],
        "draft_tokens": [7],
        "stats": [stats_of((2, 3), (0, 1), (2, 2))],
    }
    return Comparison(**defaults | fields)


def test_origins():
    # First the prefill's token; the last round was cut off before the target's own token.
    assert comparison().origins() == [False, True, True, False, False, True, True]
    assert comparison(stats=[stats_of()]).origins() == [False]
    # Those of the last repeat, whose text is kept.
    assert comparison(stats=[stats_of((4, 5)), stats_of((1, 2))]).origins() == [False, True, False]


def test_speedup_is_a_ratio_of_medians():
    assert comparison().speedup == pytest.approx(2.0)
    # Tokens per second, not seconds: a sampled run may end earlier.
    assert comparison(plain_tokens=[10], draft_tokens=[5]).speedup == pytest.approx(1.0)
    several = comparison(
        plain_seconds=[1.0, 2.0, 100.0], plain_tokens=[10] * 3, draft_seconds=[0.01, 1.0, 4.0], draft_tokens=[10] * 3
    )
    assert several.speedup == pytest.approx(10 / 5)


def test_accepted_length_is_over_all_rounds():
    assert comparison().accepted_length == pytest.approx(2.0)
    assert comparison(stats=[stats_of((3, 4)), stats_of((0, 1), (0, 1))]).accepted_length == pytest.approx(2.0)
    assert comparison(stats=[stats_of()]).accepted_length == 0.0


def test_compare_greedy(pair):
    target, drafter, prompt = pair
    result = compare(target, drafter, prompt, repeats=2, max_new_tokens=16, do_sample=False)
    expected = target.generate(input_ids=prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    assert result.plain_ids.tolist() == result.draft_ids.tolist() == [expected.tolist()]
    assert torch.equal(result.prompt_ids, prompt)
    assert result.plain_tokens == result.draft_tokens == [16, 16]
    assert len(result.plain_seconds) == len(result.draft_seconds) == 2
    assert all(seconds > 0 for seconds in result.plain_seconds + result.draft_seconds)
    assert result.speedup > 0
    assert result.stats[-1] is drafter.last_stats
    assert result.stats[0] is not result.stats[1]
    assert result.accepted_length == pytest.approx(drafter.last_stats.mean_accepted_length)
    for entry, drafting in zip(result.stats, result.draft_seconds, strict=True):
        assert entry.total_seconds <= drafting


def test_origins_of_a_real_run():
    target = tiny_target("qwen3")
    target.generation_config.eos_token_id = None
    prompt = tiny_prompt(6)
    sequence = target.generate(input_ids=prompt, max_new_tokens=17, do_sample=False)[0].tolist()
    wrong = {10, 16}
    oracle = make_oracle(target).follow(sequence, wrong.__contains__)
    result = compare(target, oracle, prompt, max_new_tokens=17, do_sample=False)
    # Position 6 is the prefill's, 10 and 16 are corrections, 15 and 21 follow four right ones, 22 is the last there is
    # room for.
    own = {6, 10, 15, 16, 21, 22}
    assert [6 + index for index, was_drafted in enumerate(result.origins()) if not was_drafted] == sorted(own)
    assert len(result.origins()) == result.draft_ids.shape[1] == 17


def test_compare_sampled_is_seeded(pair):
    target, drafter, prompt = pair
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 0}
    first = compare(target, drafter, prompt, seed=3, repeats=2, **options)
    again = compare(target, drafter, prompt, seed=4, **options)
    # The second repeat of the first has the seed of the only one of the other.
    assert first.plain_ids.tolist() == again.plain_ids.tolist()
    assert first.draft_ids.tolist() == again.draft_ids.tolist()
    other = compare(target, drafter, prompt, seed=5, **options)
    assert other.plain_ids.tolist() != again.plain_ids.tolist()


def test_draft_options_are_for_the_drafter_only(pair):
    target, drafter, prompt = pair
    result = compare(
        target,
        drafter,
        prompt,
        draft_options={"dspark_num_draft_tokens": 2, "dspark_confidence_threshold": None},
        max_new_tokens=12,
        do_sample=False,
    )
    assert {entry.drafted for entry in result.stats[0].rounds} <= {0, 2}
    assert result.plain_ids.tolist() == result.draft_ids.tolist()


def test_compare_needs_a_repeat(pair):
    target, drafter, prompt = pair
    with pytest.raises(ValueError, match="`repeats` is 0"):
        compare(target, drafter, prompt, repeats=0)


@pytest.mark.parametrize(
    ("ids", "n", "expected"),
    [
        ([], 8, 0.0),
        (range(7), 8, 0.0),
        (range(8), 8, 0.0),
        (range(100), 8, 0.0),
        ([5] * 9, 8, 1 / 2),
        ([5] * 107, 8, 99 / 100),
        ([1, 2, 1, 2, 1], 2, 2 / 4),
        ([1, 2, 3, 1, 2, 4], 2, 1 / 5),
        ([1, 1, 2], 1, 1 / 3),
    ],
)
def test_repeated_share(ids, n, expected):
    assert repeated_share(ids, n) == pytest.approx(expected)
    if n == 8:
        assert repeated_share(iter(ids)) == pytest.approx(expected)


def test_timed_run_of_ragged_rows(pair):
    """Tokens are counted up to and with each row's end, and texts have no padding."""
    target, drafter, prompt = pair
    batch = torch.cat([prompt, prompt.flip(1), prompt.roll(3, 1)])
    whole = timed_generate(target, batch, max_new_tokens=16, do_sample=False)
    assert whole.tokens == [16] * 3 and whole.stats is None and whole.seconds > 0
    # A token that ends the rows at different lengths.
    end = next(token for token in whole.texts[0] if len({text.index(token) for text in whole.texts if token in text}))
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    for helper in (None, drafter):
        run = timed_generate(target, batch, helper, **options)
        expected = [text[: text.index(end) + 1] if end in text else text for text in whole.texts]
        assert run.texts == expected
        assert run.tokens == [len(text) for text in expected]
        assert (run.stats is None) == (helper is None)
    assert len(set(run.tokens)) > 1
