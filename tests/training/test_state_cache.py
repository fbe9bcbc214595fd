"""Target states on disk: what is read is what was computed, for this target and these data only, whatever happens."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset, Features, Sequence, Value
from filelock import FileLock
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspark_hf.data import prepare_dataset
from dspark_hf.training import (
    DSparkTrainer,
    StateCache,
    cache_target_states,
    compute_target_states,
    fill_state_cache,
    open_state_cache,
    state_cache,
    train_drafter,
)
from dspark_hf.training.state_manifest import FILE, data_fingerprint, weights_fingerprint
from dspark_hf.training.state_storage import STORAGES, Layout, pack, unpack

from .test_trainer import make_args, make_drafter, weights

LAYERS = [0, 1, 2]  # those that the trainer's tests capture
SHARD_SIZE = 0.02  # MiB: one, two or five of the 16 examples, as storage goes


def fill(target: PreTrainedModel, dataset: Dataset, folder: Path, **options: Any) -> StateCache:
    return fill_state_cache(target, dataset, LAYERS, folder, **{"shard_size": SHARD_SIZE, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# --- what is read ------------------------------------------------------------------------------------------------


def online(target: PreTrainedModel, row: dict[str, list[int]]) -> torch.Tensor:
    """`(n, parts, d)`."""
    ids = torch.tensor(row["input_ids"])[None]
    states = compute_target_states(target, LAYERS, ids, torch.ones_like(ids))
    return torch.cat([states.context, states.last], dim=-1)[0].unflatten(-1, (len(LAYERS) + 1, -1))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_states_are_those_of_the_target(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, storage: str, dtype: torch.dtype
) -> None:
    target = copy.deepcopy(target).to(dtype)
    cache = fill(target, dataset, tmp_path, storage=storage)
    assert len(shards(tmp_path)) > 2
    order = [11, 3, 3, 15, 0]
    width = 2 + max(len(dataset[index]["input_ids"]) for index in order)
    read = cache.read(order, width)
    assert read.context.shape == (5, width, 3 * 32) and read.last.shape == (5, width, 32)
    assert read.context.dtype == read.last.dtype == dtype
    states = torch.cat([read.context, read.last], dim=-1).unflatten(-1, (4, -1))
    for row, index in zip(states, order):
        expected = online(target, dataset[index])
        assert not row[len(expected) :].any()
        # Alone and in a batch, a target rounds differently.
        rounding = 1e-5 if dtype == torch.float32 else 2**-6
        stored = {"float32": 0.0, "bf16": 0.0 if dtype == torch.bfloat16 else 2**-8, "int8": 1 / 254 + 1e-6}[storage]
        size = expected.float().abs().amax(dim=-1, keepdim=True)
        assert ((row[: len(expected)].float() - expected.float()).abs() <= (stored + rounding) * size).all()


def test_eight_bits_lose_at_most_half_a_step() -> None:
    torch.manual_seed(0)
    # Layers and tokens of very different sizes, an outlier, zeros.
    states = torch.randn(6, 4, 32) * torch.logspace(-6, 6, 24).view(6, 4, 1)
    states[2, 1], states[3, 1, 5] = 0, 1000
    stored = pack(states, "int8")
    assert stored["states"].dtype == torch.int8 and stored["scales"].shape == (6, 4)
    error = (unpack(stored, torch.float32) - states).abs()
    assert (error <= states.abs().amax(dim=-1, keepdim=True) / 127 * 0.5001).all()
    assert not error[2, 1].any()


@pytest.mark.parametrize(
    "kind, storage", [*(("dspark", storage) for storage in STORAGES), ("eagle3", "float32"), ("mtp", "float32")]
)
def test_training_from_the_cache(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, kind: str, storage: str
) -> None:
    """Shuffled, padded, accumulated over batches, in two epochs; evaluation is online in all."""
    runs = {}
    for name, options in {
        "online": {},
        "cached": {"states_cache": str(tmp_path / "states"), "states_storage": storage},
    }.items():
        args = make_args(
            tmp_path / name, per_device_train_batch_size=3, gradient_accumulation_steps=2, logging_steps=1, **options
        )
        drafter = make_drafter(target, kind=kind)
        train_drafter(target, dataset, drafter, args, eval_data=dataset.select(range(5)))
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        runs[name] = [entry["loss"] for entry in state["log_history"] if "loss" in entry], weights(drafter)
        summary = json.loads((tmp_path / name / "training_summary.json").read_text())
        assert summary["states"] == (storage if name == "cached" else "online")
        assert summary["metrics"]["eval_tau"] >= 1
    (losses, expected), (cached_losses, found) = runs.values()
    assert len(losses) == 6
    if storage == "float32":
        assert cached_losses == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    else:
        assert cached_losses == pytest.approx(losses, rel=1e-2)
        assert cached_losses != losses


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp"])
def test_training_from_a_cache_with_normalisers(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a drafter with a reduced vocabulary: the same as online, and the target's whole LM head is not run."""
    runs, whole = {}, []
    head = target.get_output_embeddings()
    hook = head.register_forward_hook(lambda *_: whole.append(1))
    train = DSparkTrainer.train
    # Before that, the head is run for the cache, and to see that this target can be trained for.
    monkeypatch.setattr(DSparkTrainer, "train", lambda self, **options: whole.clear() or train(self, **options))
    for name, normalisers in (("online", None), ("without", False), ("with", True), ("by itself", None)):
        options = {} if name == "online" else {"states_cache": str(tmp_path / "states" / name)}
        args = make_args(tmp_path / name, states_storage=options and "float32" or None, logging_steps=1, **options)
        drafter = make_drafter(target, [*range(3, 43)], kind, draft_vocab_size=40)
        if normalisers is not None:
            layers = drafter.config.target_layer_ids
            cache = cache_target_states(target, dataset, layers, args, normalisers=normalisers)
            assert cache.manifest.normalisers == normalisers
        train_drafter(target, dataset, drafter, args)
        assert bool(whole) == (name in ("online", "without"))
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        runs[name] = [entry["loss"] for entry in state["log_history"] if "loss" in entry], weights(drafter)
    hook.remove()
    losses, expected = runs.pop("online")
    assert len(losses) == 6 and runs["with"][0] == runs["by itself"][0]
    for cached_losses, found in runs.values():
        assert cached_losses == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("storage", STORAGES)
