"""Every family of `TARGET_FAMILIES` is served losslessly, one row and ragged batches; the others are refused."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import T5Config, T5ForConditionalGeneration

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.factory import TARGET_FAMILIES

from ..targets import (
    CROSS_ATTENTION,
    FAMILIES,
    ONE_ROW,
    RECENT,
    RECURRENT,
    SCALED_LOGITS,
    WITHOUT_CACHE,
    is_missing,
    make_target,
)
from ..tiny import VOCAB_SIZE, tiny_prompt, tiny_target
from .noisy import Batch, make_noisy_copy

NEW_TOKENS = 12
BATCH = Batch((20, 13, 17, 9), VOCAB_SIZE)

# In Transformers' own decoding the two differ: without a mask it lets the prompt's tokens see each other.
PADDING_CHANGES_TEXT = {("paligemma", "sdpa")}


def test_main_families_are_families():
    assert set(FAMILIES) >= MAIN_FAMILIES


def test_table_and_targets_agree():
    """No row of the table is untested, and no tested family is missing from it."""
    assert sorted(TARGET_FAMILIES) == sorted(FAMILIES)


def test_newest_transformers_has_every_family():
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("an older Transformers")
    assert not any(map(is_missing, RECENT))


@functools.lru_cache(maxsize=1)
def shared_target(name):
    """The target for both attention implementations."""
    target = make_target(name)
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target


@functools.lru_cache(maxsize=1)
def other_solo_texts(name: str) -> list[list[int]]:
    """What the target writes after each prompt but the first, alone, with the attention that is tested first."""
    return [solo_text(shared_target(name), prompt) for prompt in BATCH.prompts[1:]]


def solo_text(target, prompt: torch.Tensor) -> list[int]:
    return plain(target, input_ids=prompt[None]).sequences[0].tolist()


def plain(target, **options):
    return target.generate(max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, **options)


class Case:
    """One family with one attention implementation, and what it writes by itself."""

    def __init__(self, name: str, attention: str) -> None:
        self.name, self.attention = name, attention
        self.target = shared_target(name)
        use_attention(self.target, attention)
        self.solo = [solo_text(self.target, BATCH.prompts[0]), *other_solo_texts(name)]
        output = plain(self.target, **BATCH.inputs, output_logits=True)
        self.sequences = output.sequences
        self.texts = BATCH.without_padding(output.sequences)
        best = torch.stack(output.logits).float().topk(2).values
        self.gap = (best[..., 0] - best[..., 1]).min().item()
        self.drafter = make_noisy_copy(self.target)

    def one(self, **options):
        """The first prompt with the drafter: its text."""
        self.drafter.follow(self.solo[:1])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
        return self.target.generate(input_ids=BATCH.prompts[0][None], assistant_model=self.drafter, **options)[
            0
        ].tolist()

    def four(self, **options):
        """All prompts with the drafter: the padded rows."""
        self.drafter.follow(self.texts)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
        return self.target.generate(**BATCH.inputs, assistant_model=self.drafter, **options)


def use_attention(target, implementation: str) -> None:
    """Switches to `eager` or `sdpa`; skips the test where the family has no such attention."""
    try:
        target.set_attn_implementation(implementation)
    except ValueError:
        pytest.skip(f"{type(target).__name__} has no {implementation} attention")
    if target.config.get_text_config(decoder=True)._attn_implementation != implementation:
        pytest.skip(f"{type(target).__name__} cannot be switched to {implementation} attention")


# Tested on every supported Transformers; the others, which take much longer together, on the newest only.
MAIN_FAMILIES = {
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "llama",
    "mistral",
    "gpt_oss",
    "gpt2",
}


def cases():
    """Every family with both kinds of attention."""
    for name in FAMILIES:
        marks = () if name in MAIN_FAMILIES else (pytest.mark.slow,)
        for kind in ("eager", "sdpa"):
            yield pytest.param((name, kind), marks=marks, id=f"{name}-{kind}")


@pytest.fixture(scope="module", params=cases())
def case(request):
    name, attention = request.param
    if is_missing(name):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    return Case(name, attention)


def test_plain_text_is_a_test(case):
    """The text says something, and padding does not change it."""
    assert len({token for text in case.texts for token in text[-NEW_TOKENS:]}) > 8
    if case.name not in ONE_ROW and (case.name, case.attention) not in PADDING_CHANGES_TEXT:
        assert case.texts == case.solo, f"smallest gap between the best two logits: {case.gap:.2e}"


def test_greedy(case):
    hint = f"smallest gap between the best two logits: {case.gap:.2e}"
    print(hint)
    assert case.one() == case.solo[0], hint
    rounds = case.drafter.last_stats.rounds
    assert 0 < sum(entry.accepted for entry in rounds) < sum(entry.verified for entry in rounds)
    if case.name in ONE_ROW:
        with pytest.raises(ValueError, match=ONE_ROW[case.name]):
            case.four()
        return
    assert case.four().tolist() == case.sequences.tolist(), hint
    rounds = case.drafter.last_stats.rounds
    assert any(entry.emitted % entry.rows for entry in rounds), "all rows always accepted the same number"
    assert 0 < sum(entry.accepted for entry in rounds) < sum(entry.verified for entry in rounds)


def test_sampled(case):
    """With one candidate left sampling is greedy decoding; with all of them it runs to the end."""
    torch.manual_seed(0)
    assert case.one(do_sample=True, top_k=1) == case.solo[0]
    if case.name in ONE_ROW:
        return
    assert case.four(do_sample=True, top_k=1).tolist() == case.sequences.tolist()
    torch.manual_seed(1)
    output = case.four(do_sample=True, temperature=1.5)
    assert output.shape == case.sequences.shape
    assert torch.equal(output[:, : BATCH.width], BATCH.input_ids)
    assert ((output >= 0) & (output < VOCAB_SIZE)).all()


@torch.no_grad()
def test_drafter_projects_as_its_target(case):
    """A drafter's base logits for the target's last state are the target's logits: no factor is left out."""
    if case.name == "gemma3n_text":
        pytest.skip("Gemma 3n does not return the state that its LM head sees")
    outputs = case.target(tiny_prompt(), output_hidden_states=True)
    projected = case.drafter.project(outputs.hidden_states[-1])
    torch.testing.assert_close(projected, outputs.logits, atol=1e-4, rtol=1e-4)


