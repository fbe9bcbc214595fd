"""Which format a drafter is stored in, told by its `config.json`."""

from __future__ import annotations

import json
import os
from typing import Any

from transformers.utils import cached_file

from ..models import DRAFTER_CLASSES

DSPARK = "dspark"
DEEPSPEC = "deepspec"
EAGLE3 = "eagle3"
DFLASH = "dflash"
SPECFORGE = "specforge"
SPECULATORS = "speculators"

LOADED_FORMATS = {
    DSPARK: "this package",
    DEEPSPEC: "DeepSpec (`Qwen3DSparkModel`, `Gemma4DSparkModel`, `Qwen3Eagle3Model`, `Gemma4Eagle3Model`)",
    EAGLE3: "EAGLE-3 and SpecForge (`LlamaForCausalLMEagle3`)",
    DFLASH: "z-lab and SpecForge (`DFlashDraftModel`)",
    SPECFORGE: "SpecForge (`DSparkDraftModel`)",
    SPECULATORS: "speculators (`speculators_model_type`)",
}
"""Formats that `AutoDrafter` loads, in words."""

FOREIGN_FORMATS = {
    "other_eagle3": "an EAGLE-3 drafter of another architecture",
    "other_dflash": "a DFlash drafter of another architecture",
    "peft": "a PEFT adapter",
}
"""Formats that are recognised but not loaded, in words."""

FULL_MODEL = "full model"
UNKNOWN = "unknown"


_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def find_file(path: str | os.PathLike[str], name: str, kwargs: dict[str, Any]) -> str:
    """Local path of a file of a checkpoint, downloaded if need be; `kwargs` are those of `from_pretrained`.

    Raises:
        OSError: if the checkpoint has no such file or cannot be reached.
    """
    options = {option: kwargs[option] for option in _DOWNLOAD_OPTIONS if kwargs.get(option) is not None}
    found = cached_file(path, name, **options)
    if found is None:
        raise OSError(f"{path!s} has no file {name}.")
    return found


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        OSError: if the file cannot be read or holds no JSON object.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise OSError(f"{path!s} is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise OSError(f"{path!s} holds no JSON object.")
    return content


def detect_format(config: dict[str, Any]) -> str:
    """Name of the format of a `config.json`: a key of `LOADED_FORMATS` or `FOREIGN_FORMATS`, or what else it is.

    `model_type` decides only for our own format: others keep their target's.
    """
    listed = config.get("architectures")
    architectures = [str(name) for name in listed] if isinstance(listed, list) else []
    if config.get("model_type") in DRAFTER_CLASSES:
        return DSPARK
    if "speculators_model_type" in config or "speculators_config" in config:
        return SPECULATORS
    if "LlamaForCausalLMEagle3" in architectures:
        return EAGLE3
    if any(name.endswith(("DSparkModel", "Eagle3Model")) for name in architectures):
        return DEEPSPEC
    if any("eagle3" in name.lower() for name in architectures):
        return "other_eagle3"
    if "DSparkDraftModel" in architectures:
        return SPECFORGE
    if "DFlashDraftModel" in architectures:
        return DFLASH
    if "dflash_config" in config or any("dflash" in name.lower() for name in architectures):
        return "other_dflash"
    if "peft_type" in config:
        return "peft"
    if any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in architectures):
        return FULL_MODEL
    return UNKNOWN


def refuse_foreign(found: str, path: str | os.PathLike[str], model_type: str | None = None) -> ValueError:
    """The error for a checkpoint that `AutoDrafter` does not load; `model_type` is that of its config."""
    loads = f"`AutoDrafter` loads drafters of {', of '.join(LOADED_FORMATS.values())}."
    if found == FULL_MODEL:
        return ValueError(
            f"{path!s} is a {model_type or 'full'} language model, not a drafter. Give a drafter that was made for it "
            "or build one with `get_drafter(target)` and train it. To draft with the model itself load it with "
            f"`AutoModelForCausalLM` and pass it to `generate` directly as `assistant_model`. {loads}"
        )
    if found == "peft":
        return ValueError(
            f"{path!s} is a PEFT adapter, not a drafter. Load the drafter that it was trained for and put it around "
            f"that with `peft.PeftModel.from_pretrained(drafter, {os.fspath(path)!r})`."
        )
    if found in FOREIGN_FORMATS:
        return ValueError(f"{path!s} is {FOREIGN_FORMATS[found]}, which is not supported. {loads}")
    return ValueError(f"{path!s} is in no known drafter format: its config.json has no known `architectures`. {loads}")


__all__ = [
    "DEEPSPEC",
    "DFLASH",
    "DSPARK",
    "EAGLE3",
    "FOREIGN_FORMATS",
    "FULL_MODEL",
    "LOADED_FORMATS",
    "SPECFORGE",
    "SPECULATORS",
    "UNKNOWN",
    "detect_format",
    "find_file",
    "read_json",
    "refuse_foreign",
]
