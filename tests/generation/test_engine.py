"""The engine: requests come and go, and each is served as if it were alone."""

from __future__ import annotations

import functools
import gc
import queue
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
)

from dspark_hf import DSparkConfig, DSparkDrafter, DSparkOutput, SpeculativeEngine, get_drafter
from dspark_hf.generation import engine as engine_module
from dspark_hf.generation.drafting import DraftSession
from dspark_hf.generation.schedulers import Plain, Scheduler
from dspark_hf.generation.stats import EngineStats, RoundStats

from ..tiny import SLIDING_WINDOW, tiny_target
from .oracles import hidden_states_of_solo_run
from .test_batches import endless, random_prompts
from .test_sampling import LENGTH, TEMPERATURE, TESTED, TOP_K, VOCAB, chi_square, laws_of, make_drafter

BLOCK = 4
PROMPTS = random_prompts([3, 19, 1, 12, 7, 25, 9], seed=4)
NEW_TOKENS = [9, 5, 14, 1, 18, 11, 7]


class Prompter(DSparkDrafter):
    """Proposes the texts that it was told, wrong where it was told to be, and keeps what a real drafter sees.

    It knows a row by the token at its position.
    """

    def follow(self, texts: list[list[int]], is_wrong) -> Prompter:
        self.texts, self.is_wrong = texts, is_wrong
        self.seen: list[tuple[int, int, torch.Tensor]] = []
        return self

    def forward(self, input_ids, target_states, position_ids, attention_mask=None, cache=None, compute_logits=True):
        assert not target_states.isnan().any()
        output = super().forward(input_ids, target_states, position_ids, attention_mask, cache, compute_logits=False)
        anchors = list(zip(position_ids[:, -BLOCK].tolist(), input_ids[:, 0].tolist(), strict=True))
        self.seen += [(*anchor, hidden) for anchor, hidden in zip(anchors, output.last_hidden_state, strict=True)]
        ids = torch.tensor([self.proposal(*anchor) for anchor in anchors])
        logits = 30.0 * torch.nn.functional.one_hot(ids, self.config.vocab_size).float()
        return DSparkOutput(last_hidden_state=output.last_hidden_state, logits=logits)

    def proposal(self, position: int, anchor: int) -> list[int]:
        for row, text in enumerate(self.texts):
            if position < len(text) and text[position] == anchor:
                places = range(position + 1, position + 1 + BLOCK)
                right = (text[position + 1 :] + [0] * BLOCK)[:BLOCK]
                return [
                    (token + self.is_wrong(row, place)) % self.config.vocab_size
                    for token, place in zip(right, places, strict=True)
                ]
        return [0] * BLOCK


def make_prompter(target, texts, is_wrong=lambda row, place: (place + row) % 3 == 0) -> Prompter:
    config = DSparkConfig(block_size=BLOCK, num_hidden_layers=1, markov_rank=0, enable_confidence_head=False)
    drafter = get_drafter(target, config)
    drafter.__class__ = Prompter
    return drafter.follow(texts, is_wrong)


def solo(target, prompt: list[int], new: int, **options) -> list[int]:
    """What plain `generate` gives for one prompt."""
    ids = torch.tensor([prompt])
    return target.generate(ids, max_new_tokens=new, **{"do_sample": False} | options)[0, len(prompt) :].tolist()


def solo_texts(target) -> list[list[int]]:
    return [prompt + solo(target, prompt, new) for prompt, new in zip(PROMPTS, NEW_TOKENS, strict=True)]


def stepped(target, drafter, max_batch: int = 3, **options) -> SpeculativeEngine:
    return SpeculativeEngine(target, drafter, max_batch=max_batch, threaded=False, **{"do_sample": False} | options)


def submit_all(engine, prompts=PROMPTS, new_tokens=NEW_TOKENS, **options):
    return [
        engine.submit(prompt, max_new_tokens=new, **options) for prompt, new in zip(prompts, new_tokens, strict=True)
    ]


