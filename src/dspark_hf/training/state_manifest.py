"""What a cache of target states was made from, what it holds, and the file that says so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .. import __version__
from ..data.prepare import config_fingerprint
from .state_storage import STORAGES, Layout

FORMAT = "dspark-hf target states"
VERSION = 1
FILE = "manifest.json"
NEW = ".new"

SAMPLED_WEIGHTS = 1024
"""Values of a weight that its fingerprint covers, spread over it from the first to the last."""

# Of a config, tokens that scripts like to set, and that change no state.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

FILL = "Fill it with `dspark cache` or `cache_target_states`, which computes what is missing."


# --- what states are made from -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """What states were made from; those of another source are other states.

    Args:
        target: name of the target, for the reader; a model that has moved is the same model.
        config: fingerprint of its config.
        weights: fingerprint of its weights, see `weights_fingerprint`.
        dtype: of its weights, and of the states that it gives.
        hidden_size: values of a state.
        target_layer_ids: the captured layers.
        data: fingerprint of every example's `input_ids` and `loss_mask`, hence of tokenizer and chat template, too.
        examples: how many.
        tokens: of all examples.
    """

    target: str
    config: str
    weights: str
    dtype: str
    hidden_size: int
    target_layer_ids: tuple[int, ...]
    data: str
    examples: int
    tokens: int

    def differences(self, other: Source) -> list[str]:
        """In what `other` differs, in words; empty where its states are the same."""
        found = []
        if self.config != other.config:
            found.append(f"from a target with another config ({self.target!r}, not {other.target!r})")
        if self.dtype != other.dtype:
            found.append(f"from a target in {self.dtype}, not {other.dtype}")
        elif self.weights != other.weights:  # in another dtype all weights are others
            found.append(f"from a target with other weights ({self.target!r}, not {other.target!r})")
        if self.target_layer_ids != other.target_layer_ids:
            found.append(f"of the layers {list(self.target_layer_ids)}, not {list(other.target_layer_ids)}")
        if self.data != other.data:
            found.append(
                f"over other token ids or loss masks ({self.examples} examples with {self.tokens} tokens, not "
                f"{other.examples} with {other.tokens}: other rows, another tokenizer or chat template, another "
                "`max_length`, `enable_thinking` or `split_long`)"
            )
        return found


def describe_source(
    target: PreTrainedModel, target_layer_ids: Sequence[int], dataset: Dataset
) -> tuple[Source, list[int]]:
    """What states of `target` over `dataset` are made from, and the number of tokens of each example.

    Raises:
        ValueError: if `dataset` is not from `prepare_dataset`.
    """
    if not isinstance(dataset, Dataset) or not {"input_ids", "loss_mask"} <= {*dataset.column_names}:
        raise ValueError(
            "Target states are cached for a `datasets.Dataset` with the columns `input_ids` and `loss_mask`, such as "
            f"`prepare_dataset` makes; `train_dataset` is {dataset!r}."
        )
    data, lengths = data_fingerprint(dataset)
    source = Source(
        target=target.config.name_or_path,
        config=config_fingerprint(target.config, left_out=_TOKENS),
        weights=weights_fingerprint(target),
        dtype=str(target.dtype).removeprefix("torch."),
        hidden_size=target.config.get_text_config(decoder=True).hidden_size,
        target_layer_ids=tuple(target_layer_ids),
        data=data,
        examples=len(lengths),
        tokens=sum(lengths),
    )
    return source, lengths


def weights_fingerprint(target: PreTrainedModel) -> str:
    """Hash of the name, shape, dtype and `SAMPLED_WEIGHTS` values of each weight, whatever device they are on.

    Training moves nearly all values of a weight, so this tells checkpoints apart without reading billions of them;
    edits of single values may go unnoticed, and so do weights that are offloaded and not in memory.
    """
    found = hashlib.sha256()
    for name, weight in sorted(target.state_dict().items()):
        found.update(name.encode())
        _hash_tensor(weight, found)
    return found.hexdigest()


def _hash_tensor(tensor: Any, found: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        found.update(repr(tensor).encode())
        return
    found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if isinstance(tensor, DTensor):  # spread over processes, all of which are here
        tensor = tensor.full_tensor()
    if hasattr(tensor, "__tensor_flatten__"):  # quantised: a wrapper around plain tensors
        for name in tensor.__tensor_flatten__()[0]:
            _hash_tensor(getattr(tensor, name), found)
    elif tensor.numel() and tensor.device.type != "meta":
        count = min(tensor.numel(), SAMPLED_WEIGHTS)
        places = torch.linspace(0, tensor.numel() - 1, count, dtype=torch.float64).long()
        sample = tensor.detach().reshape(-1)[places.to(tensor.device)]
        found.update(sample.cpu().view(torch.uint8).numpy().tobytes())


def data_fingerprint(dataset: Dataset) -> tuple[str, list[int]]:
    """Hash of all `input_ids` and `loss_mask`, and the number of tokens of each example."""
    found, lengths = hashlib.sha256(), []
    for table in dataset.with_format("arrow").iter(batch_size=1024):
        ids, mask = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
        counts = ids.value_lengths().to_numpy()
        lengths += counts.tolist()
        # Of one width each, so that it does not matter in which the columns hold them.
        for values, dtype in ((counts, np.int64), (ids.flatten(), np.int32), (mask.flatten(), np.int8)):
            found.update(np.asarray(values).astype(dtype).tobytes())
    return found.hexdigest(), lengths


# --- manifest ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """A finished file of states.

    Args:
        bytes: its size.
        sha256: of its content.
    """

    bytes: int
    sha256: str


@dataclass
class Manifest:
    """What a cache was made from and the shards that are finished.

    Args:
        source: what the states are made from.
        storage: what they are stored as.
        shard_size: most MiB of a shard.
        normalisers: whether there is a `Normaliser` beside the states.
        shards: finished ones by file name.
    """

    source: Source
    storage: str
    shard_size: float
    normalisers: bool = False
    shards: dict[str, Shard] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The shape of the states."""
        return Layout(self.storage, len(self.source.target_layer_ids) + 1, self.source.hidden_size, self.normalisers)

    def plan(self, lengths: Sequence[int]) -> dict[str, range]:
        """All shards that there will be: file names, and the examples of `lengths` tokens in each."""
        shards = self.layout.shards(lengths, self.shard_size * 2**20)
        return {f"states-{number:06}.safetensors": examples for number, examples in enumerate(shards)}

    def check(self, folder: Path, source: Source, storage: str | None, normalisers: bool | None = None) -> None:
        """Raises `ValueError` where the states in `folder` are not those of `source`, or not stored like this."""
        problems = self.source.differences(source)
        if storage is not None and storage != self.storage:
            problems.append(f"in `states_storage` {self.storage!r}, not {storage!r}")
        if normalisers and not self.normalisers:
            problems.append("without `normalisers`")
        if problems:
            raise ValueError(
                f"`states_cache` is {str(folder)!r}, whose states were made otherwise: {'; '.join(problems)}. Use "
                "what they were made with, or give another folder."
            )

    def missing(self, folder: Path, plan: dict[str, range]) -> list[str]:
        """Names of the planned shards that are not finished, or whose files are gone or cut off."""
        return [name for name in plan if name not in self.shards or _size(folder / name) != self.shards[name].bytes]

    def save(self, folder: Path) -> None:
        """Writes the manifest into `folder`, in one step."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "versions": {
                "dspark_hf": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            **dataclasses.asdict(self),
            "shards": {name: dataclasses.asdict(shard) for name, shard in sorted(self.shards.items())},
        }
        write_whole(folder / FILE, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`, `None` where there is none.

        Raises:
            OSError: if it cannot be read.
            ValueError: if it is damaged or of another version.
        """
        try:
            content = json.loads((folder / FILE).read_text(encoding="utf-8"))
            if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
                raise ValueError(f"it is no manifest of target states in version {VERSION}")
            source = content["source"]
            manifest = cls(
                Source(**{**source, "target_layer_ids": tuple(source["target_layer_ids"])}),
                content["storage"],
                float(content["shard_size"]),
                content.get("normalisers", False) is True,
                {name: Shard(**shard) for name, shard in content["shards"].items()},
            )
            if manifest.storage not in STORAGES:
                raise ValueError(f"its storage is {manifest.storage!r}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"`states_cache` is {str(folder)!r}, whose {FILE} cannot be used ({error}): give another folder, or "
                "remove this one to make the states anew."
            ) from error
        return manifest


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that under its name there is all of it or nothing, whatever happens meanwhile."""
    new = path.with_name(path.name + NEW)
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


__all__ = ["FILE", "FILL", "NEW", "Manifest", "Shard", "Source", "describe_source", "write_whole"]
