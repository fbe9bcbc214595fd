"""Capacity profiles: what they say between measured points, what they belong to, how they are kept and measured."""

from __future__ import annotations

import copy
import dataclasses
import json
import os

import numpy as np
import pytest
import torch

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.generation import capacity
from dspark_hf.generation.capacity import (
    CapacityProfile,
    DraftProfile,
    drafter_identity,
    find_profile,
    measure_capacity,
    profile_path,
    save_profile,
    target_identity,
)

from ..tiny import tiny_prompt, tiny_target

GAMMA = 3


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder that does not exist yet."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_target(**overrides):
    return tiny_target("qwen3", num_hidden_layers=2, **overrides)


def make_drafter(target, **overrides):
    fields = {"block_size": GAMMA, "num_hidden_layers": 1, "markov_rank": 4, "mask_token_id": 0}
    return get_drafter(target, DSparkConfig(**fields | overrides)).eval()


def make_profile(measured_on=None, drafter=None, scale=1.0):
    """Two contexts, rows 1, 2 and 4, lengths 1 to 3; `drafter` is what its draft part is measured on."""
    first = [[1.0, 2.0, 2.5], [2.0, 3.0, 4.0], [3.0, 5.0, 3.0]]
    second = [[2.0, 3.0, 3.5], [3.0, 4.0, 5.0], [4.0, 6.0, 4.0]]
    draft = DraftProfile(drafter or {}, (1, 3), nested([[[0.1, 0.3], [0.2, 0.6], [0.4, 0.8]]] * 2))
    table = nested((scale * np.array([first, second])).tolist())
    return CapacityProfile(measured_on or {"model": "T"}, (100, 300), (1, 2, 4), (1, 2, 3), table, draft)


def nested(table):
    return tuple(tuple(map(tuple, lines)) for lines in table)


# --- between measured points ---


@pytest.mark.parametrize(
    ("rows", "context", "seconds"),
    [
        (1, 100, [1.0, 2.0, 2.5]),
        (4, 300, [4.0, 6.0, 4.0]),
        (3, 100, [2.5, 4.0, 3.5]),  # between rows
        (2, 150, [2.25, 3.25, 4.25]),  # between contexts
        (3, 200, [3.0, 4.5, 4.0]),  # both
        (1, 1, [1.0, 2.0, 2.5]),  # shorter than measured
        (1, 10_000, [2.0, 3.0, 3.5]),  # longer than measured
        (8, 100, [5.0, 9.0, 3.0]),  # more rows: along the last segment, not where it falls
    ],
)
def test_curve(rows, context, seconds):
    curve = make_profile().curve(rows, context)
    assert list(curve.tokens) == [rows, 2 * rows, 3 * rows]
    assert list(curve.seconds) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("rows", "context", "count", "seconds"),
    [
        (1, 100, 1, 0.1),
        (1, 100, 2, 0.2),
        (3, 200, 3, 0.7),
        (8, 100, 3, 1.2),
        (2, 100, 9, 0.6),  # no more than were measured
        (2, 100, 0, 0.0),
    ],
)
def test_draft_seconds(rows, context, count, seconds):
    assert make_profile().draft_seconds(rows, context, count) == pytest.approx(seconds, rel=1e-12)


def test_one_of_everything():
    profile = CapacityProfile({}, (100,), (2,), (1,), (((0.5,),),))
    for rows in (1, 2, 3):
        assert list(profile.curve(rows, 50).seconds) == [0.5]
    with pytest.raises(ValueError, match="does not know what drafts cost"):
        profile.draft_seconds(1, 100, 1)
    with pytest.raises(ValueError, match="`rows` is 0"):
        profile.curve(0, 100)


# --- files ---


def test_round_trip(tmp_path):
    profile = make_profile()
    assert CapacityProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    without = dataclasses.replace(profile, draft=None)
    path = tmp_path / "deep" / "profile.json"
    for entry in (without, profile):
        entry.save(path)
        assert CapacityProfile.load(path) == entry
    assert [path.name for path in path.parent.iterdir()] == ["profile.json"]