def states_waiting(engine) -> float:
    """Target states in memory that no draft has read, in vectors of one position of one row."""
    config = engine.drafter.config
    states = engine._loop.drafts._pending.tensors
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in states}
    size = config.hidden_size * len(config.target_layer_ids)
    return sum(held.values()) / (4 * size)


def results(requests) -> list[list[int]]:
    return [request.result() for request in requests]


@pytest.fixture(scope="module")
def target():
    return endless("qwen3")


@pytest.fixture(scope="module")
def texts(target):
    return solo_texts(target)


@pytest.fixture(scope="module")
def expected(texts):
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


@pytest.fixture
def drafter(target, texts):
    return make_prompter(target, texts)


# --- the same text as alone ----------------------------------------------------------------------------------------

WRONG = {"all": lambda *_: False, "none": lambda *_: True, "part": lambda row, place: (place + row) % 3 == 0}


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4"])
@pytest.mark.parametrize("accepts", ["all", "none", "part"])
def test_random_arrivals(family, accepts):
    """Texts are those of solo runs, and so is what the drafter sees, whenever rows join and leave."""
    target = endless(family)
    texts = solo_texts(target)
    assert min(map(len, PROMPTS)) < SLIDING_WINDOW < max(map(len, PROMPTS))
    drafter = make_prompter(target, texts, WRONG[accepts])
    generator = random.Random(accepts)
    engine = stepped(target, drafter)
    requests = []
    while len(requests) < len(PROMPTS):
        number = len(requests)
        requests.append(engine.submit(PROMPTS[number], max_new_tokens=NEW_TOKENS[number]))
        for _ in range(generator.randrange(3)):
            engine.step()
            check_columns(engine._loop)
    for text, prompt, request in zip(texts, PROMPTS, requests, strict=True):
        assert prompt + request.result() == text
    assert not engine.step()
    rows = [entry.rows for entry in engine.stats.rounds]
    assert max(rows) == 3 and any(later > earlier for earlier, later in zip(rows, rows[1:], strict=False))
    accepted = engine.stats.total("accepted")
    assert accepted == 0 if accepts == "none" else accepted > 0
    # Two texts may have the same token at the same place.
    assert accepts != "all" or accepted >= 0.9 * engine.stats.total("verified")
    for position, anchor, hidden in drafter.seen[1::3]:
        alone = [
            hidden_states_of_solo_run(target, drafter, text, position)
            for text in texts
            if position < len(text) and text[position] == anchor
        ]
        assert any(torch.allclose(hidden, other, atol=1e-4) for other in alone), (position, anchor)


def check_columns(loop):
    """Lengths, positions, masks and caches of the rows fit together, without columns that no row needs."""
    if loop is None:
        return
    session, lengths = loop.session, loop.rows.lengths
    fed = [lengths[row] - 1 for row in loop.active]
    assert session.columns == max(fed) == session.cache.get_seq_length()
    assert [session.columns - padding for padding in session.padding] == fed == session.anchor_positions.tolist()
    mask = session.model_kwargs.get("attention_mask")
    assert len(fed) == 1 if mask is None else mask.sum(dim=1).tolist() == [count + 1 for count in fed]
    for layer in session.cache.layers:
        window = getattr(layer, "sliding_window", None)
        held = session.columns if window is None else min(session.columns, window - 1)
        assert layer.keys.shape[:3:2] == layer.values.shape[:3:2] == (len(fed), held)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_without_drafter(family):
    target = endless(family)
    engine = stepped(target, None)
    assert [prompt + ids for prompt, ids in zip(PROMPTS, results(submit_all(engine)), strict=True)] == solo_texts(
        target
    )
    assert engine.stats.total("verified") == 0 and engine.stats.mean_accepted_length == 1


