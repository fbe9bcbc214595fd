"""Target states on disk: computed once, in shards, and read in training in place of running the target.

A folder has a manifest (what the states were made from, and the finished shards with their checksums) and shards,
safetensors files of a few examples each. Which examples are in which shard follows from their lengths, so a run that
was broken off, even killed, goes on with the first shard that is not finished. A shard and the manifest are written
under other names and then renamed; what is not in the manifest is never read.

Presence and size of all shards are checked when a cache is opened, the checksum of each when it is first read: hours
of training need not wait until terabytes have been read, and no damaged state is trained on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Dataset
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..conversion.loading import check_output
from ..data import DrafterCollator
from .normaliser import Normaliser, complete
from .state_manifest import FILE, FILL, NEW, Manifest, Shard, describe_source, write_whole
from .state_storage import STORAGES, pack, unpack
from .target_states import TargetStates, check_last_state, compute_target_states, target_head

logger = logging.getLogger(__name__)

SHARD_SIZE = 256.0
"""MiB of a shard where nothing else is said."""

NORMALISED = 256
"""Positions whose logits are in memory at once."""

INDEX = "states_index"
"""Column that says which example of the cache a row is."""

LOCK = "states.lock"

Progress: TypeAlias = Callable[[int], Any]
"""Called with the number of tokens that have been read."""


class StateCache:
    """A complete cache of target states; any number of processes may read it.

    Args:
        folder: where it is.
        manifest: what it holds.
        plan: its shards, from `Manifest.plan`.
    """

    def __init__(self, folder: Path, manifest: Manifest, plan: dict[str, range]) -> None:
        self.folder, self.manifest = folder, manifest
        self._names, self._firsts = [*plan], [examples.start for examples in plan.values()]
        self._verified: set[str] = set()
        self._dtype: torch.dtype = getattr(torch, manifest.source.dtype)

    @property
    def storage(self) -> str:
        """What the states are stored as."""
        return self.manifest.storage

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return sum(shard.bytes for shard in self.manifest.shards.values())

    def number(self, dataset: Dataset) -> Dataset:
        """`dataset`, which the states are of, with the column that `read` finds its rows by in any order."""
        return dataset.add_column(INDEX, np.arange(len(dataset)))

    def read(self, indices: Sequence[int], width: int, device: torch.device | str = "cpu") -> TargetStates:
        """States of some examples, in the target's dtype; zeros follow where one is shorter than `width`.

        Args:
            indices: which, `batch` of them.
            width: tokens of the longest, `seq`.
            device: where to.

        Raises:
            OSError: if a shard is damaged or gone.
        """
        layout = self.manifest.layout
        states = torch.zeros((len(indices), width, layout.parts, layout.hidden_size), dtype=self._dtype, device=device)
        known = Normaliser.unknown(len(indices), width, device=device) if self.manifest.normalisers else None
        for place, (row, index) in enumerate(zip(states, indices, strict=True)):
            # Unpacked on the device, so that few bytes travel there.
            tensors = {name: tensor.to(device) for name, tensor in self._tensors(index).items()}
            length = len(tensors["states"])
            row[:length] = unpack(tensors, self._dtype)
            if known is not None:
                known.log_sum[place, :length] = tensors["log_sums"]
                known.likeliest[place, :length] = tensors["likeliest"].long()
        return TargetStates(context=states[:, :, :-1].flatten(2), last=states[:, :, -1], normaliser=known)

    def _tensors(self, index: int) -> dict[str, torch.Tensor]:
        """What is stored of one example."""
        name = self._names[bisect_right(self._firsts, index) - 1]
        if name not in self._verified:
            self._verify(name)
            self._verified.add(name)
        with safe_open(self.folder / name, framework="pt") as file:
            kinds = ["states"]
            if self.storage == "int8":
                kinds.append("scales")
            if self.manifest.normalisers:
                kinds += ["log_sums", "likeliest"]
            return {kind: file.get_tensor(f"{kind}.{index}") for kind in kinds}

    def _verify(self, name: str) -> None:
        path, found = self.folder / name, hashlib.sha256()
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                found.update(piece)
        if found.hexdigest() != self.manifest.shards[name].sha256:
            raise OSError(
                f"The shard {str(path)!r} of the cache of target states is damaged: its checksum is not that of the "
                f"manifest. Remove this file; the cache is then incomplete. {FILL}"
            )


@dataclass
class IndexedCollator:
    """Makes batches as another collator does, and keeps `INDEX` where the rows have it, as `(batch,)`.

    Args:
        collate: the other one.
    """

    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.collate([{name: row[name] for name in row if name != INDEX} for row in rows])
        return {**batch, INDEX: torch.tensor([row[INDEX] for row in rows])} if INDEX in rows[0] else batch


def open_state_cache(
    folder: str | os.PathLike[str],
    target: PreTrainedModel,
    target_layer_ids: Sequence[int],
    dataset: Dataset,
    storage: str | None = None,
) -> StateCache:
    """The states of `target` over `dataset` that are in `folder`; for the arguments see `fill_state_cache`.

    Raises:
        OSError: if there are none, or some are missing.
        ValueError: if they were made from another target, layers or data, or in another storage.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    if manifest is None:
        raise FileNotFoundError(f"`states_cache` is {str(folder)!r}, where there is no cache of target states. {FILL}")
    source, lengths = describe_source(target, target_layer_ids, dataset)
    manifest.check(folder, source, storage)
    plan = manifest.plan(lengths)
    missing = manifest.missing(folder, plan)
    if missing:
        raise OSError(
            f"`states_cache` is {str(folder)!r}, which is incomplete: of {len(plan)} shards {len(missing)} are not "
            f"there or cut off, the first is {missing[0]}. {FILL}"
        )
    return StateCache(folder, manifest, plan)


