"""Every option of `generate` means with a drafter what it means without one, and what cannot be is said clearly."""

from __future__ import annotations

import copy
import random
import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    EpsilonLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from dspark_hf import DSparkConfig, DSparkDrafter, SpeculativeEngine, _compat, custom_generate, get_drafter

from ..parity.fixtures import load_drafter, load_target, load_tensors
from ..tiny import tiny_prompt, tiny_target
from .oracles import make_oracle

CASE = "qwen3-dspark-vanilla"
GAMMA = 7
NEW_TOKENS = 30


@pytest.fixture(scope="module")
def target():
    model = load_target(CASE)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def drafter():
    return load_drafter(CASE)


@pytest.fixture(scope="module")
def prompt():
    return load_tensors(CASE)["input_ids"]


@pytest.fixture(scope="module")
def text(target, prompt):
    """New tokens of plain greedy decoding; a shorter run gives their beginning."""
    return plain(target, prompt)[0, prompt.shape[1] :].tolist()


@pytest.fixture(scope="module")
def layout(target, drafter, prompt):
    """Of each new token, whether it was drafted and at which place of its round it stands, without any option."""
    drafted(target, drafter, prompt)
    places = [(False, 0)]
    for entry in drafter.last_stats.rounds:
        places += [(place < entry.accepted, place) for place in range(entry.emitted)]
    return places


@pytest.fixture
def settings(target):
    """The target's own generation config, put back afterwards."""
    before = copy.deepcopy(target.generation_config)
    yield target.generation_config
    target.generation_config = before


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"w{index}" for index in range(331)]
    words[329], words[326] = "<unk>", "abcdef"  # Transformers' search for stop strings decodes after "abcdef".
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.fixture
def warnings_of(caplog):
    """Counts warnings that contain a text; what is said once may be said again."""
    logging.warning_once.cache_clear()
    return lambda part: sum(part in record.getMessage() for record in caplog.records)


def plain(target, prompt, **options):
    return target.generate(input_ids=prompt, **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options)


def drafted(target, drafter, prompt, **options):
    return plain(target, prompt, assistant_model=drafter, **options)


def cache_of(output):
    return output[_compat.CACHE_ARGUMENT]


def rounds(drafter, name):
    return [getattr(entry, name) for entry in drafter.last_stats.rounds]


def first_at(text, layout, accept):
    """The first index whose token stands there for the first time and whose place in its round `accept` takes."""
    return next(
        index
        for index, (was_drafted, place) in enumerate(layout)
        if text[index] not in text[:index] and index > 0 and accept(was_drafted, place)
    )


# --- how much is drafted and verified ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, GAMMA),
        ({"num_assistant_tokens": 20}, GAMMA),
        *(({"num_assistant_tokens": cap}, min(cap, GAMMA)) for cap in (1, 3, GAMMA, GAMMA + 1)),
        *(({"dspark_num_draft_tokens": count}, count) for count in range(1, GAMMA + 1)),
        ({"dspark_num_draft_tokens": 5, "num_assistant_tokens": 2}, 5),
        ({"dspark_num_draft_tokens": 2, "num_assistant_tokens": 5}, 2),
    ],
)
def test_draft_length(target, drafter, prompt, text, options, expected):
    output = drafted(target, drafter, prompt, **options)
    assert output[0, prompt.shape[1] :].tolist() == text
    assert set(rounds(drafter, "drafted")) - {0} == {expected}
    assert max(rounds(drafter, "verified")) == expected


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"dspark_num_draft_tokens": 0}, ValueError, "is 0; this drafter's block size allows 1 to 7"),
        ({"dspark_num_draft_tokens": -1}, ValueError, "is -1; this drafter's block size allows 1 to 7"),
        ({"dspark_num_draft_tokens": GAMMA + 1}, ValueError, "is 8; this drafter's block size allows 1 to 7"),
        ({"dspark_num_draft_tokens": True}, TypeError, "is True; give a whole number"),
        ({"dspark_num_draft_tokens": 2.5}, TypeError, "is 2.5; give a whole number"),
        ({"num_assistant_tokens": 0}, ValueError, "`num_assistant_tokens` is 0"),
        ({"num_assistant_tokens": -4}, ValueError, "`num_assistant_tokens` is -4"),
        ({"dspark_confidence_threshold": -0.1}, ValueError, "is -0.1; it is a probability"),
        ({"dspark_confidence_threshold": 1.1}, ValueError, "is 1.1; it is a probability"),
        ({"dspark_confidence_threshold": float("nan")}, ValueError, "it is a probability"),
        ({"dspark_confidence_threshold": "0.5"}, TypeError, "give a probability"),
        ({"dspark_confidence_threshold": True}, TypeError, "give a probability"),
        ({"num_assistant_tokens": 2.5}, TypeError, "`num_assistant_tokens` is 2.5"),
        ({"num_beams": 2}, ValueError, "`num_beams` is 2"),
    ],
)
def test_values_out_of_range(target, drafter, prompt, options, error, says):
    with pytest.raises(error, match=says):
        drafted(target, drafter, prompt, **options)