def test_scheduler_that_never_drafts(target, drafter, expected):
    """States that wait for a draft do not outlive their rows."""
    engine = stepped(target, drafter, dspark_scheduler=Plain())
    waiting = []
    requests = [request for _ in range(3) for request in submit_all(engine)]
    while engine.step():
        waiting.append(states_waiting(engine))
    assert results(requests) == 3 * expected
    assert not drafter.seen and 0 < max(waiting) <= 2 * 3 * (max(map(len, PROMPTS)) + max(NEW_TOKENS))


def test_drafting_after_a_pause(target, drafter, texts, expected):
    """Rows join while states wait for a draft, and while the drafter's cache is full."""

    class Every(Scheduler):
        rounds = 0

        def wants_draft(self, rows, context):
            self.rounds += 1
            return self.rounds % 4 == 0

    engine = stepped(target, drafter, dspark_scheduler=Every())
    assert results(submit_all(engine)) == expected
    assert drafter.seen
    for position, anchor, hidden in drafter.seen:
        text = next(text for text in texts if position < len(text) and text[position] == anchor)
        torch.testing.assert_close(
            hidden, hidden_states_of_solo_run(target, drafter, text, position), atol=1e-4, rtol=0
        )


def test_options_of_each_request(target, drafter):
    """Requests with processors, criteria and ends of their own share a batch."""
    eos = solo(target, PROMPTS[0], 9)[4]
    options = [
        {"eos_token_id": eos},
        {"repetition_penalty": 5.0, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 6, "eos_token_id": solo(target, PROMPTS[2], 1)},
        {"logits_processor": [Counting()]},
        {"stopping_criteria": [StopAt(len(PROMPTS[4]) + 3)]},
        {"bad_words_ids": [[token] for token in solo(target, PROMPTS[5], 3)]},
        {},
    ]
    engine = stepped(target, drafter, max_batch=7)
    requests = [
        engine.submit(prompt, max_new_tokens=12, **extra) for prompt, extra in zip(PROMPTS, options, strict=True)
    ]
    for request, prompt, extra in zip(requests, PROMPTS, options, strict=True):
        assert request.result() == solo(target, prompt, 12, **extra)
    assert len(requests[0].result()) == 5 and len(requests[4].result()) == 3
    assert options[3]["logits_processor"][0].calls == 12, "a request has a copy, plain decoding the original"


