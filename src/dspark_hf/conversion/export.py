"""Writes a drafter as other projects and engines read it.

DeepSpec, z-lab and speculators are formats. `vllm` and `sglang` are whichever of these (or EAGLE-3's) the engine reads
for this kind of drafter, after a check of what it can serve: vLLM builds the vanilla sequential head alone, SGLang no
reduced draft vocabulary for DSpark, and neither layers with norms on both sides but those of Gemma 4.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel

from ..models import Drafter, DSparkConfig, DSparkDrafter, Eagle3Config, Eagle3Drafter
from .deepspec import config_to_deepspec
from .dflash import config_to_dflash
from .eagle3 import config_to_eagle3, tensors_to_eagle3
from .speculators import config_to_speculators
from .writing import has_gemma4_layers

MAX_SHARD_SIZE = "5GB"

EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass
class Export:
    """What is written.

    Attributes:
        config: the `config.json`.
        tensors: the weights by the names of the format.
        notes: what the format has no place for, or its readers leave out.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    notes: list[str] = field(default_factory=list)


def export_drafter(
    drafter: Drafter,
    folder: str | os.PathLike[str],
    to: str,
    target: PreTrainedModel | None = None,
) -> list[str]:
    """Writes a drafter in the format of another project or engine.

    Facts without a place in the format (calibration, chat template, the target's name) are kept in its `config.json`
    under a key that others pass over, so that `AutoDrafter` reads back what was written.

    Args:
        drafter: a drafter of any kind. Adapters must be merged (`merge_and_unload()`).
        folder: where to write it, new or empty.
        to: one of `EXPORT_FORMATS`.
        target: its target, to which the drafter is then bound, for formats with copies of the target's embeddings
            or LM head; not needed where the drafter is bound already or has copies.

    Returns:
        What its readers will not have or not use, in words.

    Raises:
        TypeError: if `drafter` is none.
        ValueError: if the format cannot hold this drafter, needs the target, or the folder has something in it.
    """
    check_empty(folder, "`folder`")
    export = make_export(drafter, to, target)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu").clone() for name, tensor in export.tensors.items()}
    save_torch_state_dict(tensors, path, max_shard_size=MAX_SHARD_SIZE, metadata={"format": "pt"})
    text = json.dumps(export.config, indent=2, sort_keys=True) + "\n"
    (path / "config.json").write_text(text, encoding="utf-8")
    return export.notes


def check_empty(folder: str | os.PathLike[str], argument: str) -> None:
    """Raises `ValueError` for a file, or for a folder that has something in it."""
    path = Path(folder)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        kind = "a file" if path.is_file() else "not empty"
        raise ValueError(f"{argument} is {str(folder)!r}, which is {kind}; give a new folder.")


def make_export(drafter: Drafter, to: str, target: PreTrainedModel | None = None) -> Export:
    """What `export_drafter` writes; the same arguments and errors."""
    if to not in EXPORT_FORMATS:
        raise ValueError(f"`to` is {to!r}; choose one of {', '.join(EXPORT_FORMATS)}.")
    if not isinstance(drafter, Drafter):
        hint = "; merge the adapter first (`merge_and_unload()`)" if hasattr(drafter, "peft_config") else ""
        raise TypeError(f"`drafter` is of type {type(drafter).__name__}; give a drafter{hint}.")
    if not isinstance(drafter, DSparkDrafter | Eagle3Drafter):
        raise ValueError(
            f"`drafter` is a {type(drafter).__name__}, a kind that no other project reads; keep it in this package's "
            "format."
        )
    if target is not None:
        drafter.bind_target(target)
    config: Any = copy.deepcopy(drafter.config)
    config.dtype = drafter.dtype
    return EXPORT_FORMATS[to](drafter, config, target)


# --- what each format takes --------------------------------------------------------------------------------------


def _deepspec(drafter: Any, config: Any, target: PreTrainedModel | None) -> Export:
    if config.draft_vocab_size is not None:
        raise ValueError(
            f"The drafter has `draft_vocab_size` = {config.draft_vocab_size}, and DeepSpec has no reduced draft "
            "vocabulary. Write it as vllm or speculators."
        )
    return Export(config_to_deepspec(config), _complete(drafter, "DeepSpec's format"), _lost(config, "DeepSpec"))


def _zlab(drafter: Any, config: Any, target: PreTrainedModel | None) -> Export:
    if not isinstance(drafter, DSparkDrafter):
        raise ValueError("The drafter is an EAGLE-3 drafter, and z-lab's format is one for DFlash.")
    return Export(config_to_dflash(config), _without(drafter, EMBEDDINGS, HEAD), _lost(config, "z-lab's readers"))


