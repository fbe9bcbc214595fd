"""Several prompts in one call: every row is what it is alone, whatever the rows beside it do."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.generation import decoding

from ..tiny import tiny_target
from .oracles import hidden_states_of_solo_run, make_oracle

FAMILIES = ["qwen3", "llama", "gemma3", "gemma4"]
LENGTHS = [5, 19, 12, 1]
NEW_TOKENS = 20
PAD = 0


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return endless(request.param)


def endless(family: str, **overrides):
    model = tiny_target(family, **overrides)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def padded(prompts: list[list[int]], extra: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of `generate` for prompts of different lengths, padded on the left, `extra` columns more than needed."""
    width = max(map(len, prompts)) + extra
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(5, 300) for _ in range(length)] for length in lengths]


def plain(target, inputs, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    return target.generate(**inputs, **options)


def texts(sequences: torch.Tensor, prompts: list[list[int]], extra: int = 0) -> list[list[int]]:
    """Each row's text without its padding on the left."""
    width = max(map(len, prompts)) + extra
    return [row[width - len(prompt) :] for row, prompt in zip(sequences.tolist(), prompts, strict=True)]


def some_wrong(seed: int = 0, share: float = 0.3):
    """Tells tokens that a drafter gets wrong, rarely in the first row, often in the last."""
    return lambda row, position: random.Random(f"{seed}-{row}-{position}").random() < share * (0.3 + row)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("accepts", ["all", "none", "some"])
def test_rows_equal_plain_and_solo_runs(target, accepts, attention):
    target.set_attn_implementation(attention)
    prompts = random_prompts(LENGTHS)
    inputs = padded(prompts)
    expected = plain(target, inputs)
    sequences = texts(expected, prompts)
    wrong = {"all": lambda *_: False, "none": lambda *_: True, "some": some_wrong()}[accepts]
    oracle = make_oracle(target).follow_rows(sequences, wrong)
    output = plain(target, inputs, assistant_model=oracle)
    assert output.tolist() == expected.tolist()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert plain(target, {"input_ids": torch.tensor([prompt])})[0].tolist() == sequence
    rounds = oracle.last_stats.rounds
    assert sum(entry.emitted for entry in rounds) == len(prompts) * (NEW_TOKENS - 1)
    lengths = {"all": 5, "none": 1}
    if accepts in lengths:
        assert {entry.emitted / entry.rows for entry in rounds[:-1]} == {lengths[accepts]}
    else:
        assert len({entry.rows for entry in rounds}) > 1, "all rows ended in the same round"


def test_a_row_does_not_depend_on_its_neighbours(target):
    """The same row among two different sets of neighbours: same text, same rounds."""
    drafter = get_drafter(target, DSparkConfig(block_size=4, num_hidden_layers=2))
    row = random_prompts([9], seed=3)[0]
    outputs = []
    for seed, lengths in ((4, [2, 17]), (5, [11, 4, 8])):
        prompts = [*random_prompts(lengths, seed), row]
        outputs.append(texts(plain(target, padded(prompts), assistant_model=drafter), prompts)[-1])
    assert outputs[0] == outputs[1]


def test_no_row_waits_for_another():
    """A row whose drafts are all kept needs as few rounds beside a row whose drafts are all rejected."""
    target = endless("qwen3")
    prompts = random_prompts([6, 6])
    sequences = texts(plain(target, padded(prompts)), prompts)
    oracle = make_oracle(target).follow_rows(sequences, lambda row, _: row == 1)
    plain(target, padded(prompts), assistant_model=oracle)
    rows = [entry.rows for entry in oracle.last_stats.rounds]
    assert rows == [2] * 4 + [1] * (NEW_TOKENS - 1 - 4)


def test_accepted_length_by_position(target):
    """Long contexts can be told from short ones, in text positions of each row."""
    prompts = random_prompts([3, 20])
    sequences = texts(plain(target, padded(prompts)), prompts)
    # Right before position 16, wrong after it.
    oracle = make_oracle(target).follow_rows(sequences, lambda _, position: position >= 16)
    plain(target, padded(prompts), assistant_model=oracle)
    lengths = oracle.last_stats.accepted_length_by_position(width=8)
    assert list(lengths) == [0, 8, 16, 24, 32]
    assert lengths[0] == 5 and lengths[24] == lengths[32] == 1
    rounds = oracle.last_stats.rounds
    assert rounds[0].anchors == (3, 20)
    assert all(sum(entry.emitted_by_row) == entry.emitted for entry in rounds)


def test_memory_does_not_grow_with_rejected_tokens(target, monkeypatch):
    """The cache is never wider than the longest row that still generates, and has as many rows as generate."""
    prompts = random_prompts(LENGTHS)
    sequences = texts(plain(target, padded(prompts)), prompts)
    checked = []
    monkeypatch.setattr(decoding.DecodingLoop, "_go_on", checking(decoding.DecodingLoop._go_on, prompts, checked))
    oracle = make_oracle(target, block_size=6).follow_rows(sequences, some_wrong(share=0.5))
    plain(target, padded(prompts), assistant_model=oracle)
    assert len(checked) == len(oracle.last_stats.rounds) + 1


def checking(original, prompts, checked):
    """`DecodingLoop._go_on` that looks at lengths, masks and positions afterwards."""

    def go_on(self, rejected):
        original(self, rejected)
        checked.append(len(self.active))
        if not self.active:
            return
        session = self.session
        start = self.rows.prompt_length
        text = [len(prompts[row]) + self.rows.lengths[row] - start for row in self.active]
        # Everything but the anchor has been fed.
        assert [session.columns - padding for padding in session.padding] == [length - 1 for length in text]
        assert session.columns == session.cache.get_seq_length()
        if len(prompts) > 1:
            assert session.columns == max(text) - 1 + min(session.padding)
        assert session.anchor_positions.tolist() == [length - 1 for length in text]
        mask = session.model_kwargs.get("attention_mask")
        assert [session.columns + 1] * len(text) == text if mask is None else mask.sum(dim=1).tolist() == text
        assert session.model_kwargs["position_ids"][:, -1].tolist() == [length - 1 for length in text]
        for layer in session.cache.layers:
            if layer.is_initialized:
                assert layer.keys.shape[0] == len(self.active)
                window = getattr(layer, "sliding_window", None)
                held = session.columns if window is None else min(session.columns, window - 1)
                assert layer.keys.shape[2] == layer.values.shape[2] == held

    return go_on


# --- how rows end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_rows_end_at_their_own_end_of_sequence(target, share):
    """A row that ends leaves the batch, and is padded as plain decoding pads it."""
    prompts = random_prompts(LENGTHS)
    sequences = texts(plain(target, padded(prompts)), prompts)
    ends = [sequences[0][LENGTHS[0] + 3], sequences[1][LENGTHS[1] + 9]]
    expected = plain(target, padded(prompts), eos_token_id=ends)
    oracle = make_oracle(target).follow_rows(sequences, some_wrong(share=share))
    output = plain(target, padded(prompts), assistant_model=oracle, eos_token_id=ends)
    assert output.tolist() == expected.tolist()
    assert oracle.last_stats.rounds[-1].rows < len(prompts)


def test_all_rows_end_with_the_first_token(target):
    prompts = random_prompts([7, 3])
    first = plain(target, padded(prompts), max_new_tokens=1)[:, -1].tolist()
    drafter = get_drafter(target, DSparkConfig(block_size=3))
    expected = plain(target, padded(prompts), eos_token_id=first)
    assert plain(target, padded(prompts), eos_token_id=first, assistant_model=drafter).tolist() == expected.tolist()
    assert drafter.last_stats.rounds == []


def test_mask_longer_than_the_text():
    target = endless("qwen3")
    inputs = padded(random_prompts([5, 9]))
    inputs["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    drafter = get_drafter(target, DSparkConfig(block_size=3, num_hidden_layers=1))
    with pytest.raises(ValueError, match="After a prompt of 11 tokens, as `attention_mask` .* has 9 entries"):
        plain(target, inputs, assistant_model=drafter)


def test_inputs_with_a_row_per_prompt_go_with_their_rows():
    """An input that only the target knows, with one row per prompt, is cut down with the batch."""
    target = endless("qwen3")
    shifts, forward = torch.tensor([[0.0], [0.5], [-0.5]]), target.forward

    def shifted(*args, shift, **kwargs):
        output = forward(*args, **kwargs)
        assert shift.shape[0] == output.logits.shape[0]
        output.logits = output.logits * (1 + shift[:, None] * torch.linspace(-1, 1, output.logits.shape[-1]))
        return output

    target.forward = shifted
    target._validate_model_kwargs = lambda kwargs: None
    prompts = random_prompts([5, 9, 7])
    inputs = padded(prompts) | {"shift": shifts}
    expected = plain(target, inputs)
    end = expected[0, 9 + 4].item()
    expected = plain(target, inputs, eos_token_id=end)
    drafter = get_drafter(target, DSparkConfig(block_size=4, num_hidden_layers=1))
    output = plain(target, inputs, eos_token_id=end, assistant_model=drafter)
    assert output.tolist() == expected.tolist()
    assert drafter.last_stats.rounds[-1].rows < 3


# --- random batches ------------------------------------------------------------------------------------------------

TARGETS = {
    "qwen3": endless("qwen3", num_hidden_layers=2),
    "gemma3": endless("gemma3", num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
}


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    return {
        "family": draw(st.sampled_from(sorted(TARGETS))),
        "prompts": random_prompts(lengths, draw(st.integers(0, 99))),
        "extra": draw(st.integers(0, 3)),
        "new_tokens": draw(st.integers(1, 12)),
        "block_size": draw(st.integers(1, 6)),
        "draft_tokens": draw(st.integers(1, 6)),
        "sliding": draw(st.booleans()),
        "end": draw(st.none() | st.tuples(st.integers(0, 3), st.integers(0, 11))),
        "seed": draw(st.integers(0, 999)),
        "share": draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
    }


@pytest.mark.slow
@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(batches())
def test_random_batches(case):
    """Outputs, cache lengths, masks and positions fit together; drafts see what a solo run shows them."""
    target, prompts = TARGETS[case["family"]], case["prompts"]
    inputs = padded(prompts, case["extra"])
    endless_text = plain(target, inputs, max_new_tokens=case["new_tokens"])
    sequences = texts(endless_text, prompts, case["extra"])
    eos = None
    if case["end"] is not None:
        row, place = case["end"][0] % len(prompts), case["end"][1] % case["new_tokens"]
        eos = endless_text[row, inputs["input_ids"].shape[1] + place].item()
    options = {"max_new_tokens": case["new_tokens"], "eos_token_id": eos}
    layers = {"layer_types": ["sliding_attention"], "sliding_window": 4} if case["sliding"] else {}
    oracle = make_oracle(target, case["block_size"], **layers)
    oracle.follow_rows(sequences, some_wrong(case["seed"], case["share"]))
    with pytest.MonkeyPatch.context() as patch:
        checked: list[int] = []
        patch.setattr(decoding.DecodingLoop, "_go_on", checking(decoding.DecodingLoop._go_on, prompts, checked))
        output = plain(
            target,
            inputs,
            assistant_model=oracle,
            dspark_num_draft_tokens=min(case["draft_tokens"], case["block_size"]),
            **options,
        )
    assert output.tolist() == plain(target, inputs, **options).tolist()
    for row, anchor, hidden in oracle.seen[-3:]:
        expected = hidden_states_of_solo_run(target, oracle, sequences[row], anchor)
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