class Counting(LogitsProcessor):
    """Remembers how often it was called, and forbids a token by that."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, scores.argmax(dim=-1) if self.calls % 2 else torch.tensor([5]), -torch.inf)


class StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_one_processor_for_all_is_copied(target, drafter):
    """A processor of the whole engine that remembers starts anew for each request."""
    engine = stepped(target, drafter, logits_processor=[Counting()])
    assert results(submit_all(engine)) == [
        solo(target, prompt, new, logits_processor=[Counting()])
        for prompt, new in zip(PROMPTS, NEW_TOKENS, strict=True)
    ]


def test_masks_and_tensors(target, drafter):
    """What a tokenizer gives; a padded prompt is one that starts later."""
    prompt = torch.tensor([PROMPTS[1]])
    engine = stepped(target, drafter)
    padded = torch.nn.functional.pad(prompt, (3, 0))
    requests = [
        engine.submit(PROMPTS[4], max_new_tokens=8),
        engine.submit(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5),
        engine.submit(padded, attention_mask=(padded > 0).long(), max_new_tokens=5),
    ]
    assert results(requests)[1] == results(requests)[2] == solo(target, PROMPTS[1], 5)
    assert requests[0].result() == solo(target, PROMPTS[4], 8)


def test_stop_strings(target, drafter):
    words = [f"w{token}" for token in range(target.config.vocab_size)]
    words[0] = "abcdef"  # Transformers' search for stop strings decodes after this word.
    inner = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w1")
    text = solo(target, PROMPTS[0], 9)
    engine = stepped(target, drafter)
    request = engine.submit(PROMPTS[0], max_new_tokens=9, tokenizer=tokenizer, stop_strings=[f"w{text[4]}"])
    assert request.result() == text[:5]


# --- sampling ------------------------------------------------------------------------------------------------------

SAMPLED = [[1, 4, 2, 5], [3, 5]]


@pytest.fixture(scope="module")
def small_target():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=VOCAB, initializer_range=0.14, **sizes, **heads)
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def laws(small_target):
    return [laws_of(small_target, torch.tensor([prompt])) for prompt in SAMPLED]


def sampled_p_values(target, laws, samples: int) -> list[float]:
    """Chi-square p-values of sampled requests beside greedy ones, which have to be right token by token."""
    torch.manual_seed(3)
    engine = stepped(target, make_drafter(target, "vanilla"), max_batch=24, max_queue=10_000, max_new_tokens=LENGTH)
    sampled = {"do_sample": True, "top_k": TOP_K, "temperature": TEMPERATURE}
    requests = [[], [], []]
    for _ in range(samples):
        for place, prompt in enumerate(SAMPLED):
            requests[place].append(engine.submit(prompt, **sampled))
        if len(requests[2]) < samples // 2:
            requests[2].append(engine.submit(SAMPLED[0], repetition_penalty=1.3))
    greedy = solo(target, SAMPLED[0], LENGTH, repetition_penalty=1.3)
    assert all(request.result() == greedy for request in requests[2])
    values = []
    for own, law in zip(requests, laws, strict=False):
        counts = torch.nn.functional.one_hot(torch.tensor(results(own)), VOCAB).sum(dim=0)
        values += [chi_square(counts[place].double(), law[place] * len(own)) for place in TESTED]
    return values


def test_sampled_law_beside_greedy_rows(small_target, laws):
    values = sampled_p_values(small_target, laws, 250)
    print(f"p-values: {values}")
    assert min(values) > 1e-3


def greedy_target(process):
    """Gives verified positions of every row the law of greedy choice."""

    def faulty(self, active, drafts, offset, scores):
        scores = process(self, active, drafts, offset, scores)
        return engine_module._one_hot(scores) if self.samples and scores.shape[1] > 1 else scores

    return engine_module._RequestProcessors, "process", faulty


def unlikely_drafts(draft):
    """Reports drafts as less likely than they were, so that too many of them are kept."""

    def faulty(self, *args):
        proposal = draft(self, *args)
        if proposal.probs is not None:
            proposal.probs = torch.zeros_like(proposal.probs)
        return proposal

    return DraftSession, "draft", faulty


@pytest.mark.parametrize(
    ("plant", "original"),
    [(greedy_target, engine_module._RequestProcessors.process), (unlikely_drafts, DraftSession.draft)],
)
def test_planted_bias_is_found(small_target, laws, plant, original, monkeypatch):
    monkeypatch.setattr(*plant(original))
    # A token that the target cannot give is found, too, and a greedy row that goes astray.
    with pytest.raises(AssertionError):
        assert min(sampled_p_values(small_target, laws, 60)) > 1e-6


def test_greedy_scores_as_a_law():
    scores = torch.tensor([[1.0, 3.0, 3.0], [0.0, torch.nan, 9.0], [-torch.inf, -torch.inf, 2.0]])
    probs = torch.softmax(engine_module._one_hot(scores), dim=-1)
    assert probs[0].tolist() == [0, 1, 0] and probs[2].tolist() == [0, 0, 1]
    assert probs[1].isnan().all()


# --- options of the engine -----------------------------------------------------------------------------------------


def test_budget_and_scheduler_span_the_requests(target, drafter, expected):
    class Watching(Scheduler):
        rounds: list[list[int]] = []

        def lengths(self, rows, context, confidences, limits):
            self.rounds.append(list(rows))
            return [min(limit, 2) for limit in limits]

    watching = Watching()
    engine = stepped(target, drafter, dspark_scheduler=watching, dspark_verify_budget=3)
    requests = submit_all(engine)
    assert results(requests) == expected
    assert {row for rows in watching.rounds for row in rows} <= {request.number for request in requests}
    assert max(map(len, watching.rounds)) == 3
    rounds = engine.stats.rounds
    assert max(max(entry.verified_by_row) for entry in rounds) == 2
    assert max(entry.verified for entry in rounds) == 3


def test_options_that_cannot_be_served(target, drafter):
    engine = stepped(target, drafter)
    bad = {
        "num_beams": 2,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "use_cache": False,
        "prefill_chunk_size": 4,
        "guidance_scale": 1.5,
        "cache_implementation": "static",
        "inputs_embeds": torch.zeros(1, 3, 64),
        "output_hidden_states": True,
        "dspark_verify_budget": 3,
        "streamer": object(),
        "assistant_model": drafter,
        "dola_layers": "low",
        "not_an_option": 1,
        "max_new_tokens": -1,
    }
    for name, value in bad.items():
        options = {"do_sample": True} if name == "num_return_sequences" else {}
        with pytest.raises(ValueError, match=name.removesuffix("s")):
            engine.submit(PROMPTS[0], **options, **{name: value})
    for prompt in ([], [[1, 2], [3, 4]], torch.zeros(2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="input_ids"):
            engine.submit(prompt)
    with pytest.raises(TypeError, match="float"):
        engine.submit([1.5])
    assert not engine.step() and engine.stats.batch == 0


def test_bad_engines(target, drafter):
    for name in ("max_batch", "max_queue"):
        with pytest.raises(ValueError, match=f"`{name}` is 0"):
            SpeculativeEngine(target, drafter, threaded=False, **{name: 0})
        with pytest.raises(TypeError, match=f"`{name}` is 1.5"):
            SpeculativeEngine(target, drafter, threaded=False, **{name: 1.5})
    with pytest.raises(TypeError, match="`drafter` is a Qwen3ForCausalLM"):
        SpeculativeEngine(target, target)
    with pytest.raises(ValueError, match="without a drafter"):
        SpeculativeEngine(target, None, dspark_verify_budget=3)
    with pytest.raises(ValueError, match="made for another target"):
        SpeculativeEngine(tiny_target("llama"), drafter)


# --- queue, streams, cancelling, closing ---------------------------------------------------------------------------


def test_queue_is_bounded(target, drafter, expected):
    engine = stepped(target, drafter, max_batch=2, max_queue=2)
    requests = submit_all(engine, PROMPTS[:2], NEW_TOKENS[:2])
    with pytest.raises(queue.Full, match="2 requests have been waiting"):
        engine.submit(PROMPTS[2], timeout=0)
    engine.step()
    requests += submit_all(engine, PROMPTS[2:4], NEW_TOKENS[2:4], timeout=0)
    # Without a thread, waiting for room does the work.
    requests += submit_all(engine, PROMPTS[4:], NEW_TOKENS[4:])
    assert results(requests) == expected
    assert max(entry.rows for entry in engine.stats.rounds) == 2


def test_rows_are_given_in_order_of_arrival(target, drafter):
    engine = stepped(target, drafter, max_batch=1)
    requests = submit_all(engine)
    ended = []
    while engine.step():
        ended += [request for request in requests if request.done and request not in ended]
    assert ended == requests[: len(ended)] and len(ended) >= len(requests) - 1


def test_tokens_are_streamed_round_by_round(target, drafter, expected):
    engine = stepped(target, drafter, max_batch=7)
    requests = submit_all(engine)
    engine.step()
    # The first round has run; those with one token have ended.
    assert [request.done for request in requests] == [new == 1 for new in NEW_TOKENS]
    stream = iter(requests[4])
    assert [next(stream), next(stream)] == expected[4][:2]
    assert not requests[4].done
    assert list(stream) == expected[4][2:] and list(requests[4]) == expected[4]


def test_cancel(target, drafter, expected):
    """An active and a waiting request; the others do not notice."""
    engine = stepped(target, drafter, max_batch=2, max_queue=5)
    requests = submit_all(engine, PROMPTS[:5], NEW_TOKENS[:5])
    engine.step()
    assert requests[0].cancel() and requests[3].cancel() and not requests[0].cancel()
    # The waiting one leaves room in the queue.
    requests += submit_all(engine, PROMPTS[5:], NEW_TOKENS[5:], timeout=0)
    for number in (0, 3):
        with pytest.raises(CancelledError, match=f"Request {number} was cancelled"):
            requests[number].result()
    stream = iter(requests[0])
    assert next(stream) == expected[0][0]
    with pytest.raises(CancelledError):
        list(stream)
    for number in (1, 2, 4, 5, 6):
        assert requests[number].result() == expected[number]
    assert engine.stats.batch == 6 and not requests[1].cancel()


def test_cancelling_all_ends_the_work(target, drafter):
    engine = stepped(target, drafter)
    requests = submit_all(engine)
    engine.step()
    rounds = engine.stats.num_rounds
    for request in requests:
        request.cancel()
    engine.step()
    assert not engine.step() and engine.stats.num_rounds <= rounds + 1
    assert engine.generate([PROMPTS[0]], max_new_tokens=3) == [solo(target, PROMPTS[0], 3)]


def test_close(target, drafter, expected):
    with stepped(target, drafter) as engine:
        requests = submit_all(engine)
    assert [request.done for request in requests] == [True] * 7 and results(requests) == expected
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(PROMPTS[0])
    engine.close()
    with pytest.raises(KeyError), stepped(target, drafter) as engine:
        requests = submit_all(engine)
        engine.step()
        raise KeyError
    ended = [request for request, new in zip(requests, NEW_TOKENS, strict=True) if new == 1]
    for request in set(requests).difference(ended):
        with pytest.raises(CancelledError):
            request.result()


def test_generate_keeps_the_order(target, drafter, expected):
    engine = stepped(target, drafter, max_queue=2, max_new_tokens=8)
    longest = [solo(target, prompt, 8) for prompt in PROMPTS]
    assert engine.generate(PROMPTS) == longest
    assert engine.generate([]) == []
    with pytest.raises(ValueError, match="input_ids"):
        engine.generate([PROMPTS[0], [], PROMPTS[1]])
    assert not engine._open and engine.generate(PROMPTS[:2], max_new_tokens=2) == [text[:2] for text in longest[:2]]


def test_threads(target, drafter, expected):
    """Submitters on several threads, a small queue, and the engine's own thread."""
    with SpeculativeEngine(target, drafter, max_batch=3, max_queue=1, do_sample=False) as engine:
        given = {}

        def use(number):
            given[number] = list(engine.submit(PROMPTS[number], max_new_tokens=NEW_TOKENS[number]))

        users = [threading.Thread(target=use, args=(number,)) for number in range(len(PROMPTS))]
        for user in users:
            user.start()
        for user in users:
            user.join(timeout=60)
        assert [given[number] for number in range(len(PROMPTS))] == expected
        request = engine.submit(PROMPTS[4], max_new_tokens=400)
        with pytest.raises(TimeoutError, match="has not ended"):
            request.result(timeout=0.01)
        # A step beside the thread's own is harmless.
        engine.step()
        request.cancel()
        assert engine.submit(PROMPTS[1], max_new_tokens=5).result(timeout=60) == expected[1]
        endless_one = engine.submit(PROMPTS[4], max_new_tokens=450)
        engine.close(cancel=True)
        assert not engine._thread.is_alive()
        with pytest.raises(CancelledError):
            endless_one.result()