def set_field(*keys, value):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_field("version", value=0), "has version 0"),
        (set_field("rows", value=[1, 4, 2]), "`rows` is \\(1, 4, 2\\)"),
        (set_field("rows", value=[1.0, 2.0, 4.0]), "`rows` is"),
        (set_field("contexts", value=[]), "`contexts` is \\(\\)"),
        (set_field("contexts", value=[100]), "`verify_seconds` has shape \\(2, 3, 3\\); .* must be \\(1, 3, 3\\)"),
        (set_field("lengths", value=[2, 3, 4]), "`lengths` is .* must be 1"),
        (set_field("verify_seconds", 1, 2, 0, value=float("nan")), "`verify_seconds` holds times that are not"),
        (set_field("verify_seconds", 1, 2, 0, value=0.0), "`verify_seconds` holds times that are not"),
        (set_field("verify_seconds", 1, 2, 0, value="fast"), "`verify_seconds` is no table of numbers"),
        (set_field("verify_seconds", 1, 2, value=[1.0]), "`verify_seconds` is no table of numbers"),
        (set_field("verify_seconds", value=3), "missing or of another type"),
        (set_field("draft", "counts", value=[1]), "`draft.seconds` has shape"),
        (set_field("draft", "seconds", 0, 0, 0, value=float("inf")), "`draft.seconds` holds times"),
        (set_field("draft", value={}), "missing or of another type"),
        (lambda data: data.pop("measured_on"), "'measured_on'"),
    ],
)
def test_damaged_profile(tmp_path, change, says):
    data = copy.deepcopy(json.loads(json.dumps(make_profile().to_json())))
    change(data)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=f"profile.json' is no capacity profile that can be used: .*{says}"):
        CapacityProfile.load(path)


