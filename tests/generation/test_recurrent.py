"""Drafters that draft token by token (EAGLE-3, MTP) in `generate`: the text, and its law, are the target's."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from transformers import LogitsProcessorList

import dspark_hf
from dspark_hf import SpeculativeEngine, get_drafter
from dspark_hf._compat import CACHE_ARGUMENT
from dspark_hf.generation import drafting
from dspark_hf.generation.capacity import CapacityProfile, DraftProfile, measure_capacity
from dspark_hf.generation.context import PendingContext
from dspark_hf.generation.schedulers import Hardware, Plain, Scheduler

from ..recurrent import KINDS, features_of_solo_run, make_recurrent, make_recurrent_oracle
from ..tiny import HIDDEN_SIZE, SLIDING_WINDOW, VOCAB_SIZE
from . import test_sampling
from .test_batch_options import Counting
from .test_batches import LENGTHS, endless, padded, plain, random_prompts, some_wrong, texts
from .test_engine import states_waiting
from .test_sampling import BATCH, DRAFT_TOKENS, GAMMA, PROMPTS, SAMPLES, laws_of, p_values

FAMILIES = ["qwen3", "gemma3", "gemma4"]
LONG = [40]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return endless(request.param)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def check_features(target, oracle, sequences):
    """Drafts begin with what a drafter sees that reads the text anew."""
    assert oracle.seen
    for row, anchor, features in oracle.seen[:: max(1, len(oracle.seen) // 12)]:
        # Two texts may have the same token at the same place.
        same = [text for text in sequences if text[anchor : anchor + 1] == [sequences[row][anchor]]]
        alone = [features_of_solo_run(target, oracle, text, anchor) for text in same]
        assert any(torch.allclose(features, other, atol=1e-4, rtol=1e-4) for other in alone), (row, anchor)


# --- the same text as without a drafter ----------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", ["all", "none", "some"])
@pytest.mark.parametrize("lengths", [LONG, LENGTHS], ids=["one_row", "ragged_rows"])
def test_oracle(target, kind, lengths, accepts):
    """Whatever is kept; caches and positions are those of the text."""
    assert max(lengths) > SLIDING_WINDOW
    prompts = random_prompts(lengths)
    inputs = padded(prompts)
    expected = plain(target, inputs)
    sequences = texts(expected, prompts)
    wrong = {"all": lambda *_: False, "none": lambda *_: True, "some": some_wrong()}[accepts]
    oracle = make_recurrent_oracle(target, kind).follow(sequences, wrong)
    output = plain(target, inputs, assistant_model=oracle)
    assert output.tolist() == expected.tolist()
    check_features(target, oracle, sequences)
    rounds = oracle.last_stats.rounds
    if accepts == "all":
        assert {entry.emitted / entry.rows for entry in rounds[:-1]} == {5}
    elif accepts == "none":
        assert {entry.emitted / entry.rows for entry in rounds} == {1}
    else:
        assert len({length for entry in rounds for length in entry.emitted_by_row}) > 2
    assert accepts == "none" or len(lengths) == 1 or len({entry.rows for entry in rounds}) >= (accepts == "some") + 1


@pytest.mark.parametrize("count", range(1, 5))
def test_every_draft_length(target, kind, count):
    prompts = random_prompts(LENGTHS, seed=1)
    expected = plain(target, padded(prompts))
    oracle = make_recurrent_oracle(target, kind).follow(texts(expected, prompts), some_wrong())
    output = plain(target, padded(prompts), assistant_model=oracle, dspark_num_draft_tokens=count)
    assert output.tolist() == expected.tolist()
    assert {entry.drafted / entry.rows for entry in oracle.last_stats.rounds if entry.drafted} == {count}


@pytest.mark.parametrize("layers", [["sliding_attention"], ["full_attention", "sliding_attention"]])
@pytest.mark.parametrize("fields", [{}, {"head_norms": False}, {"draft_vocab_size": 60}])
def test_drafter_with_random_weights(target, kind, layers, fields):
    layer_fields = {"num_hidden_layers": len(layers), "layer_types": layers, "sliding_window": 6}
    tokens = range(0, VOCAB_SIZE, 5)[:60] if "draft_vocab_size" in fields else None
    drafter = make_recurrent(target, kind, tokens, **layer_fields, **fields)
    for lengths in (LONG, LENGTHS):
        inputs = padded(random_prompts(lengths, seed=2))
        assert plain(target, inputs, assistant_model=drafter).tolist() == plain(target, inputs).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_are_read_in_pieces(kind, monkeypatch):
    monkeypatch.setattr(drafting, "CONTEXT_PIECE", 7)
    target = endless("gemma3")
    prompts = random_prompts([33, 5, 21])
    expected = plain(target, padded(prompts))
    drafter = make_recurrent(target, kind)
    pieces, advance = [], type(drafter).advance

    def watch(self, input_ids, *args):
        pieces.append(input_ids.shape[1])
        return advance(self, input_ids, *args)

    monkeypatch.setattr(type(drafter), "advance", watch)
    assert plain(target, padded(prompts), assistant_model=drafter).tolist() == expected.tolist()
    assert max(pieces) == 7 and pieces[:5] == [7, 7, 7, 7, 5]
    # A draft after the whole prompt at once is the same.
    drafts = {}
    for size in (7, 1000):
        monkeypatch.setattr(drafting, "CONTEXT_PIECE", size)
        session = drafting.draft_session(drafter, NoProcessors(), do_sample=False)
        ids = torch.tensor([prompts[0]])
        width = len(drafter.config.target_layer_ids) * HIDDEN_SIZE
        states = torch.randn(1, 33, width, generator=torch.Generator().manual_seed(0))
        session.add_context(states, torch.arange(33)[None], ids)
        drafts[size] = session.draft([0], torch.tensor([9]), 4).ids.tolist()
    assert drafts[7] == drafts[1000]


class NoProcessors:
    needs_ids = False

    def begin(self):
        pass

    def process(self, active, drafts, offset, scores):
        return scores


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_leaves_the_batch_at_its_end(kind):
    target = endless("qwen3")
    prompts = random_prompts(LENGTHS)
    sequences = texts(plain(target, padded(prompts)), prompts)
    ends = [sequences[0][LENGTHS[0] + 3], sequences[1][LENGTHS[1] + 9]]
    expected = plain(target, padded(prompts), eos_token_id=ends)
    oracle = make_recurrent_oracle(target, kind).follow(sequences, some_wrong(share=0.4))
    output = plain(target, padded(prompts), assistant_model=oracle, eos_token_id=ends)
    assert output.tolist() == expected.tolist()
    assert oracle.last_stats.rounds[-1].rows < len(prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_processors_act_on_drafts_and_target(kind):
    """Those of Transformers that look at ids, and one that remembers what it saw."""
    target = endless("gemma3")
    options = {"repetition_penalty": 1.6, "no_repeat_ngram_size": 3}
    for lengths in (LONG, LENGTHS):
        inputs = padded(random_prompts(lengths, seed=5))
        drafter = make_recurrent(target, kind)
        bias = torch.randn(len(lengths), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        outputs = [
            plain(target, inputs, logits_processor=LogitsProcessorList([Counting(bias)]), **options, **helper)
            for helper in ({}, {"assistant_model": drafter})
        ]
        assert outputs[0].tolist() == outputs[1].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_states_of_skipped_rounds_reach_the_drafter(kind, every):
    """The oracle fails where a position is missing, and the features are those of a whole reading."""

    class Seldom(Scheduler):
        rounds = 0

        def wants_draft(self, rows, context):
            self.rounds += 1
            return self.rounds % (every + 1) == 0

    target = endless("gemma3")
    for lengths in (LONG, LENGTHS):
        prompts = random_prompts(lengths)
        expected = plain(target, padded(prompts))
        sequences = texts(expected, prompts)
        oracle = make_recurrent_oracle(target, kind).follow(sequences, some_wrong())
        output = plain(target, padded(prompts), assistant_model=oracle, dspark_scheduler=Seldom())
        assert output.tolist() == expected.tolist()
        drafted = [entry.drafted > 0 for entry in oracle.last_stats.rounds]
        assert True in drafted and drafted[:every] == [False] * every
        check_features(target, oracle, sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_passed_on_to_the_next_turn(kind):
    target = endless("qwen3")
    drafter = make_recurrent(target, kind)
    prompt = random_prompts([9])[0]
    outputs = {}
    for name, helper in (("plain", {}), ("drafter", {"assistant_model": drafter})):
        first = plain(target, {"input_ids": torch.tensor([prompt])}, return_dict_in_generate=True, **helper)
        cache = {CACHE_ARGUMENT: first[CACHE_ARGUMENT]}
        longer = torch.cat([first.sequences, torch.tensor([random_prompts([4], seed=9)[0]])], dim=1)
        outputs[name] = plain(target, {"input_ids": longer}, **cache, **helper)
    assert outputs["plain"].tolist() == outputs["drafter"].tolist()


# --- options -------------------------------------------------------------------------------------------------------


def test_routes_and_statistics():
    target = endless("qwen3")
    inputs = padded(random_prompts([6]))
    expected = plain(target, inputs)
    sequences = texts(expected, random_prompts([6]))
    oracle = make_recurrent_oracle(target, "eagle3").follow(sequences, lambda *_: False)
    for route in ({"assistant_model": oracle}, {"custom_generate": dspark_hf.custom_generate(oracle)}):
        assert plain(target, inputs, **route).tolist() == expected.tolist()
        stats = oracle.last_stats
        assert stats.mean_accepted_length == pytest.approx(19 / 4)
        assert stats.acceptance_rate == 1.0 and stats.rounds[0].drafted == 4
        assert stats.rounds[0].confidence_logits is None


@pytest.mark.parametrize("kind", KINDS)
def test_caps_and_wrong_options(kind, caplog):
    target = endless("qwen3")
    inputs = padded(random_prompts([6]))
    drafter = make_recurrent(target, kind, block_size=3)
    for options, drafted in (({}, 3), ({"num_assistant_tokens": 2}, 2), ({"num_assistant_tokens": 20}, 3)):
        plain(target, inputs, assistant_model=drafter, **options)
        assert drafter.last_stats.rounds[0].drafted == drafted
    with pytest.raises(ValueError, match="this drafter's block size allows 1 to 3"):
        plain(target, inputs, assistant_model=drafter, dspark_num_draft_tokens=4)
    for scheduler in ("hardware", "early_stop", "asynchronous"):
        with pytest.raises(ValueError, match="this drafter has no confidence head; give `dspark_num_draft_tokens`"):
            plain(target, inputs, assistant_model=drafter, dspark_scheduler=scheduler)
    for scheduler in ("auto", "none"):
        plain(target, inputs, assistant_model=drafter, dspark_scheduler=scheduler)
        assert drafter.last_stats.rounds[0].verified == 3


def test_mtp_drafts_one_token_by_default():
    target = endless("qwen3")
    drafter = get_drafter(target, KINDS["mtp"]())
    plain(target, padded(random_prompts([6])), assistant_model=drafter)
    assert {entry.drafted for entry in drafter.last_stats.rounds if entry.drafted} == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_budget_goes_to_the_likeliest_drafts(kind):
    """Without a confidence head the largest probability ranks the drafts."""
    target = endless("qwen3")
    prompts = random_prompts(LENGTHS)
    expected = plain(target, padded(prompts))
    drafter = make_recurrent(target, kind)
    output = plain(target, padded(prompts), assistant_model=drafter, dspark_verify_budget=5)
    assert output.tolist() == expected.tolist()
    assert max(entry.verified for entry in drafter.last_stats.rounds) == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_ids", [False, True])
def test_prompts_as_embeddings_are_refused(kind, with_ids):
    target = endless("qwen3")
    ids = torch.tensor([random_prompts([6])[0]])
    inputs = {"inputs_embeds": target.get_input_embeddings()(ids)} | ({"input_ids": ids} if with_ids else {})
    drafter = make_recurrent(target, kind)
    with pytest.raises(ValueError, match="`inputs_embeds`, and a .* reads the ids of its tokens. Give `input_ids`"):
        plain(target, inputs, assistant_model=drafter)


def test_drafting_is_measured():
    target = endless("qwen3")
    drafter = make_recurrent(target, "eagle3", block_size=3)
    profile = measure_capacity(target, drafter, max_rows=1, contexts=(8,), repeats=1, warmup=0)
    assert profile.draft_counts == (1, 3)


# --- the engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheduler", ["none", "sometimes"])
def test_engine(family, kind, scheduler):
    """Rows that join and leave between rounds; some rounds may draft nothing."""
    target = endless(family)
    prompts, counts = random_prompts([3, 19, 1, 12, 7], seed=4), [9, 5, 14, 18, 7]
    sequences = [
        plain(target, {"input_ids": torch.tensor([prompt])}, max_new_tokens=count)[0].tolist()
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    oracle = make_recurrent_oracle(target, kind).follow(sequences, some_wrong(share=0.2))

    class Sometimes(Scheduler):
        generator = random.Random(0)

        def wants_draft(self, rows, context):
            return self.generator.random() < 0.6

    choice = Sometimes() if scheduler == "sometimes" else scheduler
    engine = SpeculativeEngine(target, oracle, max_batch=3, threaded=False, do_sample=False, dspark_scheduler=choice)
    requests, generator = [], random.Random(1)
    for prompt, count in zip(prompts, counts, strict=True):
        requests.append(engine.submit(prompt, max_new_tokens=count))
        for _ in range(generator.randrange(3)):
            engine.step()
    for request, prompt, sequence in zip(requests, prompts, sequences, strict=True):
        assert prompt + request.result() == sequence
    assert engine.stats.total("accepted") > 0
    check_features(target, oracle, sequences)


def test_engine_that_never_drafts_keeps_nothing_of_rows_that_left():
    target = endless("qwen3")
    engine = SpeculativeEngine(
        target, make_recurrent(target, "mtp"), max_batch=3, threaded=False, do_sample=False, dspark_scheduler=Plain()
    )
    for prompt in 3 * random_prompts([3, 19, 1, 12]):
        engine.submit(prompt, max_new_tokens=9)
    waiting = []
    while engine.step():
        if engine._loop is not None:
            waiting.append(states_waiting(engine))
    assert 0 < max(waiting) <= 2 * 3 * (19 + 9)


# --- the law of sampled text ---------------------------------------------------------------------------------------


@functools.cache
def sampling_case():
    target = test_sampling.make_target()
    return target, [laws_of(target, torch.tensor([prompt])) for prompt in PROMPTS]


def opinionated(target, kind, draft_tokens=None, **fields):
    """Random weights, large enough to differ clearly from the target."""
    fields = {"block_size": GAMMA, "initializer_range": 0.5} | fields
    if draft_tokens is not None:
        fields["draft_vocab_size"] = len(draft_tokens)
    return make_recurrent(target, kind, draft_tokens, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "batched"), [("eagle3", False), ("eagle3", True), ("mtp", True)])
def test_distribution(kind, batched):
    target, laws = sampling_case()
    samples = 4 * SAMPLES if batched else SAMPLES
    values = p_values(target, opinionated(target, kind), laws, 0.0, batched, samples)
    assert min(values) > 1e-3, values


@pytest.mark.slow
def test_distribution_with_a_draft_vocabulary(kind):
    target, laws = sampling_case()
    values = p_values(target, opinionated(target, kind, DRAFT_TOKENS), laws, 0.0, True, 2 * SAMPLES)
    assert min(values) > 1e-3, values


@pytest.mark.slow
def test_distribution_under_a_budget(kind):
    target, laws = sampling_case()
    budget = {"dspark_verify_budget": BATCH, "varies": True}
    values = p_values(target, opinionated(target, kind), laws, 0.0, True, 2 * SAMPLES, **budget)
    assert min(values) > 1e-3, values


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "batched"), [("eagle3", False), ("eagle3", True), ("mtp", True)])
def test_distribution_where_drafts_end_early(kind, batched):
    """A draft goes on while the largest probability promises enough, which it knows before the token is drawn."""
    target, laws = sampling_case()
    costs = (((10.0, 13.0, 17.0, 22.0),) * 2,)
    drafts = DraftProfile({}, (1, GAMMA), (((0.1, 0.1),) * 2,))
    scheduler = Hardware(CapacityProfile({}, (8,), (1, BATCH), (1, 2, 3, 4), costs, drafts))
    options = {"dspark_scheduler": scheduler, "varies": True}
    samples = 2 * SAMPLES if batched else SAMPLES
    values = p_values(target, opinionated(target, kind), laws, 0.0, batched, samples, **options)
    assert min(values) > 1e-3, values


@pytest.mark.slow
@pytest.mark.parametrize("fault", [test_sampling.unprocessed_q, test_sampling.argmax_drafts])
def test_planted_bias_is_found(kind, fault, monkeypatch):
    target, laws = sampling_case()
    monkeypatch.setattr(drafting.DraftSession, "_choose", fault)
    assert min(p_values(target, opinionated(target, kind), laws, 0.0, batched=True)) < 1e-6


# --- planted faults in the cache -----------------------------------------------------------------------------------


def keep_drafted_entries(monkeypatch):
    monkeypatch.setattr(drafting.RecurrentSteps, "end", lambda self: None)


def wrong_tokens(monkeypatch):
    """Each state with the token at its own position, not with the next."""
    original = PendingContext.take

    def take(self, aligned):
        states, positions, ids = original(self, aligned)
        return states, positions, ids.roll(1, dims=1)

    monkeypatch.setattr(PendingContext, "take", take)


def positions_off_by_one(monkeypatch):
    original = drafting.RecurrentSteps.take

    def take(self, previous_ids):
        if self.step == 0:
            self.positions = self.positions + 1
        original(self, previous_ids)

    monkeypatch.setattr(drafting.RecurrentSteps, "take", take)


@pytest.mark.parametrize("fault", [keep_drafted_entries, wrong_tokens, positions_off_by_one])
@pytest.mark.parametrize("kind", KINDS)
def test_planted_fault_is_found(kind, fault, monkeypatch):
    """Greedy text does not show these; the oracle does."""
    target = endless("qwen3")
    prompts = random_prompts(LENGTHS)
    sequences = texts(plain(target, padded(prompts)), prompts)
    oracle = make_recurrent_oracle(target, kind).follow(sequences, some_wrong())
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        plain(target, padded(prompts), assistant_model=oracle)