def test_threshold(target, drafter, prompt, text):
    verified = []
    for threshold in (0.0, 0.5, 0.9, 1.0):
        output = drafted(target, drafter, prompt, dspark_confidence_threshold=threshold)
        assert output[0, prompt.shape[1] :].tolist() == text
        verified.append(sum(rounds(drafter, "verified")) / len(drafter.last_stats.rounds))
    assert verified == sorted(verified, reverse=True)
    assert len(set(verified)) == 4
    assert verified[-1] == 0
    assert set(rounds(drafter, "drafted")[:-1]) == {GAMMA}
    assert set(rounds(drafter, "proposed")) == {0}
    assert len(drafter.last_stats.rounds) == NEW_TOKENS - 1


def test_threshold_without_confidence_head(target, prompt, text, warnings_of):
    config = DSparkConfig(block_size=3, num_hidden_layers=1, enable_confidence_head=False)
    helper = get_drafter(target, config)
    for _ in range(2):
        output = drafted(target, helper, prompt, dspark_confidence_threshold=0.9)
        assert output[0, prompt.shape[1] :].tolist() == text
        assert rounds(helper, "verified")[0] == 3
    assert warnings_of("has no confidence head") == 1


def test_options_in_generation_configs(target, drafter, prompt, settings, tmp_path):
    given = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, dspark_num_draft_tokens=2, dspark_confidence_threshold=0.6
    )
    given.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert (loaded.dspark_num_draft_tokens, loaded.dspark_confidence_threshold) == (2, 0.6)
    seen = []
    for config in (given, loaded):
        target.generate(input_ids=prompt, assistant_model=drafter, generation_config=config)
        seen.append((rounds(drafter, "drafted"), rounds(drafter, "proposed")))
    settings.dspark_num_draft_tokens, settings.dspark_confidence_threshold = 2, 0.6
    drafted(target, drafter, prompt)
    seen.append((rounds(drafter, "drafted"), rounds(drafter, "proposed")))
    assert seen[0] == seen[1] == seen[2]
    assert set(seen[0][0]) - {0} == {2}
    assert set(seen[0][1]) == {0, 1, 2}
    # A call's own arguments come before both.
    drafted(target, drafter, prompt, dspark_num_draft_tokens=4, dspark_confidence_threshold=0.0)
    assert set(rounds(drafter, "drafted")) - {0} == {4}
    assert rounds(drafter, "proposed") == rounds(drafter, "drafted")


# --- where the text ends -------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    """Keeps what it is given, in order."""

    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append((tuple(value.shape), value.tolist()))

    def end(self):
        self.events.append("end")


