"""What Transformers promises of assisted generation holds with a drafter in place of an assistant.

One test per promise, in the manner of Transformers' own tests: same output as plain decoding whatever is asked for
beside it, outputs of the shapes that plain decoding gives, lengths kept, the caller's settings left as they were.
"""

from __future__ import annotations

import copy
from threading import Thread

import pytest
import torch
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation import GenerateDecoderOnlyOutput

from dspark_hf import DSparkConfig, embedded, get_drafter

from ..tiny import FAMILIES, tiny_prompt, tiny_target

RETURNED = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request):
    target = tiny_target(request.param)
    target.set_attn_implementation("eager")
    return target, get_drafter(target, DSparkConfig(block_size=4, num_hidden_layers=1))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_output_is_complete(pair, do_sample, batch):
    """Everything that can be returned comes in the same number and shapes as from plain decoding."""
    target, drafter = pair
    options = dict.fromkeys(RETURNED, True) | {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": do_sample}
    ids = tiny_prompt(11, batch)
    expected, output = (
        target.generate(input_ids=ids, return_dict_in_generate=True, **helper, **options)
        for helper in ({}, {"assistant_model": drafter})
    )
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert output.sequences.shape == expected.sequences.shape
    assert list(output) == list(expected)
    for name in ("scores", "logits"):
        assert [tuple(entry.shape) for entry in output[name]] == [tuple(entry.shape) for entry in expected[name]]
    for name in ("hidden_states", "attentions"):
        shapes = [[[tuple(layer.shape) for layer in token] for token in result[name]] for result in (output, expected)]
        assert shapes[0] == shapes[1]
    if not do_sample:
        assert output.sequences.tolist() == expected.sequences.tolist()
        for ours, theirs in zip(output.scores, expected.scores, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("returned", [(), *((name,) for name in RETURNED), RETURNED])
def test_what_is_returned_does_not_change_the_text(pair, returned):
    target, drafter = pair
    ids, options = tiny_prompt(8), {"max_new_tokens": 12, "do_sample": False}
    expected = target.generate(input_ids=ids, **options)
    output = target.generate(
        input_ids=ids,
        assistant_model=drafter,
        return_dict_in_generate=bool(returned),
        **dict.fromkeys(returned, True),
        **options,
    )
    assert (output.sequences if returned else output).tolist() == expected.tolist()


def test_scores_are_those_of_the_chosen_tokens(pair):
    """`compute_transition_scores` reads the output of assisted decoding like any other."""
    target, drafter = pair
    output = target.generate(
        input_ids=tiny_prompt(8, 2),
        assistant_model=drafter,
        max_new_tokens=10,
        do_sample=True,
        temperature=0.8,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=None,
    )
    scores = target.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    for column, values in enumerate(output.scores):
        chosen = torch.log_softmax(values, dim=-1).gather(1, output.sequences[:, 8 + column, None]).squeeze(1)
        torch.testing.assert_close(scores[:, column], chosen)
        assert chosen.isfinite().all()


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"max_new_tokens": 7}, 7),
        ({"max_length": 20}, 12),
        ({"min_new_tokens": 9, "max_new_tokens": 9}, 9),
        ({"min_length": 17, "max_length": 17}, 9),
        ({"max_new_tokens": 1}, 1),
    ],
)
def test_lengths(pair, options, length):
    target, drafter = pair
    output = target.generate(input_ids=tiny_prompt(8), assistant_model=drafter, eos_token_id=None, **options)
    assert output.shape == (1, 8 + length)


@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient"])
def test_settings_are_left_as_they_were(pair, schedule):
    """No schedule and no call changes the configs of target or drafter, nor the one that was passed."""
    target, drafter = pair
    config = GenerationConfig(
        max_new_tokens=10, do_sample=False, num_assistant_tokens=3, num_assistant_tokens_schedule=schedule
    )
    before = copy.deepcopy([config.to_dict(), target.generation_config.to_dict(), drafter.config.to_dict()])
    output = target.generate(input_ids=tiny_prompt(8), assistant_model=drafter, generation_config=config)
    assert [config.to_dict(), target.generation_config.to_dict(), drafter.config.to_dict()] == before
    expected = target.generate(input_ids=tiny_prompt(8), generation_config=config)
    assert output.tolist() == expected.tolist()
    assert {entry.drafted for entry in drafter.last_stats.rounds} <= {0, 3}


def test_further_arguments_of_the_target_reach_it():
    """GPT-2 adds an embedding for `token_type_ids`: another type, another text, with and without a drafter."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.4)
    target = GPT2LMHeadModel(config).eval()
    target.generation_config.eos_token_id = target.generation_config.pad_token_id = None
    drafter = get_drafter(target, DSparkConfig(block_size=4, num_hidden_layers=1))
    ids = torch.randint(3, 90, (2, 9))
    texts = []
    for token_type in (5, 60):
        given = {"input_ids": ids, "token_type_ids": torch.full_like(ids, token_type)}
        options = {"max_new_tokens": 12, "do_sample": False}
        expected = target.generate(**given, **options)
        assert target.generate(**given, **options, assistant_model=drafter).tolist() == expected.tolist()
        texts.append(expected.tolist())
    assert texts[0] != texts[1]


def test_prompt_of_one_token_and_default_prompt(pair):
    target, drafter = pair
    options = {"max_new_tokens": 8, "do_sample": False}
    for given in ({"input_ids": torch.tensor([[7]])}, {}):
        expected = target.generate(**given, **options)
        assert target.generate(**given, **options, assistant_model=drafter).tolist() == expected.tolist()


def test_training_mode_and_gradients_are_left_alone(pair):
    target, drafter = pair
    output = target.generate(input_ids=tiny_prompt(8), assistant_model=drafter, max_new_tokens=4)
    assert not output.requires_grad
    assert all(parameter.grad is None for parameter in (*target.parameters(), *drafter.parameters()))
    assert not target.training


# --- front ends ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded_pair():
    return embedded.load_embedded_pair()


@pytest.mark.parametrize("texts", ["import os\n", ["import os\n", "def main(argument):\n    return", "The"]])
def test_pipeline(embedded_pair, texts):
    target, tokenizer, drafter = embedded_pair
    options = {"max_new_tokens": 24, "do_sample": False}
    if isinstance(texts, list):
        options["batch_size"] = 3
    outputs = []
    for helper in ({}, {"assistant_model": drafter}):
        generate = pipeline("text-generation", model=target, tokenizer=tokenizer, **helper)
        if generate.tokenizer.pad_token_id is None:
            generate.tokenizer.pad_token_id = 0
        outputs.append(generate(texts, **options))
    assert outputs[0] == outputs[1]
    assert drafter.last_stats.batch == (3 if isinstance(texts, list) else 1)


def test_text_streamers(embedded_pair, capsys):
    target, tokenizer, drafter = embedded_pair
    inputs = tokenizer("import os\n", return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False, "assistant_model": drafter}
    expected = tokenizer.decode(target.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :])
    target.generate(**inputs, **options, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == expected.strip()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=target.generate, kwargs={**inputs, **options, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == expected
    assert len(pieces) > 2