# --- families that are refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fields"), (RECURRENT | CROSS_ATTENTION).items(), ids=(RECURRENT | CROSS_ATTENTION))
def test_state_that_cannot_be_rolled_back(name, fields):
    if is_missing(name):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    target = make_target(name, fields)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        get_drafter(target)
    # Nor does a drafter help that fits by its sizes.
    text = target.config.get_text_config(decoder=True)
    lookalike = tiny_target("qwen3", num_hidden_layers=text.num_hidden_layers, hidden_size=text.hidden_size)
    assert lookalike.config.vocab_size == text.vocab_size
    with pytest.raises(ValueError, match="cannot be rolled back|stateful"):
        target.generate(input_ids=tiny_prompt(), assistant_model=make_noisy_copy(lookalike), max_new_tokens=4)


@pytest.mark.parametrize(("name", "fields"), WITHOUT_CACHE.items(), ids=WITHOUT_CACHE)
def test_cache_that_does_not_hold_the_text(name, fields):
    target = make_target(name, fields)
    with pytest.raises(ValueError, match=r"cache .* Call `generate` without `assistant_model`"):
        target.generate(input_ids=tiny_prompt(), assistant_model=get_drafter(target), max_new_tokens=4)


@pytest.mark.parametrize(("name", "fields"), SCALED_LOGITS.items(), ids=SCALED_LOGITS)
def test_scaled_logits(name, fields):
    with pytest.raises(ValueError, match="multiplies or divides its logits by"):
        get_drafter(make_target(name, fields))


def test_encoder_decoder():
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder"):
        get_drafter(T5ForConditionalGeneration(config))


def test_layers_that_the_target_does_not_return():
    target = make_target("longcat_flash")
    drafter = get_drafter(target, DSparkConfig(target_layer_ids=[0, 3]))
    with pytest.raises(ValueError, match=r"`target_layer_ids` \[0, 3\] go past the 2 layers"):
        target.generate(input_ids=tiny_prompt(), assistant_model=drafter, max_new_tokens=4)


def test_target_that_does_not_use_its_cache():
    target = tiny_target("qwen3")
    target.generation_config.use_cache = False
    with pytest.raises(ValueError, match="`use_cache` is false.*Set it to true"):
        target.generate(input_ids=tiny_prompt(), assistant_model=get_drafter(target), max_new_tokens=4)