def assert_same_run(target, drafter, prompt, **options):
    """Same sequence, same stream, same cache length as plain `generate`; returns the new tokens."""
    outputs, events = [], []
    for helper in ({}, {"assistant_model": drafter}):
        recorder = Recorder()
        outputs.append(
            plain(target, prompt, return_dict_in_generate=True, streamer=recorder, **helper, **copy.deepcopy(options))
        )
        events.append(recorder.events)
    assert outputs[1].sequences.tolist() == outputs[0].sequences.tolist()
    assert events[1] == events[0]
    assert cache_of(outputs[1]).get_seq_length() == cache_of(outputs[0]).get_seq_length()
    new = outputs[0].sequences[0, prompt.shape[1] :].tolist()
    assert len(events[0]) == len(new) + 2
    return new


@pytest.mark.parametrize("place", ["first token", "accepted, start", "accepted, middle", "bonus token", "list"])
def test_end_of_sequence(target, drafter, prompt, text, layout, place):
    index = {
        "first token": lambda: 0,
        "accepted, start": lambda: first_at(text, layout, lambda was_drafted, place: was_drafted and place == 0),
        "accepted, middle": lambda: first_at(text, layout, lambda was_drafted, place: was_drafted and place > 1),
        "bonus token": lambda: first_at(text, layout, lambda was_drafted, _: not was_drafted),
        "list": lambda: first_at(text, layout, lambda was_drafted, place: was_drafted and place > 1),
    }[place]()
    eos = [329, text[index]] if place == "list" else text[index]
    assert assert_same_run(target, drafter, prompt, eos_token_id=eos, pad_token_id=0) == text[: index + 1]
    assert sum(rounds(drafter, "emitted")) == index
    assert all(entry.accepted <= entry.emitted for entry in drafter.last_stats.rounds)


@pytest.mark.parametrize("length", range(1, 27))
def test_every_length(target, drafter, prompt, text, length):
    output = drafted(target, drafter, prompt, max_new_tokens=length, return_dict_in_generate=True)
    assert output.sequences[0, prompt.shape[1] :].tolist() == text[:length]
    assert cache_of(output).get_seq_length() == prompt.shape[1] + length - 1
    assert sum(rounds(drafter, "emitted")) == length - 1


def test_max_length(target, drafter, prompt, text):
    new = assert_same_run(target, drafter, prompt, max_new_tokens=None, max_length=prompt.shape[1] + 11)
    assert new == text[:11]


class StopAt(StoppingCriteria):
    """Ends the text after a token, and counts how often it is asked and about which length."""

    def __init__(self, token):
        self.token, self.lengths = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append((input_ids.shape[1], None if scores is None else len(scores)))
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("stop", ["accepted", "never"])
def test_stopping_criterion(target, drafter, prompt, text, layout, stop, scores):
    index = first_at(text, layout, lambda was_drafted, place: was_drafted and place > 1)
    asked = []
    for helper in ({}, {"assistant_model": drafter}):
        criterion = StopAt(text[index] if stop == "accepted" else 329)
        output = plain(
            target,
            prompt,
            stopping_criteria=StoppingCriteriaList([criterion]),
            return_dict_in_generate=scores,
            output_scores=scores,
            **helper,
        )
        new = (output.sequences if scores else output)[0, prompt.shape[1] :].tolist()
        assert new == (text[: index + 1] if stop == "accepted" else text)
        asked.append(criterion.lengths)
    assert asked[1] == asked[0]
    assert len(asked[0]) == len(new)


def test_stop_strings(target, drafter, prompt, text, layout, tokenizer):
    index = first_at(text, layout, lambda was_drafted, place: was_drafted and place > 1)
    new = assert_same_run(target, drafter, prompt, stop_strings=[f"w{text[index]}"], tokenizer=tokenizer)
    assert len(new) <= index + 1 < NEW_TOKENS
    assert f"w{text[index]}" in tokenizer.decode(new)


def test_max_time(target, drafter, prompt, text):
    assert assert_same_run(target, drafter, prompt, max_time=1e-9) == text[:1]
    assert assert_same_run(target, drafter, prompt, max_time=600.0) == text


# --- logits processors ---------------------------------------------------------------------------------------------