def test_closing_wakes_who_waits_for_room(target, drafter):
    engine = SpeculativeEngine(target, drafter, max_batch=1, max_queue=1, max_new_tokens=400)
    first, errors = engine.submit(PROMPTS[0]), []

    def crowd():
        try:
            for _ in range(3):
                engine.submit(PROMPTS[1])
        except RuntimeError as error:
            errors.append(str(error))

    user = threading.Thread(target=crowd)
    user.start()
    next(iter(first))
    engine.close(cancel=True)
    user.join(timeout=60)
    assert not user.is_alive() and "closed" in errors[0]


# --- failures ------------------------------------------------------------------------------------------------------


class FailingProcessor(LogitsProcessor):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise ZeroDivisionError(f"at {input_ids.shape[1]}")
        return scores


class FailingCriterion(StopAt):
    def __call__(self, input_ids, scores, **kwargs):
        if super().__call__(input_ids, scores).any():
            raise LookupError(f"at {input_ids.shape[1]}")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class NaNProcessor(FailingProcessor):
    """Spoils the logits, of drafts too."""

    def __call__(self, input_ids, scores):
        return scores * torch.nan if input_ids.shape[1] >= self.length else scores


@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize("others_sample", [False, True])
def test_failing_requests_fail_alone(target, drafter, expected, after, others_sample):
    """A processor, a criterion and NaN, at the first token and later, in batches that sample and that do not."""
    prompt = PROMPTS[0]
    length = len(prompt) + after
    engine = stepped(target, drafter, max_batch=6)
    good = submit_all(engine, PROMPTS[1:3], NEW_TOKENS[1:3])
    bad = [
        (engine.submit(prompt, max_new_tokens=9, logits_processor=[FailingProcessor(length)]), ZeroDivisionError, 1),
        (engine.submit(prompt, max_new_tokens=9, stopping_criteria=[FailingCriterion(length + 1)]), LookupError, 0),
        (engine.submit(prompt, max_new_tokens=9, logits_processor=[NaNProcessor(length)]), ValueError, 1),
    ]
    if others_sample:
        good.append(engine.submit(prompt, max_new_tokens=12, do_sample=True))
    good += submit_all(engine, PROMPTS[4:], NEW_TOKENS[4:])
    for request, kind, _ in bad:
        with pytest.raises(kind):
            request.result()
        assert list(request._tokens) == expected[0][: len(request._tokens)]
        assert len(request._tokens) <= after
    texts = results(good)
    assert texts[:2] == expected[1:3] and texts[-3:] == expected[4:]


