"""`dspark generate`: one prompt, without and with a drafter."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from .errors import user_errors


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    target: Annotated[str, typer.Option(help="The target: a Hub repository or a local folder.")],
    drafter: Annotated[str, typer.Option(help="Its drafter: a Hub repository or a local folder.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding; sampled above.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    draft_tokens: Annotated[int | None, typer.Option(help="Most tokens drafted in a round. [default: all]")] = None,
    threshold: Annotated[float, typer.Option(help="Confidence below which a proposal is cut.")] = 0.0,
    chat: Annotated[
        bool | None, typer.Option(help="Whether to use the chat template. [default: where there is one]")
    ] = None,
    thinking: Annotated[
        bool | None, typer.Option(help="Thinking mode of the chat template. [default: the template's]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run. [default: a GPU if there is one]")] = None,
    dtype: Annotated[str, typer.Option(help="`auto`, `float32`, `bfloat16` or `float16`.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed runs of each; figures are medians.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
) -> None:
    """Generate from PROMPT without and with a drafter, and show what was drafted and how fast it was."""
    import torch
    from rich.console import Console

    from ..evaluation import compare
    from ..factory import AutoDrafter
    from .show import legend, show

    with user_errors():
        _check(prompt, max_new_tokens, temperature, top_k, top_p, dtype, repeats, seed)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        _check_device(device)
        # The drafter first, which is small: nobody should wait for the target to be told that the drafter is missing.
        with user_errors(pretrained_model_name_or_path="--drafter"):
            helper = AutoDrafter.from_pretrained(drafter)
        with user_errors(target="--target"):
            model, tokenizer = _load_target(target, device, dtype)
        helper = helper.to(device=model.device, dtype=model.dtype)
        helper.check_target(model)
        prompt_ids = _encode(tokenizer, prompt, chat, thinking).to(model.device)
        if not prompt_ids.numel():
            raise ValueError("PROMPT has no token for the target's tokenizer; give other text, or mend the tokenizer.")
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        draft_options = {"dspark_num_draft_tokens": draft_tokens, "dspark_confidence_threshold": threshold or None}
        console = Console()
        compare(model, helper, prompt_ids, max_new_tokens=8, do_sample=False)  # warm-up
        with user_errors(dspark_num_draft_tokens="--draft-tokens", dspark_confidence_threshold="--threshold"):
            comparison = compare(
                model, helper, prompt_ids, repeats=repeats, seed=seed, draft_options=draft_options, **options
            )
        console.print(legend())
        show(console, comparison, tokenizer, title=target, sampled=temperature > 0)
        console.print(str(comparison.stats[-1]), highlight=False)


def _check(
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    dtype: str,
    repeats: int,
    seed: int,
) -> None:
    if not prompt:
        raise ValueError("PROMPT is empty; give some text to go on from.")
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
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype is {dtype!r}; choose auto, float32, bfloat16 or float16.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed is {seed}; it must be from 0 to {2**32 - 1}.")


def _check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device is {device!r}, which cannot be used here: {reason}") from error


def _load_target(name: str, device: str, dtype: str) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from ..conversion.loading import load_language_model

    model: Any = load_language_model(name, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name)


def _encode(tokenizer: Any, prompt: str, chat: bool | None, thinking: bool | None) -> Any:
    """Prompt ids `(1, length)`."""
    from jinja2 import TemplateError

    template = getattr(tokenizer, "chat_template", None)
    if chat and template is None:
        raise ValueError("--chat was given, but the target's tokenizer has no chat template; use --no-chat.")
    if chat is None:
        chat = template is not None
    if chat:
        messages = [{"role": "user", "content": prompt}]
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **options
            )["input_ids"]
        except TemplateError as error:
            raise ValueError(f"The target's chat template fails on PROMPT ({error}); use --no-chat.") from error
    return tokenizer(prompt, return_tensors="pt").input_ids