def only_even(_, input_ids):
    return list(range(0, 331, 2)) if len(input_ids) % 3 else list(range(331))


def processor_options(text):
    middle = text[12]
    return {
        "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": middle, "pad_token_id": 0},
        "min_length": {"min_length": 56, "eos_token_id": middle, "pad_token_id": 0},
        "bad_words_ids": {"bad_words_ids": [[text[3]], [text[8], text[9]]]},
        "repetition_penalty": {"repetition_penalty": 1.8},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "suppress_tokens": {"suppress_tokens": text[4:8]},
        "begin_suppress_tokens": {"begin_suppress_tokens": text[:1]},
        "forced_eos_token_id": {"forced_eos_token_id": 5, "max_new_tokens": 17},
        "sequence_bias": {"sequence_bias": [[[text[2], text[3]], -20.0], [[9], 4.0]]},
        "exponential_decay_length_penalty": {
            "exponential_decay_length_penalty": (5, 1.3),
            "eos_token_id": 11,
            "pad_token_id": 0,
        },
        "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": only_even},
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0, context_width=1)},
        "together": {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "min_new_tokens": 9,
            "eos_token_id": middle,
            "pad_token_id": 0,
            "forced_eos_token_id": 5,
            "max_new_tokens": 30,
        },
    }


@pytest.mark.parametrize("name", processor_options([0] * NEW_TOKENS))
def test_processor(target, drafter, prompt, text, name):
    new = assert_same_run(target, drafter, prompt, **processor_options(text)[name])
    assert new != text
    assert sum(rounds(drafter, "accepted")) > 0


@pytest.mark.parametrize("length", range(1, 13))
def test_forced_end_of_sequence_at_every_length(target, drafter, prompt, text, length):
    new = drafted(target, drafter, prompt, forced_eos_token_id=5, max_new_tokens=length)[0, prompt.shape[1] :]
    assert new.tolist() == [*text[: length - 1], 5]


@pytest.mark.parametrize("route", ["assistant_model", "custom_generate"])
def test_guidance(target, drafter, prompt, route):
    helper = drafter if route == "assistant_model" else custom_generate(drafter)
    with pytest.raises(ValueError, match="`guidance_scale` runs the target a second time"):
        plain(target, prompt, **{route: helper}, guidance_scale=1.5)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6, "top_k": 0}, {"min_p": 1.0, "top_k": 0}])