def test_failing_prefill_fails_alone(target, drafter, expected, monkeypatch):
    forward = target.forward

    @functools.wraps(forward)
    def faulty(*args, **kwargs):
        if kwargs["input_ids"].shape[1] == len(PROMPTS[1]):
            raise torch.OutOfMemoryError("the prompt is too long")
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", faulty)
    requests = submit_all(stepped(target, drafter))
    with pytest.raises(torch.OutOfMemoryError):
        requests[1].result()
    assert results(requests[:1] + requests[2:]) == expected[:1] + expected[2:]


@pytest.mark.parametrize("place", ["round", "join"])
def test_failing_pass_fails_all_that_share_it(target, drafter, expected, place, monkeypatch):
    engine = stepped(target, drafter)
    requests = submit_all(engine)
    engine.step()

    def faulty(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        if place == "round":
            patch.setattr(target, "forward", faulty)
        else:
            patch.setattr(engine_module.TargetSession, "join", faulty)
            requests[0].cancel()
            engine.step()
        engine.step()
    failed = [request for request in requests if request.done and isinstance(request._error, torch.OutOfMemoryError)]
    assert len(failed) >= 2 and engine.stats.batch < len(requests)
    for request, text in zip(requests, expected, strict=True):
        if request not in failed and not isinstance(request._error, CancelledError):
            assert request.result() == text
    assert engine.generate(PROMPTS[:2], max_new_tokens=3) == [solo(target, prompt, 3) for prompt in PROMPTS[:2]]


def test_interrupted_step(target, drafter, monkeypatch):
    """Ctrl-C in a step comes out of it, and no request is left hanging."""
    engine = stepped(target, drafter)
    requests = submit_all(engine)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(KeyboardInterrupt):
        requests[0].result()
    assert requests[1].result() == solo(target, PROMPTS[1], NEW_TOKENS[1])


# --- statistics and endurance --------------------------------------------------------------------------------------


def test_stats(target, drafter):
    engine = stepped(target, drafter)
    submit_all(engine)
    engine.close()
    stats = engine.stats
    assert stats.batch == 7 and stats.batch + stats.total("emitted") == sum(NEW_TOKENS)
    assert stats.total("rows") == sum(entry.rows for entry in stats.rounds)
    assert f"{sum(NEW_TOKENS)} tokens in {len(stats.rounds)} rounds" in str(stats)
    assert 0 < stats.prefill_seconds < stats.total_seconds and stats.mean_accepted_length > 1.5


def test_stats_of_many_rounds_stay_small():
    stats = EngineStats(kept_rounds=3)
    for number in range(10):
        stats.add(RoundStats(1, 4, 4, 4, accepted=2, emitted=3, draft_seconds=0.5, verify_seconds=float(number)))
    assert [entry.verify_seconds for entry in stats.rounds] == [7, 8, 9]
    assert stats.num_rounds == 10 and stats.total("verify_seconds") == 45
    assert stats.mean_accepted_length == 3 and stats.acceptance_rate == 0.5


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(entry), torch.Tensor) for entry in gc.get_objects())


