"""What a name or path stands for, looked at before anything is loaded from it or saved to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .formats import FOREIGN_FORMATS, LOADED_FORMATS, detect_format, find_file, read_json


def check_location(path: str | os.PathLike[str], argument: str) -> None:
    """Checks that `path` is a folder, or could be a repository of the Hub.

    Args:
        path: what the user gave.
        argument: the argument that it was given for, as messages name it.

    Raises:
        OSError: if there is a file in its place, or nothing and the Hub has no such names.
    """
    if os.path.isdir(path):
        return
    takes = f"{argument} takes a folder or a repository of the Hub (`owner/name`)."
    if os.path.exists(path):
        raise NotADirectoryError(f"{str(path)!r} is a file; {takes}")
    try:
        validate_repo_id(os.fspath(path))
    except HFValidationError as error:
        raise FileNotFoundError(f"There is no folder {str(path)!r}; {takes}") from error


def check_output(folder: str | os.PathLike[str], argument: str) -> None:
    """Checks that a folder can be made and written to: better said before a long run than after it.

    Args:
        folder: what the user gave.
        argument: the argument that it was given for, as messages name it.

    Raises:
        ValueError: if nothing was given, or there is a file in the way.
        OSError: if it cannot be written to.
    """
    name = os.fspath(folder)
    if not name:
        raise ValueError(f"{argument} is empty; give a folder.")
    there = next(path for path in (Path(name), *Path(name).absolute().parents) if path.exists())
    if not there.is_dir():
        file = "which" if there == Path(name) else f"and {str(there)!r}"
        raise ValueError(f"{argument} is {name!r}, {file} is a file; give a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{argument} is {name!r}, and {str(there)!r} cannot be written to; give another folder.")


def neither_found(path: str | os.PathLike[str], error: OSError) -> OSError:
    """The error for a name that is no folder and could not be read from the Hub."""
    return OSError(f"There is no folder {str(path)!r}, and it cannot be read from the Hub: {error}")


def load_language_model(path: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """Loads a `target`, as messages call the argument; `kwargs` are those of `from_pretrained`.

    Raises:
        OSError: if there is none, or its weights are damaged.
        ValueError: if it is a drafter, or another model that is no causal language model.
    """
    check_location(path, "`target`")
    config = _peek(path)
    found = detect_format(config)
    if found in (*LOADED_FORMATS, *FOREIGN_FORMATS):
        target = config.get("target_name_or_path")
        raise ValueError(
            f"{str(path)!r} is a drafter, not a target; `target` takes the language model that it drafts for"
            f"{f' ({target})' if target else ''}."
        )
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    except SafetensorError as error:
        raise OSError(
            f"The weights of {path!s} cannot be read ({error}): a file is truncated or damaged. Download or save the "
            "model again."
        ) from error
    except OSError as error:
        if os.path.isdir(path):
            raise
        raise neither_found(path, error) from error
    except StrictDataclassError as error:
        raise ValueError(f"The config.json of {path!s} is not as its model type needs it: {error}") from error
    except ValueError as error:
        # Transformers then lists every class that it has.
        if not str(error).startswith("Unrecognized configuration class"):
            raise
        raise ValueError(
            f"{str(path)!r} is a {config.get('model_type')} model, not a causal language model; `target` takes one "
            "that `AutoModelForCausalLM` loads."
        ) from error
    return model


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that lies beside a target.

    Raises:
        OSError: if there is none, or it cannot be loaded.
    """
    name, reason = os.fspath(path), ""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        # Some classes come up with nothing but special tokens where there are no files to read.
        if len(tokenizer) > len(tokenizer.all_special_ids):
            return tokenizer
    except (OSError, ValueError) as error:
        reason = f" Transformers says: {error}"
    raise OSError(
        f"The target {name!r} has no tokenizer that can be loaded. Take that of the model that it was made from and "
        f"save it beside the target: `AutoTokenizer.from_pretrained(...).save_pretrained({name!r})`.{reason}"
    )


def _peek(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json, or nothing where it cannot be read: an adapter has none, and of others Transformers tells."""
    try:
        return read_json(find_file(path, "config.json", {}))
    except OSError:
        return {}


__all__ = ["check_location", "check_output", "load_language_model", "load_tokenizer", "neither_found"]