def test_sampling_from_one_token_is_greedy(target, drafter, prompt, text, options):
    drafted(target, drafter, prompt)
    accepted = rounds(drafter, "accepted")
    output = drafted(target, drafter, prompt, do_sample=True, temperature=1.7, **options)
    assert output[0, prompt.shape[1] :].tolist() == text
    assert rounds(drafter, "accepted") == accepted  # the drafts are processed too


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"temperature": 2.0, "top_k": 5}, [TemperatureLogitsWarper(2.0), TopKLogitsWarper(5)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
        ({"typical_p": 0.5}, [TypicalLogitsWarper(0.5)]),
        ({"epsilon_cutoff": 0.05}, [EpsilonLogitsWarper(0.05)]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_sampling_stays_in_the_allowed_set(target, drafter, prompt, options, warpers):
    length = prompt.shape[1]
    texts = []
    for seed in range(2):
        torch.manual_seed(seed)
        output = drafted(target, drafter, prompt, do_sample=True, max_new_tokens=16, **{"top_k": 0} | options)
        with torch.no_grad():
            logits = target(output).logits[0, length - 1 : -1].float()
        prefixes = [output[:, : length + index] for index in range(16)]
        scores = torch.cat(
            [LogitsProcessorList(warpers)(ids, row[None]) for ids, row in zip(prefixes, logits, strict=True)]
        )
        assert scores.isinf().any()
        assert scores.gather(1, output[0, length:, None]).isfinite().all()
        texts.append(output[0, length:].tolist())
    assert texts[0] != texts[1]


# --- what is returned ----------------------------------------------------------------------------------------------


def test_text_streamer(target, drafter, prompt, tokenizer, capsys):
    printed = []
    for helper in ({}, {"assistant_model": drafter}):
        plain(target, prompt, streamer=TextStreamer(tokenizer, skip_prompt=True), **helper)
        printed.append(capsys.readouterr().out)
    assert printed[1] == printed[0]
    assert len(printed[0].split()) == NEW_TOKENS


def assert_same_structure(actual, expected, path=""):
    """Same nesting of tuples, same shapes, values within 1e-4."""
    assert type(actual) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert actual.shape == expected.shape, f"{path}: {tuple(actual.shape)} and {tuple(expected.shape)}"
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4, msg=lambda text: f"{path}: {text}")
    elif isinstance(expected, tuple):
        assert len(actual) == len(expected), path
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same_structure(*pair, path=f"{path}[{index}]")
    else:
        assert actual == expected, path


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4"])
@pytest.mark.parametrize("wanted", ["everything", "scores", "hidden_states", "attentions"])
def test_dictionary(family, wanted):
    model = tiny_target(family)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("eager")
    fields = ["scores", "logits", "hidden_states", "attentions"] if wanted == "everything" else [wanted]
    options = {"return_dict_in_generate": True, "max_new_tokens": 20} | {f"output_{name}": True for name in fields}
    if wanted != "hidden_states":
        options["repetition_penalty"] = 1.2  # so that scores are not the logits
    ids = tiny_prompt(12)
    expected = plain(model, ids, **options)
    coin = random.Random(1)
    wrong = [coin.random() < 0.3 for _ in range(50)]
    oracle = make_oracle(model).follow(expected.sequences[0].tolist(), lambda position: wrong[position])
    actual = drafted(model, oracle, ids, **options)
    assert 1 < oracle.last_stats.mean_accepted_length < 5
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    for name in expected:
        if name != _compat.CACHE_ARGUMENT:
            assert_same_structure(actual[name], expected[name], name)
    assert cache_of(actual).get_seq_length() == cache_of(expected).get_seq_length()
    assert len(expected[fields[0]]) == 20


# --- inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["whole text", "new tokens"])
@pytest.mark.parametrize("first", ["plain", "drafter"])
@pytest.mark.parametrize("family", ["fixture", "gemma3"])
def test_continued_conversation(target, drafter, prompt, family, first, given):
    """The cache of one call goes into the next one, past the sliding window too."""
    model, helper, ids = target, drafter, prompt
    if family == "gemma3":
        model = tiny_target(family)
        model.generation_config.eos_token_id = None
        helper, ids = get_drafter(model, DSparkConfig(block_size=4)), tiny_prompt(12)
    earlier = plain(
        model,
        ids,
        max_new_tokens=10,
        return_dict_in_generate=True,
        **({"assistant_model": helper} if first == "drafter" else {}),
    )
    # A second message longer than what is cached, and a short one.
    for length in (4, 40):
        whole = torch.cat([earlier.sequences, tiny_prompt(length, seed=7)], dim=1)
        outputs = []
        for options in ({}, {"assistant_model": helper}):
            cache = copy.deepcopy(cache_of(earlier))
            inputs = {"attention_mask": torch.ones_like(whole), _compat.CACHE_ARGUMENT: cache}
            inputs["input_ids"] = whole if given == "whole text" else whole[:, cache.get_seq_length() :]
            output = model.generate(
                **inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **options
            )
            outputs.append((output.sequences.tolist(), cache_of(output).get_seq_length()))
        assert outputs[1] == outputs[0]
        afresh = drafted(model, helper, whole, max_new_tokens=12)
        assert outputs[0][0][0][-12:] == afresh[0, -12:].tolist()


@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_as_prompt(target, drafter, prompt, text, with_ids):
    inputs = {"inputs_embeds": target.get_input_embeddings()(prompt)} | ({"input_ids": prompt} if with_ids else {})
    outputs = [
        target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **helper)
        for helper in ({}, {"assistant_model": drafter})
    ]
    assert outputs[1].tolist() == outputs[0].tolist()
    assert outputs[0][0, -NEW_TOKENS:].tolist() == text
    assert drafter.last_stats.mean_accepted_length > 4