def test_normalisers_are_those_of_the_stored_states(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, storage: str
) -> None:
    cache = fill(target, dataset, tmp_path, storage=storage, normalisers=True)
    read = cache.read([3, 8], 40)
    known = read.normaliser
    for place, index in enumerate([3, 8]):
        mask = torch.tensor(dataset[index]["loss_mask"]).bool()
        logits = target.get_output_embeddings()(read.last[place, : len(mask)]).float()
        used = ~known.log_sum[place, : len(mask)].isnan()
        assert used[mask].all() and used[:-1][mask[1:]].all() and not used.all()
        torch.testing.assert_close(known.log_sum[place, : len(mask)][used], logits.logsumexp(-1)[used])
        assert torch.equal(known.likeliest[place, : len(mask)][used], logits.argmax(-1)[used])
        assert known.log_sum[place, len(mask) :].isnan().all()
    # The size that was announced counts them.
    lengths = [len(row["input_ids"]) for row in dataset]
    size = sum(cache.manifest.layout.bytes_of(length) for length in lengths)
    assert cache.bytes == pytest.approx(size, rel=0.1)
    assert size > sum(Layout(storage, 4, 32).bytes_of(length) for length in lengths) + 8 * sum(lengths)


def test_caches_with_and_without_normalisers(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    """A folder keeps what it has, and says so where more is asked for; older folders have none."""
    fill(target, dataset, tmp_path / "with", normalisers=True)
    assert fill(target, dataset, tmp_path / "with").manifest.normalisers
    assert fill(target, dataset, tmp_path / "with", normalisers=False).manifest.normalisers
    fill(target, dataset, tmp_path / "without")
    with pytest.raises(ValueError, match="made otherwise: without `normalisers`. .* give another folder"):
        fill(target, dataset, tmp_path / "without", normalisers=True)
    manifest = tmp_path / "without" / FILE
    content = json.loads(manifest.read_text())
    assert content.pop("normalisers") is False
    manifest.write_text(json.dumps(content))
    cache = open_state_cache(tmp_path / "without", target, LAYERS, dataset)
    assert not cache.manifest.normalisers and cache.read([0], 40).normaliser is None


def test_normalisers_need_a_head_that_makes_the_logits(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path
) -> None:
    odd = copy.deepcopy(target)
    odd.get_output_embeddings().register_forward_hook(lambda module, inputs, output: 2 * output)
    fill(odd, dataset, tmp_path / "states", normalisers=True)  # as its head does so everywhere
    odd.config.final_logit_softcapping = 0.5
    with pytest.raises(ValueError, match="does not make its logits from its last hidden state"):
        fill(odd, dataset, tmp_path / "other", normalisers=True)
    assert shards(tmp_path / "other") == []


def test_the_target_is_not_run(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make_args(tmp_path / "drafter", states_cache=str(tmp_path / "states"))
    drafter = make_drafter(target)
    cache_target_states(target, dataset, drafter.config.target_layer_ids, args, announce=lambda text: None)
    # A complete cache may be shared by those who cannot write.
    monkeypatch.setattr(state_cache, "_alone", None)
    monkeypatch.setattr(state_cache, "write_whole", None)
    cache_target_states(target, dataset, drafter.config.target_layer_ids, args)
    trainer = DSparkTrainer(drafter, target, args, dataset, dataset)
    monkeypatch.setattr(target, "forward", None)
    trainer.train()
    assert trainer.state.global_step == 6


# --- what is refused ---------------------------------------------------------------------------------------------


def other_target(target: PreTrainedModel, scale: float = 1.01) -> PreTrainedModel:
    other = copy.deepcopy(target)
    other.model.layers[1].mlp.up_proj.weight.data *= scale
    return other


def test_cache_of_something_else_is_refused(
    target: PreTrainedModel, dataset: Dataset, rows: list[dict[str, list[int]]], tmp_path: Path
) -> None:
    fill(target, dataset, tmp_path)
    before = contents(tmp_path)
    config = copy.deepcopy(target)
    config.config.rope_parameters = {**config.config.rope_parameters, "rope_theta": 5000.0}
    masked = [*rows[:3], {**rows[3], "loss_mask": [1] * len(rows[3]["loss_mask"])}, *rows[4:]]
    other_ids = [*rows[:15], {**rows[15], "input_ids": rows[15]["input_ids"][::-1]}]
    given: tuple[tuple[dict[str, Any], str], ...] = (
        ({"target": other_target(target)}, "from a target with other weights"),
        ({"target": config}, "from a target with another config"),
        ({"target": copy.deepcopy(target).half()}, "from a target in float32, not float16[.] Use"),
        ({"target_layer_ids": [0, 2]}, r"of the layers \[0, 1, 2\], not \[0, 2\]"),
        ({"dataset": Dataset.from_list(rows[::-1])}, "over other token ids or loss masks"),
        ({"dataset": dataset.select(range(15))}, "16 examples with .* tokens, not 15 with"),
        ({"dataset": Dataset.from_list(masked)}, "over other token ids or loss masks"),
        ({"dataset": Dataset.from_list(other_ids)}, "another tokenizer or chat template"),
        ({"storage": "int8"}, "in `states_storage` 'bf16', not 'int8'"),
    )
    for changes, says in given:
        options = {"target": target, "dataset": dataset, "target_layer_ids": LAYERS, "folder": tmp_path, **changes}
        for use in (open_state_cache, fill_state_cache):
            with pytest.raises(ValueError, match=f"whose states were made otherwise: .*{says}.*give another folder"):
                use(**options)
    padded = copy.deepcopy(target)
    padded.config.pad_token_id = 0  # as scripts do that set what a tokenizer lacks
    open_state_cache(tmp_path, padded, LAYERS, dataset)
    assert contents(tmp_path) == before
    trainer_args = make_args(tmp_path / "drafter", states_cache=str(tmp_path))
    with pytest.raises(ValueError, match="with other weights"):
        DSparkTrainer(make_drafter(target), other_target(target), trainer_args, dataset)


def test_another_chat_template_is_refused(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "how are you"}]
    chats = Dataset.from_list([{"messages": messages}] * 3)

    def cache(**options: Any) -> StateCache:
        args = make_args(tmp_path / "drafter", states_cache=str(tmp_path / "states"), **options)
        return cache_target_states(target, chats, LAYERS, args, tokenizer=tokenizer)

    cache()
    assert cache().manifest.source.examples == 3
    with pytest.raises(ValueError, match="another tokenizer or chat template"):
        cache(enable_thinking=False)
    tokenizer.chat_template = tokenizer.chat_template.replace("<s>", "<s> <s>")
    with pytest.raises(ValueError, match="another tokenizer or chat template"):
        cache()


def test_fingerprints(target: PreTrainedModel, rows: list[dict[str, list[int]]], tmp_path: Path) -> None:
    print_of_weights = weights_fingerprint(target)
    target.save_pretrained(tmp_path)
    assert weights_fingerprint(type(target).from_pretrained(tmp_path)) == print_of_weights
    assert weights_fingerprint(other_target(target, 1 + 1e-6)) != print_of_weights
    wide = Features({"input_ids": Sequence(Value("int64")), "loss_mask": Sequence(Value("bool"))})
    narrow, _ = prepare_dataset(Dataset.from_list(rows), max_length=64, vocab_size=200)
    found, lengths = data_fingerprint(narrow)
    assert lengths == [len(row["input_ids"]) for row in rows]
    again = Dataset.from_list(rows, features=wide)
    assert data_fingerprint(again)[0] == found, "whatever the width of the columns"
    assert data_fingerprint(again.select([*range(1, 16), 0]))[0] != found
    # The same tokens, split into examples elsewhere.
    joined = [*rows[:14], {name: rows[14][name] + rows[15][name] for name in rows[0]}]
    assert data_fingerprint(Dataset.from_list(joined, features=wide))[0] != found


def test_user_errors(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    for options, says in (
        ({"storage": "int4"}, "`states_storage` is 'int4'; choose one of bf16, float32, int8"),
        ({"shard_size": 0}, "`shard_size` is 0; it must be a positive number"),
        ({"batch_size": 0}, "`batch_size` is 0"),
    ):
        with pytest.raises(ValueError, match=says):
            fill(target, dataset, tmp_path / "states", **options)
    for layers in ([], [2, 1], [0, 0], [-2, 1], [0, 4]):
        with pytest.raises(ValueError, match="`target_layer_ids` is .*; give layers from -1 .* to 3, rising"):
            fill_state_cache(target, dataset, layers, tmp_path / "states")
    with pytest.raises(ValueError, match="`train_dataset` is"):
        fill(target, [dataset[0]], tmp_path / "states")
    with pytest.raises(ValueError, match="`states_storage` is 'int4'"):
        make_args(tmp_path, states_storage="int4")
    with pytest.raises(ValueError, match="`states_storage` is set and `states_cache` is not"):
        make_args(tmp_path, states_storage="int8")
    with pytest.raises(ValueError, match="`states_cache` is empty"):
        make_args(tmp_path, states_cache="")
    with pytest.raises(ValueError, match="`states_cache` is unset"):
        cache_target_states(target, dataset, LAYERS, make_args(tmp_path))
    assert not (tmp_path / "states").exists()


def test_states_that_are_not_finite_are_refused(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="states of example [0-9]+ are not finite in float32"):
        fill(other_target(target, float("inf")), dataset, tmp_path)
    assert shards(tmp_path) == []


def test_no_cache_or_something_else(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(OSError, match=f"{folder}', where there is no cache .*Fill it with `dspark cache`"):
            open_state_cache(folder, target, LAYERS, dataset)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds 'notes.txt' but no manifest.json of a cache; give a fresh folder"):
        fill(target, dataset, tmp_path)
    with pytest.raises(ValueError, match="is a file; give a folder"):
        fill(target, dataset, tmp_path / "notes.txt")
    (tmp_path / FILE).write_text('{"name": "of something else"}')
    for use in (fill, lambda *given: open_state_cache(given[2], target, LAYERS, dataset)):
        with pytest.raises(ValueError, match="manifest.json cannot be used .it is no manifest of target states"):
            use(target, dataset, tmp_path)
    assert sorted(contents(tmp_path)) == [FILE, "notes.txt"]


# --- what a disk does --------------------------------------------------------------------------------------------


def test_damaged_shard_is_never_read(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    fill(target, dataset, tmp_path / "states")
    before = contents(tmp_path / "states")
    path = shards(tmp_path / "states")[1]
    damaged = bytearray(path.read_bytes())
    damaged[-40] ^= 1
    path.write_bytes(damaged)
    cache = open_state_cache(tmp_path / "states", target, LAYERS, dataset)
    cache.read([0, 15], 40)
    with pytest.raises(OSError, match=f"{path.name}' .* is damaged.*Remove this file.*`dspark cache`"):
        cache.read([3], 40)
    args = make_args(tmp_path / "drafter", states_cache=str(tmp_path / "states"))
    with pytest.raises(OSError, match="is damaged"):
        train_drafter(target, dataset, make_drafter(target), args)
    path.unlink()
    train_drafter(target, dataset, make_drafter(target), args)
    assert contents(tmp_path / "states") == before


@pytest.mark.parametrize("harm", ["missing", "truncated"])
def test_lost_shards_are_computed_again(target: PreTrainedModel, dataset: Dataset, tmp_path: Path, harm: str) -> None:
    fill(target, dataset, tmp_path / "states")
    before = contents(tmp_path / "states")
    path = shards(tmp_path / "states")[2]
    path.unlink() if harm == "missing" else os.truncate(path, 1000)
    args = make_args(tmp_path / "drafter", states_cache=str(tmp_path / "states"))
    with pytest.raises(OSError, match=f"incomplete: of {len(before) - 2} shards 1 are .* the first is {path.name}"):
        DSparkTrainer(make_drafter(target), target, args, dataset)
    kept = shards(tmp_path / "states")[0].stat().st_mtime_ns
    fill(target, dataset, tmp_path / "states", shard_size=7.0)  # a cache that is gone on with keeps its own
    assert contents(tmp_path / "states") == before
    assert shards(tmp_path / "states")[0].stat().st_mtime_ns == kept


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"format": "dspark-hf target states", "version": 1}'])
def test_missing_or_torn_manifest(target: PreTrainedModel, dataset: Dataset, tmp_path: Path, content: str) -> None:
    fill(target, dataset, tmp_path)
    (tmp_path / FILE).unlink()
    if content:
        (tmp_path / FILE).write_text(content)
    says = "manifest.json cannot be used" if content else "holds 'states-000000.safetensors' but no manifest.json"
    with pytest.raises(ValueError, match=f"{says}.*give a.* folder"):
        fill(target, dataset, tmp_path)


class Usage(NamedTuple):
    free: int


@pytest.mark.parametrize("storage", STORAGES)
def test_size_is_known_before(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    tokens = sum(map(len, dataset["input_ids"]))
    predicted = Layout(storage, len(LAYERS) + 1, 32).bytes_of(tokens, len(dataset))
    said: list[str] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free=predicted - 1))
    with pytest.raises(
        OSError, match=r"target states need .* KiB there in .*, and .* KiB are free\. Make room"
    ) as error:
        fill(target, dataset, tmp_path, storage=storage, announce=said.append)
    assert ("`states_storage` to int8" in str(error.value)) == (storage != "int8")
    assert f"16 examples with {tokens} tokens in {storage}: {predicted / 1024:.1f} KiB to be written" in said[0]
    assert shards(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free=predicted))
    cache = fill(target, dataset, tmp_path, storage=storage)
    assert cache.bytes == sum(path.stat().st_size for path in shards(tmp_path)) == pytest.approx(predicted, rel=0.03)
    assert all(path.stat().st_size <= SHARD_SIZE * 2**20 * 1.01 for path in shards(tmp_path))
    # What is there need not fit again.
    shards(tmp_path)[0].unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free=int(SHARD_SIZE * 2**20)))
    fill(target, dataset, tmp_path, storage=storage)


