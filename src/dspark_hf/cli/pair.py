"""What commands that decode have in common: checked options, the models, encoded prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .errors import user_errors


def check_decoding(
    max_new_tokens: int, temperature: float, top_k: int, top_p: float, dtype: str, seed: int, repeats: int = 1
) -> None:
    """Raises `ValueError` for an option out of range, by its flag."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}; it must be at least 1.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature is {temperature}; use 0 for greedy decoding or a positive number.")
    if top_k < 0:
        raise ValueError(f"--top-k is {top_k}; use 0 for all tokens or a positive number.")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p is {top_p}; it is a probability above 0, 1 for all tokens.")
    if repeats < 1:
        raise ValueError(f"--repeats is {repeats}; it must be at least 1.")
    check_dtype(dtype)
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed is {seed}; it must be from 0 to {2**32 - 1}.")


def check_dtype(dtype: str) -> None:
    """Raises `ValueError` for a `--dtype` that is none."""
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype is {dtype!r}; choose auto, float32, bfloat16 or float16.")


def decoding_options(max_new_tokens: int, temperature: float, top_k: int, top_p: float) -> dict[str, Any]:
    """Options of `generate`: greedy at temperature 0, sampled above."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    return options | ({"temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature > 0 else {})


def load_pair(target: str, drafter: str | None, device: str | None, dtype: str) -> tuple[Any, Any, Any]:
    """The target, its tokenizer and the drafter, if any; see `load_models`."""
    model, tokenizer, helpers = load_models(target, [] if drafter is None else [drafter], device, dtype)
    return model, tokenizer, helpers[0] if helpers else None


def load_models(target: str, drafters: Sequence[str], device: str | None, dtype: str) -> tuple[Any, Any, list[Any]]:
    """The target, its tokenizer and its drafters, on one device and in one dtype; a GPU if there is one.

    Raises:
        OSError, ValueError: if one of them cannot be loaded, they do not fit, or the device cannot be used.
    """
    import torch

    from ..factory import AutoDrafter

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    # Drafters first, which are small: nobody should wait for the target to be told that a drafter is missing.
    with user_errors(pretrained_model_name_or_path="--drafter"):
        helpers: list[Any] = [AutoDrafter.from_pretrained(drafter) for drafter in drafters]
    with user_errors(target="--target"):
        model, tokenizer = _load_target(target, device, dtype)
    helpers = [helper.to(device=model.device, dtype=model.dtype) for helper in helpers]
    for helper in helpers:
        helper.check_target(model)
    return model, tokenizer, helpers


def _check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device is {device!r}, which cannot be used here: {reason}") from error


def _load_target(name: str, device: str, dtype: str) -> tuple[Any, Any]:
    from ..conversion.loading import load_language_model, load_tokenizer

    model: Any = load_language_model(name, dtype=dtype)
    return model.to(device).eval(), load_tokenizer(name)


def check_card_folders(drafters: Sequence[str]) -> None:
    """Raises `ValueError` where `--card` has no folder to put figures into; asked before a long run."""
    import os

    from ..conversion.formats import DSPARK, detect_format, find_file, read_json

    for name in drafters:
        if not os.path.isdir(name):
            raise ValueError(f"--card is for drafters in local folders, and --drafter {name!r} is none.")
        if detect_format(read_json(find_file(name, "config.json", {}))) != DSPARK:
            raise ValueError(
                f"--card is for drafters in this package's format, and --drafter {name!r} is in another; convert it "
                "with `dspark convert --to dspark`."
            )


def check_template(tokenizer: Any, chat: bool | None, thinking: bool | None) -> None:
    """Raises `ValueError` for a flag that needs a chat template where none is used."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has_template:
        raise ValueError("--chat was given, but the target's tokenizer has no chat template; use --no-chat.")
    if thinking is None or (has_template and chat is not False):
        return
    flag = "--thinking" if thinking else "--no-thinking"
    reason = "--no-chat leaves it out" if has_template else "the target's tokenizer has none"
    raise ValueError(f"{flag} is for a chat template, and {reason}; leave {flag} out.")


def encode(tokenizer: Any, prompt: str, chat: bool | None, thinking: bool | None) -> Any:
    """Prompt ids `(1, length)`; with `chat` unset the chat template is used where there is one.

    Raises:
        ValueError: if there is no template though `chat` or `thinking` asks for it, or the template fails.
    """
    check_template(tokenizer, chat, thinking)
    if chat is None:
        chat = getattr(tokenizer, "chat_template", None) is not None
    return _encode_chat(tokenizer, prompt, thinking) if chat else tokenizer(prompt, return_tensors="pt").input_ids


def _encode_chat(tokenizer: Any, prompt: str, thinking: bool | None) -> Any:
    from jinja2 import TemplateError

    from ..data import template_options

    messages = [{"role": "user", "content": prompt}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    try:
        return tokenizer.apply_chat_template(messages, **options, **template_options(thinking))["input_ids"]
    except TemplateError as error:
        raise ValueError(f"The target's chat template fails on PROMPT ({error}); use --no-chat.") from error


__all__ = [
    "check_card_folders",
    "check_decoding",
    "check_dtype",
    "check_template",
    "decoding_options",
    "encode",
    "load_models",
    "load_pair",
]