@pytest.mark.parametrize("family", ["fixture", "gemma3", "llama"])
def test_left_padding(target, drafter, prompt, family):
    model, helper, ids = target, drafter, prompt
    if family != "fixture":
        model = tiny_target(family)
        model.generation_config.eos_token_id = None
        helper, ids = get_drafter(model, DSparkConfig(block_size=4)), tiny_prompt(12)
    padded = torch.nn.functional.pad(ids, (5, 0), value=0)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 0), value=0)
    expected = plain(model, padded, attention_mask=mask, pad_token_id=0)
    actual = drafted(model, helper, padded, attention_mask=mask, pad_token_id=0)
    assert actual.tolist() == expected.tolist()
    assert actual[:, 5:].tolist() == plain(model, ids).tolist()
    # What the drafter sees is the text alone.
    seen = helper.last_stats
    drafted(model, helper, ids)
    assert [entry.accepted for entry in seen.rounds] == rounds(helper, "accepted")


@pytest.mark.parametrize("given", ["name", "object"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_static_cache(family, given):
    """Equal to plain decoding where Transformers can roll such a cache back, else a clear error."""
    model = tiny_target(family)
    model.generation_config.eos_token_id = None
    ids = tiny_prompt(12)
    expected = plain(model, ids, max_new_tokens=20)
    oracle = make_oracle(model).follow(expected[0].tolist(), lambda position: position % 5 == 0)
    if given == "name":
        options = {"cache_implementation": "static"}
    else:
        options = {_compat.CACHE_ARGUMENT: StaticCache(config=model.config, max_cache_len=64)}
    options["disable_compile"] = True
    if not StaticCache(config=model.config, max_cache_len=64).is_croppable:
        with pytest.raises(ValueError, match="cannot be rolled back"):
            drafted(model, oracle, ids, max_new_tokens=20, **options)
        return
    assert drafted(model, oracle, ids, max_new_tokens=20, **options).tolist() == expected.tolist()
    assert oracle.last_stats.mean_accepted_length > 2


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("sampled", [False, True])
def test_mixed_dtypes(prompt, text, dtypes, sampled):
    model, helper = load_target(CASE).to(dtypes[0]), load_drafter(CASE).to(dtypes[1])
    model.generation_config.eos_token_id = None
    accepted = 0
    # Which samples meet the drafts depends on how a processor rounds bfloat16: one seed may meet none.
    for seed in range(8 if sampled else 1):
        torch.manual_seed(seed)
        output = drafted(model, helper, prompt, do_sample=sampled)
        assert output.shape[1] == prompt.shape[1] + NEW_TOKENS
        accepted += sum(rounds(helper, "accepted"))
    assert accepted > 0
    if dtypes[0] == torch.float32 and not sampled:
        assert output[0, prompt.shape[1] :].tolist() == text


@pytest.mark.parametrize("broken", ["target", "drafter"])
def test_logits_that_are_not_numbers(target, prompt, broken):
    helper, model = load_drafter(CASE), copy.deepcopy(target)
    module = model.lm_head if broken == "target" else helper.markov_head.markov_w2
    module.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        drafted(model, helper, prompt, do_sample=True)


def test_prompt_of_another_chat_template_is_said_once(target, prompt, warnings_of):
    """The config records how chats ended in training; a prompt that ends otherwise gives the same text, and a word."""
    helper = load_drafter(CASE)
    helper.config.generation_prompt_ids = prompt[0, -3:].tolist()
    expected = plain(target, prompt).tolist()
    assert drafted(target, helper, prompt).tolist() == expected
    assert warnings_of("chat template") == 0
    helper.config.generation_prompt_ids, helper.config.enable_thinking = [5, 6, 7], False
    for _ in range(2):
        assert drafted(target, helper, prompt).tolist() == expected
    assert warnings_of("add_generation_prompt=True, enable_thinking=False") == 1


# --- what cannot be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefill_chunk_size": 4}, "`prefill_chunk_size` is not supported with a drafter"),
        ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight` mixes"),
        ({"use_cache": False}, "use_cache"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"synced_gpus": True}, "`synced_gpus`"),
    ],
)
def test_unsupported_option(target, drafter, prompt, options, says):
    with pytest.raises(ValueError, match=says):
        drafted(target, drafter, prompt, **options)


@pytest.mark.parametrize(
    ("route", "options"),
    [
        ("assistant_model", {"dola_layers": "low"}),
        ("assistant_model", {"token_healing": True}),
        ("custom_generate", {"dola_layers": [1]}),
        ("custom_generate", {"force_words_ids": [[5]]}),
        ("custom_generate", {"penalty_alpha": 0.6, "top_k": 4}),
    ],
)
def test_option_that_drafting_would_pass_over(target, drafter, prompt, tokenizer, route, options):
    helper = drafter if route == "assistant_model" else custom_generate(drafter)
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=re.escape(f"`{name}` is {value!r}, which is not supported with a drafter")):
        plain(target, prompt, **{route: helper}, **options)


def test_penalty_alpha_without_contrastive_search(target, drafter, prompt, text):
    """It means nothing where tokens are sampled, in plain decoding neither."""
    output = drafted(target, drafter, prompt, do_sample=True, top_k=1, penalty_alpha=0.6)
    assert output[0, prompt.shape[1] :].tolist() == text


@pytest.mark.parametrize("returned", [None, [1.0], 3])
def test_processor_that_returns_no_scores(target, drafter, prompt, returned):
    class Forgetful(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return returned

    with pytest.raises(TypeError, match="The logits processor Forgetful returned .*; it must return the scores"):
        drafted(target, drafter, prompt, logits_processor=LogitsProcessorList([Forgetful()]))


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ({"hidden_size": 32}, ("`hidden_size` is 64", "of 32")),
        ({"vocab_size": 300}, ("`vocab_size` is 320", "of 300")),
        ({"num_hidden_layers": 2}, (r"\[1, 2\]", "of 2 layers")),
    ],
)
@pytest.mark.parametrize("route", ["assistant_model", "custom_generate"])
def test_drafter_of_another_target(overrides, numbers, route):
    helper = get_drafter(tiny_target("qwen3"), DSparkConfig(target_layer_ids=[1, 2], num_hidden_layers=1))
    other = tiny_target("qwen3", **overrides)
    given = helper if route == "assistant_model" else custom_generate(helper)
    with pytest.raises(ValueError) as caught:
        plain(other, tiny_prompt(8), **{route: given})
    for number in numbers:
        assert caught.match(number)


def drafter_by_hand() -> DSparkDrafter:
    """A drafter for targets that `get_drafter` would refuse."""
    return DSparkDrafter(
        DSparkConfig(
            block_size=3,
            num_hidden_layers=1,
            vocab_size=320,
            hidden_size=64,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            max_position_embeddings=128,
            num_target_layers=3,
            target_layer_ids=[0, 1],
            mask_token_id=0,
            markov_rank=4,
        )
    ).eval()


@pytest.mark.parametrize("route", ["assistant_model", "custom_generate"])
def test_encoder_decoder_target(route):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=320, d_model=64, d_kv=16, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0)
    ).eval()
    helper = drafter_by_hand() if route == "assistant_model" else custom_generate(drafter_by_hand())
    with pytest.raises(ValueError, match="encoder-decoder"):
        plain(model, tiny_prompt(6), **{route: helper})


@pytest.mark.parametrize("route", ["assistant_model", "custom_generate"])
def test_recurrent_target(route):
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=3, state_size=8)).eval()
    with pytest.raises(ValueError, match="recurrent state"):
        get_drafter(model)
    helper = drafter_by_hand() if route == "assistant_model" else custom_generate(drafter_by_hand())
    with pytest.raises(ValueError, match="stateful models|recurrent layers"):
        plain(model, tiny_prompt(6), **{route: helper})


# --- statistics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 23},
        {"dspark_confidence_threshold": 0.7},
        {"dspark_num_draft_tokens": 3},
        {"do_sample": True, "temperature": 1.5},
        {"eos_token_id": 227, "pad_token_id": 0},
    ],
)
def test_statistics(target, drafter, prompt, options):
    torch.manual_seed(0)
    output = drafted(target, drafter, prompt, **options)
    stats = drafter.last_stats
    new = output.shape[1] - prompt.shape[1]
    assert sum(rounds(drafter, "emitted")) + 1 == new
    for entry in stats.rounds:
        assert entry.accepted <= entry.verified <= entry.proposed <= entry.drafted
        assert entry.accepted <= entry.emitted <= entry.accepted + 1
        assert entry.emitted >= 1
        assert entry.verify_seconds > 0
        assert entry.draft_seconds > 0
    parts = sum(entry.draft_seconds + entry.verify_seconds for entry in stats.rounds) + stats.prefill_seconds
    assert 0 < stats.prefill_seconds <= parts <= stats.total_seconds
    expected = (new - 1) / len(stats.rounds) if stats.rounds else 0.0
    assert stats.mean_accepted_length == pytest.approx(expected)
    summary = str(stats)
    assert f"{new} tokens in {len(stats.rounds)} rounds" in summary
    assert f"mean accepted length {expected:.2f} (bonus token included)" in summary
    assert f"verified {sum(rounds(drafter, 'verified'))}, kept {sum(rounds(drafter, 'accepted'))}" in summary


@pytest.mark.parametrize("good", [False, True])
def test_collapse_is_said_once(good, warnings_of):
    model = tiny_target("qwen3", num_hidden_layers=2)
    model.generation_config.eos_token_id = None
    ids = tiny_prompt(6)
    new_tokens = 135 if good else 70
    oracle = make_oracle(model, block_size=1)
    oracle.follow(plain(model, ids, max_new_tokens=new_tokens)[0].tolist(), lambda _: not good)
    for _ in range(2):
        drafted(model, oracle, ids, max_new_tokens=new_tokens)
        assert len(oracle.last_stats.rounds) >= 64
    assert warnings_of("mean accepted length is 1.00 over") == (0 if good else 1)
    assert warnings_of("drafting is wasted") == (0 if good else 1)


ROPE = {"rope_theta": 10000.0, "factor": 4.0}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_change_with_the_length(kind):
    """Drafts across the change are refused; before it, and for one row after it, the text is the target's."""
    parameters = {"rope_type": kind, **ROPE, **(LONG if kind == "longrope" else {})}
    target = tiny_target("qwen3", rope_parameters=parameters, max_position_embeddings=32)
    drafter = get_drafter(target, DSparkConfig(block_size=4, num_hidden_layers=1, markov_rank=4, mask_token_id=0))
    prompt = tiny_prompt(20)
    for ids in (prompt, prompt.expand(2, -1)):
        plain = target.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(target.generate(ids, assistant_model=drafter, max_new_tokens=12, do_sample=False), plain)
        with pytest.raises(
            ValueError, match=f"`{kind}` rotary embeddings.* after 32 tokens.*`max_new_tokens` to at most 12"
        ):
            target.generate(ids, assistant_model=drafter, max_new_tokens=13)
    late = tiny_prompt(40)
    if kind == "dynamic":
        with pytest.raises(ValueError, match="at most 0"):
            target.generate(late, assistant_model=drafter, max_new_tokens=5)
        return
    plain = target.generate(late, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(late, assistant_model=drafter, max_new_tokens=20, do_sample=False), plain)
    with pytest.raises(ValueError, match="at most 0"):
        target.generate(late.expand(2, -1), assistant_model=drafter, max_new_tokens=5)
    with SpeculativeEngine(target, drafter, max_batch=2) as engine, pytest.raises(ValueError, match="at most 0"):
        engine.submit(late, max_new_tokens=5)