def test_example_larger_than_a_shard(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    cache = fill(target, dataset, tmp_path, shard_size=1e-6)
    assert len(shards(tmp_path)) == len(dataset)
    for index, path in enumerate(shards(tmp_path)):
        assert list(load_file(path)) == [f"states.{index}"]
    assert cache.read([7], 32).last.any()


# --- who fills ---------------------------------------------------------------------------------------------------


def slowly(target: PreTrainedModel, dataset: Dataset, folder: Path) -> None:
    """Fills in a process of its own that can be killed between any two calls of the system."""
    torch.set_num_threads(1)
    for name in ("fsync", "replace"):
        call = getattr(os, name)

        def wait(*given: Any, call: Any = call) -> Any:
            time.sleep(0.002)
            result = call(*given)
            time.sleep(0.002)
            return result

        setattr(os, name, wait)
    fill(target, dataset, folder, shard_size=1e-6)


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_killed_at_any_point(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    """Ten times: in the end there is what an unbroken run leaves, byte for byte."""
    many = Dataset.from_list([dataset[index % 16] for index in range(100)])
    fill(target, many, tmp_path / "unbroken", shard_size=1e-6)
    folder, context, dice = tmp_path / "broken", multiprocessing.get_context("fork"), random.Random(0)
    folder.mkdir()
    torn = 0
    for _ in range(10):
        process = context.Process(target=slowly, args=(target, many, folder))
        process.start()
        there, limit = len(shards(folder)), dice.randint(0, 6)
        while process.is_alive() and len(shards(folder)) < there + limit:
            time.sleep(0.0005)
        time.sleep(dice.random() * 0.02)
        assert process.is_alive(), "the examples do not last"
        process.kill()
        process.join()
        torn += any(path.suffix == ".new" for path in folder.iterdir())
        with pytest.raises(OSError, match="is incomplete|there is no cache"):
            open_state_cache(folder, target, LAYERS, many)
    assert torn, "some file was half written"
    assert 10 < len(shards(folder)) < 100
    fill(target, many, folder, shard_size=1e-6)
    assert contents(folder) == contents(tmp_path / "unbroken")


def test_second_run_waits_for_the_first(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(target, dataset, tmp_path / "ready")
    folder, found = tmp_path / "states", []
    folder.mkdir()
    with FileLock(folder / state_cache.LOCK), caplog.at_level(logging.WARNING):
        second = threading.Thread(target=lambda: found.append(fill(target, dataset, folder, announce=found.append)))
        second.start()
        while "Another process is filling" not in caplog.text:
            time.sleep(0.01)
        for path in (tmp_path / "ready").iterdir():
            if path.name != state_cache.LOCK:
                shutil.copy(path, folder)
    second.join()
    (cache,) = found  # nothing was announced, since nothing was left
    assert cache.bytes > 0 and contents(folder) == contents(tmp_path / "ready")


SCRIPT = """
import sys
from dspark_hf.training import load_target, state_cache, train_drafter
from datasets import Dataset
from tests.training.test_trainer import make_args, make_drafter

rows, folder, states, output = sys.argv[1:]
compute = state_cache._compute_shard

def count(*given):
    with open(f"{output}-shards", "a") as file:
        file.write("1")
    return compute(*given)

state_cache._compute_shard = count
target, _ = load_target(folder)
options = {"states_storage": "float32", "per_device_train_batch_size": 2, "ddp_backend": "gloo"}
args = make_args(output, states_cache=states, **options)
train_drafter(target, Dataset.from_json(rows), make_drafter(target), args)
"""


@pytest.mark.slow
def test_two_processes_share_a_cache(
    target: PreTrainedModel, target_folder: Path, dataset: Dataset, tmp_path: Path
) -> None:
    """One of them fills it, and both train as one does online."""
    (tmp_path / "script.py").write_text(SCRIPT)
    dataset.to_json(tmp_path / "rows.jsonl")
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    given = [tmp_path / "rows.jsonl", target_folder, tmp_path / "states", tmp_path / "two"]
    result = subprocess.run(
        [sys.executable, *launcher, *map(str, given)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "two-shards").read_text() == "1" * len(shards(tmp_path / "states"))
    one = train_drafter(target, dataset, make_drafter(target), make_args(tmp_path / "one"))
    found = load_file(tmp_path / "two" / "model.safetensors")
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=0)
