"""Decoding with the drafter of the repository that this file lies in.

`target.generate(**inputs, custom_generate="owner/name", trust_remote_code=True)` runs `generate` below: it loads the
drafter from there and decodes with it. Nothing else need be installed than Transformers.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.hook import custom_generate as decoding_method
from ..models import DRAFTER_CLASSES, Drafter

LOADING_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *,
    dspark_drafter: str | None = None,
    streamer: Any = None,
    assistant_model: Any = None,
    synced_gpus: bool | None = None,
    **kwargs: Any,
) -> Any:
    """As `model.generate`, with this repository's drafter: the same greedy text, the same law of sampled ones.

    Args:
        model: the target.
        inputs: as for `generate`.
        dspark_drafter: the repository or folder to load the drafter from; that of this file if unset.
        streamer: as for `generate`.
        assistant_model: must be left out.
        synced_gpus: must be left out.
        kwargs: of `generate`, the `dspark_*` options among them; and of loading: `revision`, `token`, `cache_dir`, ...

    Raises:
        OSError: if the drafter cannot be loaded.
        ValueError: if an option cannot be had with a drafter, or the drafter is another target's.
    """
    for name, value in (("assistant_model", assistant_model), ("synced_gpus", synced_gpus)):
        if value:
            raise ValueError(f"`{name}` cannot be had with `custom_generate`, which brings its own drafter; drop it.")
    loading = {name: kwargs.pop(name) for name in LOADING_OPTIONS if name in kwargs}
    drafter = _drafter(model, dspark_drafter or _repository(), loading)
    return model.generate(inputs, custom_generate=decoding_method(drafter), dspark_streamer=streamer, **kwargs)


def _repository() -> str:
    """What the caller gave as `custom_generate`: Transformers does not say it to the function that it loads."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if isinstance(name, str):
            return name
        frame = frame.f_back
    raise ValueError("The repository of the drafter is not known here; give it as `dspark_drafter`.")


_DRAFTERS: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Drafter]] = weakref.WeakKeyDictionary()


def _drafter(model: PreTrainedModel, name: str, loading: dict[str, Any]) -> Drafter:
    """The drafter, loaded once for each target, where the target's LM head is."""
    loaded = _DRAFTERS.setdefault(model, {})
    key = f"{name} {sorted((option, str(value)) for option, value in loading.items() if option != 'token')}"
    if key not in loaded:
        # With this file's classes, whatever has been registered for the name of the type.
        config, _ = Drafter.config_class.get_config_dict(name, **loading)
        kind = config.get("model_type")
        if kind not in DRAFTER_CLASSES:
            raise ValueError(f"{name!r} is a {kind} model, not a drafter of {sorted(DRAFTER_CLASSES)}.")
        drafter: Drafter = DRAFTER_CLASSES[kind].from_pretrained(name, **loading)
        loaded[key] = drafter.to(_device(model))
    return loaded[key]


def _device(model: PreTrainedModel) -> torch.device:
    head = model.get_output_embeddings()
    device = model.device if head is None else next(head.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


__all__ = ["generate"]