@pytest.mark.parametrize("content", [b"", b'{"version": 1', b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_file(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="measure again with `dspark profile`"):
        CapacityProfile.load(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        CapacityProfile.load(tmp_path / "absent.json")


def test_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    path = tmp_path / "profile.json"
    make_profile().save(path)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        make_profile(scale=2.0).save(path)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert CapacityProfile.load(path) == make_profile()


# --- what a profile belongs to ---


def test_identity_of_a_target(tmp_path):
    target = make_target()
    known = target_identity(target)
    assert json.loads(json.dumps(known)) == known
    # Not by weights, names, token ids or what saving writes into a config.
    same = make_target(seed=1, name_or_path="elsewhere", eos_token_id=5, architectures=["Other"])
    assert target_identity(same) == known
    target.save_pretrained(tmp_path / "saved")
    assert target_identity(type(target).from_pretrained(tmp_path / "saved")) == known
    for other in (make_target(intermediate_size=64), tiny_target("qwen3", num_hidden_layers=3), tiny_target("llama")):
        assert target_identity(other)["config"] != known["config"]


def test_identity_follows_the_target_about(monkeypatch):
    target = make_target()
    known = target_identity(target)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: known["threads"] + 1)
        assert target_identity(target) == {**known, "threads": known["threads"] + 1}
    assert target_identity(target.to(torch.bfloat16)) == {**known, "dtype": "bfloat16"}
    target.to(torch.float32).set_attn_implementation("eager")
    assert target_identity(target) == {**known, "attention": "eager"}
    quantized = make_target()
    quantized.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    changed = target_identity(quantized)
    assert changed["quantization"].startswith("bitsandbytes ")
    assert {**changed, "quantization": None} == known


def test_identity_of_a_drafter():
    target = make_target()
    known = drafter_identity(make_drafter(target))
    same = make_drafter(target, confidence_temperatures=[1.5] * GAMMA, generation_prompt_ids=[5, 6])
    same.config.target_name_or_path = "elsewhere"
    assert drafter_identity(same) == known
    assert drafter_identity(make_drafter(target, markov_rank=8)) != known
    assert drafter_identity(make_drafter(target).to(torch.bfloat16)) != known


# --- kept profiles ---


def test_found_where_it_was_saved(cache):
    target = make_target()
    assert find_profile(target) is None
    profile = make_profile(target_identity(target))
    path = save_profile(profile, target)
    assert path == profile_path(target)
    assert path.parent == cache
    assert find_profile(target) == dataclasses.replace(profile, draft=None)
    assert find_profile(make_target(seed=3)) is find_profile(target)
    assert find_profile(make_target(intermediate_size=64)) is None
    target.to(torch.bfloat16)
    assert find_profile(target) is None


def test_new_profile_is_seen_and_an_old_one_is_not_read_twice(monkeypatch):
    target = make_target()
    identity = target_identity(target)
    reads = []
    load = CapacityProfile.load
    monkeypatch.setattr(CapacityProfile, "load", lambda path: reads.append(path) or load(path))
    for scale in (1.0, 2.0, 3.0):
        path = save_profile(make_profile(identity, scale=scale), target)
        os.utime(path, ns=(10**18, 10**18))  # a clock too coarse to tell them apart
        for _ in range(3):
            assert find_profile(target).verify_seconds[0][0][0] == scale
    assert len(reads) == 3
    path.unlink()
    assert find_profile(target) is None


def test_draft_part_of_another_drafter_is_left_out():
    target = make_target()
    drafter, other = make_drafter(target), make_drafter(target, markov_rank=8)
    profile = make_profile(target_identity(target), drafter_identity(drafter))
    save_profile(profile, target)
    assert find_profile(target, drafter) == profile
    for stranger in (other, None):
        assert find_profile(target, stranger) == dataclasses.replace(profile, draft=None)
    assert find_profile(target, drafter) is find_profile(target, drafter)


def test_profile_of_another_target_is_not_kept(cache):
    target = make_target()
    profile = make_profile({**target_identity(target), "dtype": "float16"})
    with pytest.raises(ValueError, match="differs from `target` in \\['dtype'\\]"):
        save_profile(profile, target)
    assert not cache.exists()
    # A file that was renamed by hand does not count either.
    profile.save(profile_path(target))
    assert find_profile(target) is None
    profile_path(target).write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no capacity profile"):
        find_profile(target)


# --- measuring ---


def test_measured_profile():
    target = make_target().train()
    drafter = make_drafter(target)
    steps = []
    before = torch.random.get_rng_state()
    profile = measure_capacity(
        target, drafter, max_rows=3, contexts=[40, 20, 40], repeats=2, warmup=1, progress=lambda *at: steps.append(at)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert target.training
    assert profile.measured_on == target_identity(target)
    assert (profile.contexts, profile.rows, profile.lengths) == ((20, 40), (1, 2, 3), (1, 2, 3, 4))
    assert np.shape(profile.verify_seconds) == (2, 3, 4)
    assert profile.draft.measured_on == drafter_identity(drafter)
    assert profile.draft.counts == (1, GAMMA)
    assert np.shape(profile.draft.seconds) == (2, 3, 2)
    assert np.shape(profile.draft.plain_seconds) == (2, 3, 1) and profile.plain_seconds(2, 30) > 0
    assert steps == [(step, 6) for step in range(1, 7)]
    save_profile(profile, target)
    assert find_profile(target, drafter) == profile


def test_without_a_drafter_and_with_one_of_one_token():
    target = make_target()
    profile = measure_capacity(target, max_rows=1, contexts=[8], repeats=1, warmup=0)
    assert (profile.rows, profile.lengths, profile.draft) == ((1,), tuple(range(1, 9)), None)
    drafter = make_drafter(target, block_size=1)
    profile = measure_capacity(target, drafter, max_rows=1, contexts=[8], lengths=3, repeats=1, warmup=0)
    assert (profile.lengths, profile.draft.counts) == ((1, 2, 3), (1,))


def test_plain_seconds():
    """Looked up like the others; profiles from before they were measured have none."""
    profile = make_profile()
    assert profile.plain_seconds(2, 100) == 0
    plain = nested([[[0.1], [0.2], [0.4]], [[0.3], [0.4], [0.6]]])
    profile = dataclasses.replace(profile, draft=dataclasses.replace(profile.draft, plain_seconds=plain))
    assert profile.plain_seconds(2, 200) == pytest.approx(0.3)
    data = profile.to_json()
    assert CapacityProfile.from_json(json.loads(json.dumps(data))) == profile
    del data["draft"]["plain_seconds"]
    assert CapacityProfile.from_json(data).plain_seconds(2, 200) == 0
    with pytest.raises(ValueError, match=r"`draft.plain_seconds` has shape"):
        dataclasses.replace(profile, draft=dataclasses.replace(profile.draft, plain_seconds=plain[:1]))


class FakeClock:
    """Each verification takes as long as it has tokens, times ten in the warm-up."""

    def __init__(self, device):
        self.device = device

    def now(self):
        return None

    def seconds(self, start, end):
        return FakeClock.last


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4"])
def test_every_verification_sees_the_same_text(family, monkeypatch):
    """Each is rolled back whole: its logits are those of the prompt with just its own tokens after it."""
    target = tiny_target(family)
    seen = []

    class Session(capacity.TargetSession):
        def verify(self, ids):
            output = super().verify(ids)
            seen.append((ids, output.logits))
            FakeClock.last = ids.numel() * (10.0 if len(seen) <= 9 else 1.0)
            return output

    monkeypatch.setattr(capacity, "TargetSession", Session)
    monkeypatch.setattr(capacity, "Stopwatch", FakeClock)
    ids = tiny_prompt(length=20 + 3, batch=2)
    seconds = capacity._verify_seconds(target, [0], ids, lengths=3, repeats=2, warmup=3)
    assert seconds == [2.0, 4.0, 6.0]
    assert [length.shape[1] for length, _ in seen] == [1, 2, 3] * 5
    with torch.no_grad():
        expected = target(ids).logits[:, 20:]
    for given, logits in seen:
        torch.testing.assert_close(logits, expected[:, : given.shape[1]], atol=1e-4, rtol=1e-4)


def test_cost_of_drafting_is_the_difference_to_plain_rounds(monkeypatch):
    """Beside verifying, rounds take 1 s and 0.5 s for each drafted token; the first of a call takes longer."""
    target = make_target()
    drafter = make_drafter(target, generation_prompt_ids=[7, 8])
    generate = type(target).generate
    calls = []

    def timed(self, **options):
        calls.append(options)
        output = generate(self, **options)
        rounds = drafter.last_stats.rounds
        for index, entry in enumerate(rounds):
            drafted = entry.drafted / entry.rows
            own = 1.0 + 0.5 * drafted + (100.0 if index == 0 else 0.0)
            rounds[index] = dataclasses.replace(
                entry, verify_seconds=7.0 * (1 + drafted), seconds=7.0 * (1 + drafted) + own
            )
        return output

    monkeypatch.setattr(type(target), "generate", timed)
    prompts = tiny_prompt(length=10, batch=2)
    for count in (0, 1, GAMMA):
        assert set(capacity._seconds_without_verifying(target, drafter, prompts, count)) == {1.0 + 0.5 * count}
    calls.clear()
    seconds = capacity._round_seconds(target, drafter, prompts, (1, GAMMA), 3, 1)
    assert seconds == pytest.approx([1.0, 0.5, 0.5 * GAMMA])
    assert all(options["input_ids"][:, -2:].tolist() == [[7, 8]] * 2 for options in calls)
    assert all(options["input_ids"].shape == (2, 10) for options in calls)


def test_decoding_is_as_before():
    target = make_target()
    drafter = make_drafter(target)
    ids = tiny_prompt()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    before = target.generate(ids, **options)
    measure_capacity(target, drafter, max_rows=2, contexts=[16], repeats=1, warmup=0)
    assert torch.equal(target.generate(ids, **options), before)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), before)
    assert not target.training


def test_prompts_without_special_tokens():
    target = make_target()
    target.generation_config.eos_token_id = [2, 11]
    vocabulary = capacity._ordinary_ids(target).tolist()
    assert sorted({*vocabulary, 0, 1, 2, 11}) == list(range(target.config.vocab_size))
    assert not {0, 1, 2, 11} & set(vocabulary)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_rows": 0}, "`max_rows` is 0"),
        ({"lengths": 0}, "`lengths` is 0"),
        ({"repeats": 0}, "`repeats` is 0"),
        ({"warmup": -1}, "`warmup` is -1"),
        ({"contexts": []}, "`contexts` is \\[\\]"),
        ({"contexts": [4, 0]}, "`contexts` is \\[4, 0\\]"),
        ({"contexts": [4, 60]}, "`contexts` has 60, .* `max_position_embeddings` = 64. Give contexts of at most 56"),
    ],
)
def test_bad_input(options, says):
    with pytest.raises(ValueError, match=says):
        measure_capacity(make_target(max_position_embeddings=64), **options)


def test_context_leaves_room_for_drafted_rounds():
    target = make_target(max_position_embeddings=64)
    with pytest.raises(ValueError, match="after which 17 more tokens are measured"):
        measure_capacity(target, make_drafter(target), contexts=[48])
    with pytest.raises(ValueError, match="was made for another target"):
        measure_capacity(target, make_drafter(make_target(hidden_size=32)), contexts=[16])