def fill_state_cache(
    target: PreTrainedModel,
    dataset: Dataset,
    target_layer_ids: Sequence[int],
    folder: str | os.PathLike[str],
    *,
    storage: str | None = None,
    normalisers: bool | None = None,
    shard_size: float = SHARD_SIZE,
    batch_size: int = 8,
    announce: Callable[[str], None] = logger.info,
    show_progress: bool = False,
) -> StateCache:
    """Computes the states of `target` over `dataset` that `folder` does not have yet.

    One process at a time fills a folder; others wait for it and then find it complete.

    Args:
        target: in the dtype and on the device that it is to run in.
        dataset: rows with `input_ids` and `loss_mask`, from `dspark_hf.data.prepare_dataset`.
        target_layer_ids: layers to capture, -1 for the embedding output.
        folder: a fresh one, or one to go on with.
        storage: one of `STORAGES`; unset for what the folder has, `bf16` in a fresh one.
        normalisers: whether to compute `Normaliser`s beside the states, for drafters with a reduced vocabulary;
            unset for what the folder has, none in a fresh one.
        shard_size: most MiB of a shard, unless one example needs more; a folder to go on with keeps its own.
        batch_size: examples that the target reads at once.
        announce: called with the predicted size, before anything is computed.
        show_progress: whether to draw a progress bar.

    Raises:
        OSError: if the folder cannot be written or the disk has not room enough.
        ValueError: if the folder has states from another target, layers or data, or something else, or an argument is
            out of range.
    """
    _check_arguments(target, target_layer_ids, storage, shard_size, batch_size)
    folder = Path(folder)
    source, lengths = describe_source(target, target_layer_ids, dataset)

    def look() -> tuple[Manifest, dict[str, range]]:
        """What the folder has, and the shards that it lacks."""
        manifest = Manifest.load(folder) or Manifest(source, storage or "bf16", shard_size, bool(normalisers))
        manifest.check(folder, source, storage, normalisers)
        plan = manifest.plan(lengths)
        return manifest, {name: plan[name] for name in manifest.missing(folder, plan)}

    def compute(examples: range, progress: Progress) -> dict[str, torch.Tensor]:
        return _compute_shard(target, dataset, manifest, examples, lengths, batch_size, progress)

    manifest, missing = look()
    if missing:  # a complete cache may lie where nothing can be written
        _check_whole(target, folder)
        if manifest.normalisers:
            check_last_state(target, [*target_layer_ids], target_head(target))
        with _alone(folder):
            manifest, missing = look()
            if missing:  # else another process was faster
                _check_room(folder, manifest, missing, lengths, announce)
                manifest.save(folder)
                _write_shards(folder, manifest, missing, lengths, compute, show_progress)
    return StateCache(folder, manifest, manifest.plan(lengths))


def _write_shards(
    folder: Path,
    manifest: Manifest,
    shards: dict[str, range],
    lengths: Sequence[int],
    compute: Callable[[range, Progress], dict[str, torch.Tensor]],
    show_progress: bool,
) -> None:
    """Writes each of `shards` and then its entry in the manifest."""
    left = sum(lengths[index] for examples in shards.values() for index in examples)
    total = manifest.source.tokens
    bar = tqdm(
        total=total, initial=total - left, desc="Target states", unit="tok", unit_scale=True, disable=not show_progress
    )
    with bar:
        for name, examples in shards.items():
            content = save(compute(examples, bar.update))
            write_whole(folder / name, content)
            manifest.shards[name] = Shard(len(content), hashlib.sha256(content).hexdigest())
            manifest.save(folder)


def _check_arguments(
    target: PreTrainedModel,
    target_layer_ids: Sequence[int],
    storage: str | None,
    shard_size: float,
    batch_size: int,
) -> None:
    layers, count = [*target_layer_ids], target.config.get_text_config(decoder=True).num_hidden_layers
    if not layers or layers != sorted({*layers}) or layers[0] < -1 or layers[-1] >= count:
        raise ValueError(
            f"`target_layer_ids` is {layers}; give layers from -1 (the embedding output) to {count - 1}, rising."
        )
    if storage not in (None, *STORAGES):
        raise ValueError(f"`states_storage` is {storage!r}; choose one of {', '.join(STORAGES)}.")
    for name, value in (("shard_size", shard_size), ("batch_size", batch_size)):
        if not 0 < value < float("inf"):
            raise ValueError(f"`{name}` is {value}; it must be a positive number.")


