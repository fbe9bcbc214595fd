"""Greedy output is plain `generate`'s, token for token, whatever the drafter proposes."""

from __future__ import annotations

import random

import pytest
import torch

from dspark_hf import DSparkConfig, get_drafter

from ..tiny import tiny_target
from .oracles import make_oracle

FAMILIES = ["qwen3", "gemma3", "gemma4"]
NEW_TOKENS = 45


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    model = tiny_target(request.param)
    model.generation_config.eos_token_id = None
    return model


def plain(target, prompt, **options):
    """Plain greedy output, and the smallest gap between the best two logits on the way."""
    output = target.generate(
        input_ids=prompt,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    top = torch.stack(output.logits).float().topk(2).values
    return output.sequences, (top[..., 0] - top[..., 1]).min().item()


def prompt_for(target, length: int = 40) -> torch.Tensor:
    window = getattr(target.config.get_text_config(), "sliding_window", None)
    assert window is None or window < length, "the prompt must be longer than the sliding window"
    generator = torch.Generator().manual_seed(length)
    return torch.randint(5, target.config.get_text_config().vocab_size - 5, (1, length), generator=generator)


def assert_same(actual, expected, gap):
    print(f"smallest top-2 gap {gap:.2e}")
    assert actual.tolist() == expected.tolist(), f"smallest gap between the best two logits: {gap:.2e}"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("accepts", ["all", "none", "some"])
def test_oracle(target, accepts, attention):
    target.set_attn_implementation(attention)
    prompt = prompt_for(target)
    expected, gap = plain(target, prompt)
    generator = random.Random(0)
    coin = [generator.random() < 0.3 for _ in range(200)]
    wrong = {"all": lambda _: False, "none": lambda _: True, "some": lambda position: coin[position]}[accepts]
    oracle = make_oracle(target).follow(expected[0].tolist(), wrong)
    output = target.generate(
        input_ids=prompt,
        assistant_model=oracle,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert_same(output.sequences, expected, gap)
    cache = output.get("cache", output.get("past_key_values"))
    # As after plain decoding: everything but the last token, which was never fed.
    assert cache.get_seq_length() == expected.shape[1] - 1
    emitted = [entry.emitted for entry in oracle.last_stats.rounds]
    assert sum(emitted) == NEW_TOKENS - 1
    if accepts == "all":
        assert set(emitted[:-1]) == {5}
    elif accepts == "none":
        assert set(emitted) == {1}
        assert all(entry.accepted == 0 for entry in oracle.last_stats.rounds)
    else:
        assert len(set(emitted)) > 2


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
def test_untrained_drafter(target, head):
    target.set_attn_implementation("sdpa")
    prompt = prompt_for(target, 33)
    expected, gap = plain(target, prompt)
    torch.manual_seed(0)
    config = DSparkConfig(markov_rank=8 if head else 0, markov_head_type=head or "vanilla", block_size=5)
    drafter = get_drafter(target, config)
    output = target.generate(input_ids=prompt, assistant_model=drafter, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert_same(output, expected, gap)


def test_drafter_with_sliding_window(target):
    prompt = prompt_for(target, 37)
    expected, gap = plain(target, prompt)
    config = DSparkConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=6, block_size=4
    )
    drafter = get_drafter(target, config)
    output = target.generate(input_ids=prompt, assistant_model=drafter, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert_same(output, expected, gap)


@pytest.mark.parametrize("draft_tokens", range(1, 6))
def test_every_draft_length(target, draft_tokens):
    prompt = prompt_for(target)
    expected, gap = plain(target, prompt)
    oracle = make_oracle(target, block_size=5).follow(expected[0].tolist(), lambda position: position % 7 == 0)
    output = target.generate(
        input_ids=prompt,
        assistant_model=oracle,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        dspark_num_draft_tokens=draft_tokens,
    )
    assert_same(output, expected, gap)
    assert max(entry.drafted for entry in oracle.last_stats.rounds) == draft_tokens


def test_processors_act_on_drafts_and_target(target):
    """Repetition penalty, a minimum length and banned words change the text; the drafts follow."""
    prompt = prompt_for(target)
    options = {"repetition_penalty": 1.6, "no_repeat_ngram_size": 3, "bad_words_ids": [[7], [11]]}
    expected, gap = plain(target, prompt, **options)
    drafter = get_drafter(target, DSparkConfig(block_size=4))
    output = target.generate(
        input_ids=prompt, assistant_model=drafter, max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )
    assert_same(output, expected, gap)