@pytest.mark.slow
def test_five_hundred_requests():
    """With cancellations and two failures: all others end, greedy ones with their solo text, and nothing is left."""
    target = endless("qwen3", num_hidden_layers=2)
    generator = random.Random(0)
    prompts = random_prompts([generator.randrange(1, 30) for _ in range(16)], seed=1)
    longest = [solo(target, prompt, 24) for prompt in prompts]
    drafter = make_prompter(target, [prompt + text for prompt, text in zip(prompts, longest, strict=True)])
    special = {
        150: {"logits_processor": [FailingProcessor(0)]},
        350: {"stopping_criteria": [FailingCriterion(0)]},
    }
    errors, cancelled, tensors = [], 0, []
    with SpeculativeEngine(target, drafter, max_batch=8, max_queue=16, do_sample=False) as engine:
        for start in range(0, 500, 100):
            requests = []
            for number in range(start, start + 100):
                place, new = generator.randrange(16), generator.randint(1, 24)
                options = special.get(number, {"do_sample": number % 5 == 0})
                request = engine.submit(prompts[place], max_new_tokens=new, **options)
                requests.append((request, longest[place][:new], options))
                if generator.random() < 0.1:
                    cancelled += generator.choice(requests)[0].cancel()
            for request, text, options in requests:
                try:
                    ids = request.result(timeout=60)
                except CancelledError:
                    cancelled -= 1
                except (ZeroDivisionError, LookupError) as error:
                    errors.append(type(error))
                else:
                    assert len(ids) == len(text) if options["do_sample"] else ids == text
            del request, requests
            drafter.seen.clear()
            while engine._loop is not None:
                time.sleep(0.01)
            tensors.append(live_tensors())
    assert cancelled == 0 and errors == [ZeroDivisionError, LookupError]
    assert engine.stats.batch > 400 and not engine._open and not engine._queue
    assert max(tensors[1:]) <= tensors[0] + 5, tensors


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("text", TypeError, "`input_ids` is a str; give the token ids"),
        (None, TypeError, "`input_ids` is a NoneType"),
        ([10**7], ValueError, "`input_ids` goes from 10000000 to 10000000; the target's tokens are 0 to"),
        ([-1, 3], ValueError, "`input_ids` goes from -1 to 3"),
    ],
)
def test_prompt_that_is_none_is_named(prompt, error, message):
    with SpeculativeEngine(tiny_target(), None, threaded=False) as engine, pytest.raises(error, match=message):
        engine.submit(prompt)


def test_program_that_ends_without_closing_ends_well():
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from dspark_hf import SpeculativeEngine
from tests.tiny import tiny_target
SpeculativeEngine(tiny_target(), None).submit([5, 6, 7], max_new_tokens=400, eos_token_id=None)
"""
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", script, str(root)], check=False).returncode == 0