def _speculators(drafter: Any, config: Any, target: PreTrainedModel | None) -> Export:
    if target is not None:
        config.target_name_or_path = config.target_name_or_path or target.config.name_or_path or None
    architectures = list((target.config.architectures if target is not None else None) or [])
    native = config_to_speculators(config, architectures)
    tensors = _without(drafter, EMBEDDINGS, HEAD)
    recurrent = isinstance(drafter, Eagle3Drafter)
    if drafter.has_own_head or drafter.d2t is not None or recurrent:
        whole = _complete(drafter, "speculators' format")
        # Its reader fills in what is missing from the target for block drafters alone.
        tensors |= {name: whole[name] for name in ((EMBEDDINGS, HEAD) if recurrent else (HEAD,))}
    notes = _lost(config, "speculators")
    if not config.target_name_or_path:
        notes.append("the target has no name: set `verifier.name_or_path` in config.json before it is served")
    if not architectures:
        notes.append("`verifier.architectures` in config.json is empty: give the target to have it filled in")
    return Export(native, tensors, notes)


def _vllm(drafter: Any, config: Any, target: PreTrainedModel | None) -> Export:
    if isinstance(config, Eagle3Config):
        return _eagle3(drafter, config, "vLLM")
    if not _has_heads(config):
        return _zlab(drafter, config, target)
    _check_engine(config, "vLLM")
    if config.markov_head_type != "vanilla":
        raise ValueError(
            f"The drafter has `markov_head_type` = {config.markov_head_type!r}, and vLLM builds the vanilla head "
            "alone; without its state the drafts would be others. Write it as sglang, or train a vanilla head."
        )
    native = config_to_deepspec(config)
    if config.draft_vocab_size is not None:
        native["draft_vocab_size"] = config.draft_vocab_size
    whole = config.draft_vocab_size is not None or has_gemma4_layers(config)
    tensors = _complete(drafter, "vLLM") if whole else _without(drafter, EMBEDDINGS, HEAD)
    return Export(native, tensors, _lost(config, "vLLM"))


def _sglang(drafter: Any, config: Any, target: PreTrainedModel | None) -> Export:
    if isinstance(config, Eagle3Config):
        return _eagle3(drafter, config, "SGLang")
    if not _has_heads(config):
        return _zlab(drafter, config, target)
    _check_engine(config, "SGLang")
    if config.draft_vocab_size is not None:
        raise ValueError(
            f"The drafter has `draft_vocab_size` = {config.draft_vocab_size}, and SGLang drafts over the target's "
            "whole vocabulary with DSpark. Write it as vllm."
        )
    if has_gemma4_layers(config):
        raise ValueError("The drafter has Gemma 4's layers, which SGLang does not build for DSpark. Write it as vllm.")
    return Export(config_to_deepspec(config), _without(drafter, EMBEDDINGS, HEAD), _lost(config, "SGLang"))


def _eagle3(drafter: Any, config: Eagle3Config, reader: str) -> Export:
    native = config_to_eagle3(config)
    tensors = _without(drafter, EMBEDDINGS, HEAD)
    tensors[HEAD] = _complete(drafter, reader)[HEAD]
    return Export(native, tensors_to_eagle3(tensors), _lost(config, reader))


EXPORT_FORMATS: dict[str, Callable[[Any, Any, PreTrainedModel | None], Export]] = {
    "deepspec": _deepspec,
    "speculators": _speculators,
    "vllm": _vllm,
    "sglang": _sglang,
    "zlab": _zlab,
}
"""Formats that are written, with what makes them."""


# --- parts -------------------------------------------------------------------------------------------------------


def _has_heads(config: DSparkConfig) -> bool:
    return bool(config.markov_rank or config.enable_confidence_head or config.sample_from_anchor)


def _check_engine(config: DSparkConfig, engine: str) -> None:
    """Raises `ValueError` for a drafter that no engine serves as DSpark."""
    if config.markov_rank == 0:
        raise ValueError(
            f"The drafter has `markov_rank` = 0, and {engine} serves DSpark drafters with a sequential head. Only "
            "drafters without heads in z-lab's convention (`sample_from_anchor` = False) are served as DFlash."
        )
    if any(layer != "full_attention" for layer in config.layer_types):
        raise ValueError(
            f"The drafter has `layer_types` = {config.layer_types}; in {engine} a sliding layer is causal inside the "
            "block, which it was not in training."
        )


def _without(drafter: Any, *names: str) -> dict[str, torch.Tensor]:
    """The drafter's tensors but these."""
    return {name: tensor for name, tensor in drafter.state_dict().items() if name not in names}


def _complete(drafter: Any, reader: str) -> dict[str, torch.Tensor]:
    """The drafter's tensors, with the target's where it shares them."""
    tensors: dict[str, torch.Tensor] = dict(drafter.state_dict())
    if not drafter.config.share_target_embeddings:
        return tensors
    if not drafter.target_modules:
        raise ValueError(
            f"`target` is unset, and {reader} needs weights that this drafter shares with its target; give the target."
        )
    return tensors | {name: weight.to(drafter.dtype) for name, weight in drafter.target_weights().items()}


def _lost(config: DSparkConfig | Eagle3Config, reader: str) -> list[str]:
    """What `reader` does not know of."""
    notes = []
    if getattr(config, "confidence_temperatures", None):
        notes.append(f"{reader} does not read the calibration (`confidence_temperatures`) from here")
    if config.generation_prompt_ids or config.enable_thinking is not None:
        notes.append(f"{reader} does not know the chat template and thinking mode of the training")
    return notes


__all__ = ["EXPORT_FORMATS", "Export", "check_empty", "export_drafter", "make_export"]
