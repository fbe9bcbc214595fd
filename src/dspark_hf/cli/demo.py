"""`dspark demo`: the embedded pair, offline, in under a minute."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer

from .errors import user_errors

KINDS = ("code", "prose", "structured")


def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 96,
    repeats: Annotated[int, typer.Option(help="Timed runs of each; figures are medians.")] = 3,
) -> None:
    """Generate with the embedded pair, without and with its drafter: same text, faster.

    One held-out prompt of each kind is shown with its accepted tokens in colour; a table then gives accepted length
    and speed, greedy and sampled at temperature 1.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from ..embedded import load_embedded_pair, load_prompts
    from ..evaluation import Comparison, compare, repeated_share
    from .show import legend, show

    with user_errors():
        if max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens is {max_new_tokens}; it must be at least 1.")
        # Models this small gain nothing from a second thread, and lose much where another process holds its core.
        torch.set_num_threads(1)
        target, tokenizer, drafter = load_embedded_pair()
        console = Console()
        console.print(legend())
        prompts = {kind: next(prompt for prompt in load_prompts() if prompt.kind == kind) for kind in KINDS}
        results: dict[tuple[str, bool], Comparison] = {}
        for kind, prompt in prompts.items():
            prompt_ids = tokenizer(prompt.text, return_tensors="pt").input_ids
            with console.status(f"generating, {kind}"):
                compare(target, drafter, prompt_ids, max_new_tokens=8, do_sample=False)  # warm-up
                for sampled in (False, True):
                    options = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sampled else {"do_sample": False}
                    results[kind, sampled] = compare(
                        target, drafter, prompt_ids, repeats=repeats, max_new_tokens=max_new_tokens, **options
                    )
            show(console, results[kind, False], tokenizer, title=f"{kind}: {prompt.source}", sampled=False)
        runs = f"medians of {repeats} interleaved runs" if repeats > 1 else "one run"
        table = Table(title=f"{max_new_tokens} new tokens, {runs}")
        for column in ("prompt", "decoding", "accepted length", "speed / plain generate", "repeated 8-grams"):
            table.add_column(column, justify="left" if column in ("prompt", "decoding") else "right")
        for (kind, sampled), result in results.items():
            table.add_row(
                kind,
                "temperature 1" if sampled else "greedy",
                f"{result.accepted_length:.2f}",
                f"{result.speedup:.2f}x",
                f"{repeated_share(result.draft_ids[0].tolist()):.0%}",
            )
        console.print(table)
        for sampled, name in ((False, "greedy"), (True, "temperature 1")):
            mean = statistics.fmean(result.speedup for (_, flag), result in results.items() if flag == sampled)
            console.print(f"{name}: mean speed {mean:.2f}x plain generate", highlight=False)
        console.print("accepted length counts the bonus token: tokens per pass of the target", highlight=False)
