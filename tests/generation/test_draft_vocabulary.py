"""Drafters that predict some of the target's tokens only: the text stays the target's. Its law: `test_sampling.py`."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from dspark_hf import DSparkConfig, DSparkDrafter, DSparkOutput, get_drafter

from ..tiny import VOCAB_SIZE, tiny_target
from .noisy import Batch, NoisyCopy, make_noisy_copy

LENGTHS = (4, 9, 6)


class ReducedCopy(NoisyCopy):
    """A noisy copy that proposes the first token of its vocabulary in place of those that are not in it."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return DSparkOutput(output.last_hidden_state, output.logits[..., self.draft_ids])


def reduced_copy(target, tokens: list[int]) -> ReducedCopy:
    config = DSparkConfig(
        block_size=4,
        num_hidden_layers=1,
        markov_rank=0,
        enable_confidence_head=False,
        draft_vocab_size=len(tokens),
    )
    drafter = get_drafter(target, config, draft_tokens=tokens)
    drafter.__class__ = ReducedCopy
    return drafter


def random_drafter(target, tokens: list[int], **fields) -> DSparkDrafter:
    torch.manual_seed(0)
    config = DSparkConfig(
        block_size=4,
        num_hidden_layers=1,
        draft_vocab_size=len(tokens),
        initializer_range=0.3,
        **{"markov_rank": 4, **fields},
    )
    drafter = get_drafter(target, config, draft_tokens=tokens)
    if drafter.markov_head is not None:
        torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    return drafter


@pytest.fixture(scope="module")
def target():
    return tiny_target(eos_token_id=None)


@pytest.fixture(scope="module")
def batch():
    return Batch(LENGTHS, VOCAB_SIZE)


@pytest.fixture(scope="module")
def plain(target, batch):
    return target.generate(**batch.inputs, max_new_tokens=24, do_sample=False)


def test_tokens_of_the_vocabulary_are_kept_and_others_end_a_proposal(target, batch, plain):
    texts = batch.without_padding(plain)
    new = plain[:, batch.width :]
    counts = {}
    for share in (1.0, 0.5):
        every = [*new.unique().tolist(), VOCAB_SIZE - 1]
        tokens = every[: max(1, int(share * len(every)))]
        drafter = reduced_copy(target, tokens).follow(texts)
        output = target.generate(**batch.inputs, assistant_model=drafter, max_new_tokens=24, do_sample=False)
        assert torch.equal(output, plain)
        counts[share] = sum(entry.accepted for entry in drafter.last_stats.rounds)
    whole = make_noisy_copy(target).follow(texts)
    target.generate(**batch.inputs, assistant_model=whole, max_new_tokens=24, do_sample=False)
    assert counts[1.0] == sum(entry.accepted for entry in whole.last_stats.rounds) > 0
    assert 0 < counts[0.5] < counts[1.0]


@pytest.mark.parametrize("fields", [{"markov_head_type": "rnn"}, {"markov_rank": 0, "enable_confidence_head": False}])
def test_random_drafter(target, batch, plain, fields):
    drafter = random_drafter(target, list(range(0, VOCAB_SIZE, 5)), **fields)
    for threshold in (0.0, 0.4):
        output = target.generate(
            **batch.inputs,
            assistant_model=drafter,
            max_new_tokens=24,
            do_sample=False,
            dspark_confidence_threshold=threshold,
        )
        assert torch.equal(output, plain)


def test_another_target_of_the_same_shape(target, batch, plain):
    drafter = random_drafter(tiny_target(seed=1), list(range(50)))
    for model in (tiny_target(seed=1, eos_token_id=None), target):
        expected = model.generate(**batch.inputs, max_new_tokens=12, do_sample=False)
        output = model.generate(**batch.inputs, assistant_model=drafter, max_new_tokens=12, do_sample=False)
        assert torch.equal(output, expected)


class Centred(LogitsProcessor):
    """Makes no numbers of scores with -inf among them."""

    def __call__(self, input_ids, scores):
        return scores - scores.mean(dim=-1, keepdim=True)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_allowed_tokens_fn": lambda row, ids: [100, 101, 102]},
        {"logits_processor": LogitsProcessorList([Centred()])},
    ],
    ids=["nothing_left", "no_numbers"],
)
def test_processors_that_leave_no_scores(target, batch, options, do_sample):
    options = {**options, "max_new_tokens": 12, "do_sample": do_sample}
    drafter = random_drafter(target, list(range(50)))
    output = target.generate(**batch.inputs, assistant_model=drafter, **options)
    assert sum(entry.drafted for entry in drafter.last_stats.rounds) > 0
    if not do_sample:
        assert torch.equal(output, target.generate(**batch.inputs, **options))
    elif "logits_processor" not in options:
        assert output[:, batch.width :].unique().tolist() == [100, 101, 102]