def _check_whole(target: PreTrainedModel, folder: Path) -> None:
    if any(isinstance(weight, DTensor) for weight in target.parameters()):
        raise ValueError(
            f"`states_cache` is {str(folder)!r}, which is not complete, and the target is spread over processes, of "
            "which one alone cannot run it. Fill the cache first, in one process, with `dspark cache`."
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`, which is made if need be and must hold nothing but a cache."""
    check_output(folder, "`states_cache`")
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted({path.name for path in folder.iterdir()} - {LOCK, FILE, FILE + NEW})
    if others and not (folder / FILE).exists():
        raise ValueError(
            f"`states_cache` is {str(folder)!r}, which holds {others[0]!r} but no {FILE} of a cache; give a fresh "
            "folder."
        )
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        logger.warning("Another process is filling the cache of target states in %r; waiting for it.", str(folder))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _check_room(
    folder: Path,
    manifest: Manifest,
    shards: dict[str, range],
    lengths: Sequence[int],
    announce: Callable[[str], None],
) -> None:
    """Announces the size of `shards`; raises `OSError` where they do not fit on the disk."""
    sizes = {}
    for storage in STORAGES:
        layout = replace(manifest.layout, storage=storage)
        sizes[storage] = sum(layout.bytes_of(lengths[index]) for examples in shards.values() for index in examples)
    needed, free = sizes[manifest.storage], shutil.disk_usage(folder).free
    source = manifest.source
    announce(
        f"Target states of {source.examples} examples with {source.tokens} tokens in {manifest.storage}: "
        f"{human_size(needed)} to be written, {human_size(free)} free."
    )
    if needed > free:
        int8 = human_size(sizes["int8"])
        smaller = "" if manifest.storage == "int8" else f", or set `states_storage` to int8 ({int8})"
        raise OSError(
            f"`states_cache` is {str(folder)!r}: the target states need {human_size(needed)} there in "
            f"{manifest.storage}, and {human_size(free)} are free. Make room, give a folder on a larger disk, use "
            f"fewer rows{smaller}."
        )


def _compute_shard(
    target: PreTrainedModel,
    dataset: Dataset,
    manifest: Manifest,
    examples: range,
    lengths: Sequence[int],
    batch_size: int,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """The tensors of one shard; those of example i are named `states.i`, `scales.i` and so on."""
    tensors, collate = {}, DrafterCollator()
    layers = [*manifest.source.target_layer_ids]
    target.eval()
    by_length = sorted(examples, key=lambda index: lengths[index])  # little padding
    for start in range(0, len(by_length), batch_size):
        indices = by_length[start : start + batch_size]
        batch = collate([dataset[index] for index in indices])
        states = compute_target_states(target, layers, batch["input_ids"].to(target.device), batch["attention_mask"])
        joined = torch.cat([states.context, states.last], dim=-1).unflatten(-1, (manifest.layout.parts, -1))
        used = _used_positions(batch["loss_mask"])
        for index, row, is_used in zip(indices, joined, used, strict=True):
            row, is_used = row[: lengths[index]], is_used[: lengths[index]]
            if not row.isfinite().all():
                raise ValueError(
                    f"The target's states of example {index + 1} are not finite in {manifest.source.dtype}; load the "
                    "`target` in bfloat16 or float32."
                )
            stored = pack(row, manifest.storage)
            if manifest.normalisers:
                # Of what training will read, so that its probabilities add up.
                last = unpack(stored, row.dtype)[:, -1]
                known = complete(None, is_used.to(row.device)[None], target_head(target), last[None], NORMALISED)
                stored |= {"log_sums": known.log_sum[0], "likeliest": known.likeliest[0].int()}
            for kind, tensor in stored.items():
                tensors[f"{kind}.{index}"] = tensor.contiguous().cpu()
            progress(lengths[index])
    return tensors


def _used_positions(loss_mask: torch.Tensor) -> torch.Tensor:
    """Positions of `loss_mask (batch, seq)` from which any objective may have a target distribution; boolean.

    Those before a trained token, which predict it, and for EAGLE-3, which counts by the token that it reads, those
    after one.
    """
    trained = pad(loss_mask.bool(), (1, 1))
    return trained[:, 2:] | trained[:, 1:-1] | trained[:, :-2]


def human_size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


__all__ = [
    "INDEX",
    "SHARD_SIZE",
    "IndexedCollator",
    "StateCache",
    "fill_state_cache",
    "human_size",
    "open_state_cache",
]
