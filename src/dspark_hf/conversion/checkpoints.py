"""What the converters share: reading a checkpoint of another project strictly and without running its code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ..models.drafter_base import check_shard_names
from .formats import find_file, read_json

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLE = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_keys(native: dict[str, Any], needed: Sequence[str], kind: str) -> None:
    """Raises `ValueError` where the `config.json` of a drafter of some `kind` lacks keys."""
    missing = [key for key in needed if native.get(key) is None]
    if missing:
        raise ValueError(f"The {kind} config lacks {missing}; take config.json from the original checkpoint.")


def rope_parameters(native: dict[str, Any], kind: str, default_theta: float | None = None) -> dict[str, Any]:
    """Rotary embedding, which configs hold nested by layer type, flat, or as `rope_theta` and `rope_scaling`.

    Args:
        native: a `config.json`.
        kind: what it is of, for the error.
        default_theta: the base where the config does not say, if the format has one.

    Raises:
        TypeError: if it is no mapping.
        ValueError: if there is no base.
    """
    rope = native.get("rope_parameters") or native.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise TypeError(f"`rope_parameters` or `rope_scaling` is {rope!r}; it must be a mapping of names to values.")
    rope = dict(rope)
    if isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    rope = {name: value for name, value in rope.items() if value is not None and not isinstance(value, dict)}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    theta = native.get("rope_theta") or default_theta
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    if "rope_theta" not in rope:
        raise ValueError(
            f"The {kind} config lacks `rope_theta`, alone or inside `rope_parameters`; take config.json from the "
            "original checkpoint."
        )
    return rope


def refuse_pickle(path: str | os.PathLike[str], kind: str, kwargs: dict[str, Any]) -> None:
    """Raises `OSError` where the only weights are pickled ones, which may run code when they are read."""
    if _first_file(path, SAFETENSORS, kwargs) is None and _first_file(path, PICKLE, kwargs) is not None:
        raise OSError(
            f"The {kind} drafter {path!s} stores its weights as pickle (pytorch_model.bin), which is not loaded "
            "because it can run code. Convert them to safetensors first."
        )


def read_tensors(path: str | os.PathLike[str], kind: str, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in safetensors, in one file or several; `kwargs` are those of `from_pretrained`.

    Raises:
        OSError: if there are none, or they are damaged.
    """
    refuse_pickle(path, kind, kwargs)
    found = _first_file(path, SAFETENSORS, kwargs)
    if found is None:
        raise OSError(f"The {kind} drafter {path!s} has no weights in safetensors (model.safetensors).")
    files = [found]
    if found.endswith(".json"):
        names = read_json(found).get("weight_map", {}).values()
        check_shard_names(names, path)
        files = [find_file(path, name, kwargs) for name in sorted(set(names))]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise OSError(
                f"The weights of the drafter {path!s} cannot be read ({error}): a file is truncated or damaged. "
                "Download or save the checkpoint again."
            ) from error
    return tensors


def has_tensor(path: str | os.PathLike[str], name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a checkpoint in safetensors has a tensor; `True` where that cannot be told, for loading to say more."""
    found = _first_file(path, SAFETENSORS, kwargs)
    if found is None:
        return True
    if found.endswith(".json"):
        return name in read_json(found).get("weight_map", {})
    try:
        with safe_open(found, framework="pt") as file:
            return name in file.keys()  # noqa: SIM118  (it is no mapping)
    except SafetensorError:
        return True


def check_leftovers(unexpected: Sequence[str], path: str | os.PathLike[str], kind: str) -> None:
    """Raises `OSError` where a checkpoint has tensors that no part of the drafter took."""
    if unexpected:
        raise OSError(
            f"The {kind} drafter {path!s} has {len(unexpected)} tensors that its config does not account for, among "
            f"them {sorted(unexpected)[:5]}. Check that config.json and the weights belong together."
        )


def _first_file(path: str | os.PathLike[str], names: tuple[str, ...], kwargs: dict[str, Any]) -> str | None:
    """The first of several files that the checkpoint has."""
    for name in names:
        try:
            return find_file(path, name, kwargs)
        except OSError:
            continue
    return None


__all__ = ["check_keys", "check_leftovers", "has_tensor", "read_tensors", "refuse_pickle", "rope_parameters"]
