"""`generate` with the reference's drafters follows the reference round by round."""

from __future__ import annotations

import pytest
import torch

import dspark_hf
from dspark_hf.generation import drafting, verification

from .fixtures import CASES, EAGLE3_CASE, SAMPLING_CASE, load_drafter, load_json, load_target, load_tensors

RUNS = ["threshold_0.0", "threshold_0.5", "eos_accepted_draft", "eos_bonus_token", "eos_first_token"]

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=CASES)
def case(request):
    name = request.param
    return load_target(name), load_drafter(name), load_json(name)["spec"], load_tensors(name)["input_ids"]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("route", ["assistant_model", "custom_generate"])
def test_greedy_run(case, run, route):
    check_run(*case, run, route)


@pytest.mark.parametrize("run", ["greedy", "eos_accepted_draft"])
@pytest.mark.parametrize("route", ["assistant_model", "custom_generate"])
def test_greedy_run_of_eagle3(run, route, monkeypatch):
    """Also each token that was drafted."""
    target, drafter, spec = load_target(EAGLE3_CASE), load_drafter(EAGLE3_CASE), load_json(EAGLE3_CASE)["spec"]
    drafts, draft = [], drafting.DraftSession.draft

    def watch(self, *args):
        proposal = draft(self, *args)
        drafts.append(proposal.ids[0].tolist())
        return proposal

    monkeypatch.setattr(drafting.DraftSession, "draft", watch)
    check_run(target, drafter, spec, load_tensors(EAGLE3_CASE)["input_ids"], run, route)
    # The reference ends a draft with the end of sequence.
    expected = [entry["verify_input_ids"][1:] for entry in spec[run]["rounds"]]
    assert [ids[: len(other)] for ids, other in zip(drafts, expected, strict=True)] == expected


def check_run(target, drafter, runs, prompt, run, route):
    expected = runs[run]
    target.generation_config.eos_token_id = expected["stop_token_ids"]
    options = {"max_new_tokens": expected["args"]["max_new_tokens"], "do_sample": False}
    if expected["args"].get("confidence_threshold"):
        options["dspark_confidence_threshold"] = expected["args"]["confidence_threshold"]
    helper = drafter if route == "assistant_model" else dspark_hf.custom_generate(drafter)
    output = target.generate(input_ids=prompt, **{route: helper}, **options)
    assert output[0].tolist() == expected["output_ids"]
    rounds = drafter.last_stats.rounds
    assert len(rounds) == len(expected["acceptance_lengths"])
    # Of the round that ends the text the reference counts what is cut off afterwards.
    assert [entry.emitted for entry in rounds][:-1] == expected["acceptance_lengths"][:-1]
    assert [entry.accepted for entry in rounds][:-1] == expected["accepted_draft_lengths"][:-1]
    assert [entry.proposed for entry in rounds][:-1] == expected["proposal_lengths"][:-1]


@pytest.mark.parametrize("index", [0, 1])
def test_sampled_run_with_the_reference_seed(index, monkeypatch):
    """With the reference's way of drawing a token: same seed, same order of draws, same tokens."""
    for module in (drafting, verification):
        monkeypatch.setattr(module, "draw", lambda probs: torch.multinomial(probs, 1).squeeze(1))
    target, drafter = load_target(SAMPLING_CASE), load_drafter(SAMPLING_CASE)
    expected = load_json(SAMPLING_CASE)["seeded_runs"][index]
    prompt = load_tensors(SAMPLING_CASE)["input_ids"]
    target.generation_config.eos_token_id = None
    torch.manual_seed(expected["torch_manual_seed"])
    output = target.generate(
        input_ids=prompt,
        assistant_model=drafter,
        # The reference lets its last proposal run over the limit: so do we, by a higher limit.
        max_new_tokens=len(expected["output_ids"]) - prompt.shape[1] + drafter.config.block_size + 1,
        do_sample=True,
        top_k=0,
        dspark_confidence_threshold=expected["confidence_threshold"] or None,
    )
    assert output[0, : len(expected["output_ids"])].tolist() == expected["output_ids"]
    emitted = [entry.emitted for entry in drafter.last_stats.rounds]
    rounds = len(expected["acceptance_lengths"]) - 1
    assert emitted[:rounds] == expected["acceptance_lengths"][:rounds]
