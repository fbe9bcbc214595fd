"""`dspark generate`: one prompt, without and with a drafter."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import user_errors
from .options import Device, Thinking
from .pair import check_decoding, decoding_options, encode, load_pair


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    target: Annotated[str, typer.Option(help="The target: a Hub repository or a local folder.")],
    drafter: Annotated[str, typer.Option(help="Its drafter: a Hub repository or a local folder.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding; sampled above.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    draft_tokens: Annotated[int | None, typer.Option(help="Most tokens drafted in a round. (default: all)")] = None,
    threshold: Annotated[float, typer.Option(help="Confidence below which a proposal is cut.")] = 0.0,
    chat: Annotated[
        bool | None, typer.Option(help="Whether to use the chat template. (default: where there is one)")
    ] = None,
    thinking: Thinking = None,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="`auto`, `float32`, `bfloat16` or `float16`.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed runs of each; figures are medians.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
) -> None:
    """Generate from PROMPT without and with a drafter, and show what was drafted and how fast it was."""
    from rich.console import Console

    from ..evaluation import compare
    from .show import legend, show

    with user_errors():
        if not prompt:
            raise ValueError("PROMPT is empty; give some text to go on from.")
        check_decoding(max_new_tokens, temperature, top_k, top_p, dtype, seed, repeats)
        model, tokenizer, helper = load_pair(target, drafter, device, dtype)
        prompt_ids = encode(tokenizer, prompt, chat, thinking).to(model.device)
        if not prompt_ids.numel():
            raise ValueError("PROMPT has no token for the target's tokenizer; give other text, or mend the tokenizer.")
        options = decoding_options(max_new_tokens, temperature, top_k, top_p)
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
