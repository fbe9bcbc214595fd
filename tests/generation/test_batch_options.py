"""Options of `generate` on a ragged batch mean what they mean in plain batched decoding."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

from dspark_hf import DSparkConfig, _compat, custom_generate, get_drafter

from ..parity.fixtures import load_drafter, load_target, load_tensors
from ..tiny import tiny_target
from .test_hook import Recorder
from .test_options import only_even, processor_options, tokenizer

CASE = "qwen3-dspark-vanilla"
NEW_TOKENS = 30
PAD = 0

__all__ = ["tokenizer"]


@pytest.fixture(scope="module")
def target():
    model = load_target(CASE)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


@pytest.fixture(scope="module")
def drafter():
    return load_drafter(CASE)


@pytest.fixture(scope="module")
def inputs():
    """Three prompts of different lengths."""
    prompt = load_tensors(CASE)["input_ids"][0].tolist()
    prompts = [prompt, prompt[:-9], prompt[5:-2]]
    width = len(prompt)
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
    }


@pytest.fixture(scope="module")
def texts(target, inputs):
    """New tokens of each row in plain greedy decoding."""
    return plain(target, inputs)[:, inputs["input_ids"].shape[1] :].tolist()


def plain(target, inputs, **options):
    return target.generate(**inputs, **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options)


def both(target, drafter, inputs, make_options=dict, **options):
    """Output of plain decoding and with the drafter; `make_options` makes objects that remember things."""
    return [
        plain(target, inputs, **helper, **make_options(), **options) for helper in ({}, {"assistant_model": drafter})
    ]


def assert_ragged(drafter):
    """The rows did accept different numbers of tokens: else the test shows nothing."""
    assert any(entry.emitted % entry.rows for entry in drafter.last_stats.rounds)


@pytest.mark.parametrize("name", processor_options([0] * NEW_TOKENS))
def test_processor(target, drafter, inputs, texts, name):
    options = processor_options(texts[0])[name]
    expected, output = both(target, drafter, inputs, **options)
    assert output.tolist() == expected.tolist()
    assert output[:, inputs["input_ids"].shape[1] :].tolist() != texts
    assert drafter.last_stats.total("accepted") > 0


class Alternating(LogitsProcessor):
    """Remembers how often it was asked and with what; forbids other tokens each time."""

    def __init__(self, vocab: int):
        self.calls, self.last, self.vocab = 0, None, vocab

    def __call__(self, input_ids, scores):
        if self.last is not None:
            # One more token each time, and the same text before it.
            assert input_ids[:, :-1].tolist() == self.last.tolist()
        self.last = input_ids.clone()
        self.calls += 1
        return scores.masked_fill(torch.arange(self.vocab) % 3 == self.calls % 3, -torch.inf)


class Counting(LogitsProcessor):
    """Its state depends on the tokens that it saw, row by row, and on its calls."""

    def __init__(self, bias: torch.Tensor):
        self.bias, self.calls = bias, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + self.bias * ((self.calls + input_ids[:, -1:]) % 4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_processor_that_remembers(target, drafter, inputs, rows, temperature):
    """It sees what it sees in plain decoding; alone, the very object of the user does."""
    few = {name: values[:rows] for name, values in inputs.items()}
    bias = torch.randn(rows, target.config.vocab_size, generator=torch.Generator().manual_seed(0))
    made = []

    def options():
        made.append(
            LogitsProcessorList([Counting(bias), *([Alternating(target.config.vocab_size)] if rows == 1 else [])])
        )
        return {"logits_processor": made[-1], "repetition_penalty": 1.2}

    expected, output = both(target, drafter, few, options)
    assert output.tolist() == expected.tolist()
    assert drafter.last_stats.total("accepted") > 0
    if rows == 1:
        assert [entry.calls for entry in made[1]] == [entry.calls for entry in made[0]] == [NEW_TOKENS] * 2


def test_processor_is_copied_for_rows_that_generate(target, drafter, inputs, texts):
    """Copies may be dear: one each for drafting and for verifying, none for rows that have ended."""

    class Dear(LogitsProcessor):
        copies = 0

        def __call__(self, input_ids, scores):
            return scores + 0.0

        def __deepcopy__(self, memo):
            Dear.copies += 1
            return Dear()

    options = {"logits_processor": LogitsProcessorList([Dear()]), "eos_token_id": texts[0][0]}
    plain(target, inputs, assistant_model=drafter, **options)
    rounds = drafter.last_stats.rounds
    assert min(entry.rows for entry in rounds) < 3
    assert 0 < Dear.copies - 3 <= 2 * sum(entry.rows for entry in rounds)


def test_processor_that_cannot_be_copied(target, drafter, inputs):
    class Stubborn(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

        def __deepcopy__(self, memo):
            raise RuntimeError("no copies of me")

    with pytest.raises(ValueError, match="Stubborn cannot be copied .no copies of me."):
        plain(target, inputs, assistant_model=drafter, logits_processor=LogitsProcessorList([Stubborn()]))


def test_processor_that_changes_the_shape(target, drafter, inputs):
    class Narrow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores[:, :10]

    with pytest.raises(ValueError, match="Narrow made scores of shape"):
        plain(target, inputs, assistant_model=drafter, logits_processor=LogitsProcessorList([Narrow()]))


@pytest.mark.parametrize("rows", [1, 3])
def test_synthid_watermark(target, drafter, inputs, rows):
    few = {name: values[:rows] for name, values in inputs.items()}
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    expected, output = both(target, drafter, few, watermarking_config=config)
    assert output.tolist() == expected.tolist()


def test_prefix_allowed_tokens_by_row(target, drafter, inputs):
    def by_row(row, ids):
        return only_even(row, ids) if row == 1 else list(range(row, 331))

    expected, output = both(target, drafter, inputs, prefix_allowed_tokens_fn=by_row)
    assert output.tolist() == expected.tolist()


# --- where rows end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 4, 11, 29])
def test_end_of_sequence(target, drafter, inputs, texts, place):
    options = {"eos_token_id": [texts[0][place], texts[2][3]]}
    expected, output = both(target, drafter, inputs, **options)
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("eos", [False, True])
def test_stop_strings(target, drafter, inputs, texts, tokenizer, eos):
    """Without an end-of-sequence token plain decoding goes on with a row that met its string, until all have."""
    options = {"stop_strings": [f"w{texts[0][7]}", f"w{texts[1][12]}"], "tokenizer": tokenizer}
    if eos:
        options["eos_token_id"] = texts[2][20]
    expected, output = both(target, drafter, inputs, **options)
    assert output.tolist() == expected.tolist()


class StopAt(StoppingCriteria):
    """Ends rows at a token of their own, and remembers what it was asked."""

    def __init__(self, tokens):
        self.tokens, self.asked = torch.tensor(tokens), []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append((input_ids.tolist(), None if scores is None else len(scores)))
        return input_ids[:, -1] == self.tokens


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("places", [(3, 12, 7), (20, 0, 1), (9, 9, 9)])
def test_stopping_criterion(target, drafter, inputs, texts, places, eos, scores):
    """It is asked about the same columns as in plain decoding, in the same order."""
    tokens = [row[place] for row, place in zip(texts, places, strict=True)]
    made = []

    def options():
        made.append(StopAt(tokens))
        given = {"stopping_criteria": StoppingCriteriaList([made[-1]])}
        return given | ({"eos_token_id": texts[1][25]} if eos else {})

    expected, output = both(target, drafter, inputs, options, return_dict_in_generate=scores, output_scores=scores)
    if scores:
        expected, output = expected.sequences, output.sequences
    assert output.tolist() == expected.tolist()
    assert made[1].asked == made[0].asked


def test_max_time(target, drafter, inputs, texts):
    expected, output = both(target, drafter, inputs, max_time=1e-9)
    assert output.tolist() == expected.tolist()
    expected, output = both(target, drafter, inputs, max_time=600.0)
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("eos", [False, True])
def test_streamer(target, drafter, inputs, texts, eos):
    made = []

    def options():
        made.append(Recorder())
        return {"streamer": made[-1]} | ({"eos_token_id": [texts[0][5], texts[1][9]]} if eos else {})

    both(target, drafter, inputs, options)
    assert made[1].events == made[0].events
    assert_ragged(drafter)


# --- what is returned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [False, True])
def test_everything_that_can_be_returned(target, drafter, inputs, texts, eos):
    model = copy.deepcopy(target)
    model.set_attn_implementation("eager")
    expected, output = both(
        model,
        drafter,
        inputs,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
        repetition_penalty=1.1,
        eos_token_id=[texts[0][5], texts[1][9]] if eos else None,
    )
    assert output.sequences.tolist() == expected.sequences.tolist()
    start = inputs["input_ids"].shape[1]
    new = expected.sequences[:, start:]
    lengths = [NEW_TOKENS] * 3
    if eos:
        ended = (new == texts[0][5]) | (new == texts[1][9])
        lengths = [row.tolist().index(True) + 1 if row.any() else new.shape[1] for row in ended]
    for name in ("scores", "logits"):
        assert len(output[name]) == len(expected[name])
        for column, (ours, theirs) in enumerate(zip(output[name], expected[name], strict=True)):
            rows = [row for row in range(3) if column < lengths[row]]
            torch.testing.assert_close(ours[rows], theirs[rows], atol=1e-4, rtol=1e-4)
    for name in ("hidden_states", "attentions"):
        assert len(output[name]) == len(expected[name])
        for column, (ours, theirs) in enumerate(zip(output[name], expected[name], strict=True)):
            rows = [row for row in range(3) if column < lengths[row]]
            for our_layer, their_layer in zip(ours, theirs, strict=True):
                assert our_layer.shape == their_layer.shape
                if column or name == "hidden_states":
                    torch.testing.assert_close(our_layer[rows], their_layer[rows], atol=1e-4, rtol=1e-4)


# --- prompts -------------------------------------------------------------------------------------------------------


def test_prompts_as_embeddings(target, drafter, inputs):
    given = {
        "inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    expected, output = both(target, drafter, given)
    assert output.tolist() == expected.tolist()
    assert_ragged(drafter)


def test_prompts_of_one_length_without_a_mask(target, drafter, inputs):
    ids = inputs["input_ids"][:, -12:]
    expected, output = both(target, drafter, {"input_ids": ids})
    assert output.tolist() == expected.tolist()
    assert_ragged(drafter)


def test_num_return_sequences(target, drafter, inputs):
    torch.manual_seed(0)
    output = plain(target, inputs, assistant_model=drafter, do_sample=True, num_return_sequences=3)
    assert output.shape == (9, inputs["input_ids"].shape[1] + NEW_TOKENS)
    width = inputs["input_ids"].shape[1]
    assert output[:, :width].tolist() == inputs["input_ids"].repeat_interleave(3, dim=0).tolist()
    assert len({tuple(row) for row in output.tolist()}) > 3


def test_custom_generate(target, drafter, inputs):
    expected = plain(target, inputs)
    assert plain(target, inputs, custom_generate=custom_generate(drafter)).tolist() == expected.tolist()


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_threshold(target, drafter, inputs, threshold):
    """Proposals of different lengths are verified together."""
    expected = plain(target, inputs)
    output = plain(target, inputs, assistant_model=drafter, dspark_confidence_threshold=threshold)
    assert output.tolist() == expected.tolist()
    rounds = drafter.last_stats.rounds
    assert sum(entry.verified for entry in rounds) < sum(entry.drafted for entry in rounds)


# --- a conversation that goes on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("ends", [False, True])
def test_cache_passed_back(family, ends):
    """The cache of a batch serves the next turn, also where a sliding window has moved on.

    Where rows ended at different columns there is none: `None` makes the next turn run the whole text.
    """
    model = tiny_target(family)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    prompts = [list(range(5, 17)), list(range(40, 45)), list(range(70, 89))]
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    first = {"input_ids": ids, "attention_mask": mask}
    eos = plain(model, first)[0, width + 5].item() if ends else None
    drafter = get_drafter(model, DSparkConfig(block_size=4, num_hidden_layers=1))
    outputs = []
    for helper in ({}, {"assistant_model": drafter}):
        turn = plain(model, first, **helper, return_dict_in_generate=True, eos_token_id=eos)
        cache = turn.get(_compat.CACHE_ARGUMENT)
        if helper and ends:
            assert cache is None
        else:
            assert cache.get_seq_length() == turn.sequences.shape[1] - 1
        alive = torch.ones_like(turn.sequences[:, width:])
        if ends:
            at_end = turn.sequences[:, width:] == eos
            alive = (at_end.cumsum(dim=1) - at_end.long() == 0).long()
        second = {
            "input_ids": torch.cat([turn.sequences, ids[:, -3:]], dim=1),
            "attention_mask": torch.cat([mask, alive, torch.ones(3, 3, dtype=torch.long)], dim=1),
            _compat.CACHE_ARGUMENT: cache,
        }
        outputs.append((turn.sequences.tolist(), plain(model, second, **helper).tolist()))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("returns_dict", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_own_cache_is_never_left_with_some_rows(family, returns_dict, ends):
    """A cache that the user gives holds all rows afterwards, or nothing; either way it serves the next turn."""
    model = tiny_target(family)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    drafter = get_drafter(model, DSparkConfig(block_size=4, num_hidden_layers=1))
    ids = torch.arange(5, 5 + 3 * 14).view(3, 14)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    first = {"input_ids": ids * mask, "attention_mask": mask}
    eos = plain(model, first)[0, ids.shape[1] + 5].item() if ends else None
    cache = DynamicCache(config=model.config)
    options = {"assistant_model": drafter, "return_dict_in_generate": returns_dict, "eos_token_id": eos}
    turn = plain(model, first, **options, **{_compat.CACHE_ARGUMENT: cache})
    sequences = turn.sequences if returns_dict else turn
    is_whole = returns_dict and not ends
    assert cache.get_seq_length() == (sequences.shape[1] - 1 if is_whole else 0)
    second = {
        "input_ids": torch.cat([sequences, ids[:, -3:]], dim=1),
        "attention_mask": torch.cat([mask, torch.ones(3, sequences.shape[1] - 11, dtype=torch.long)], dim=1),
    }
    again = plain(model, second, assistant_model=drafter, **{_compat.CACHE_ARGUMENT: cache})
    assert again.tolist() == plain(model, second).tolist()
