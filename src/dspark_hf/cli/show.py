"""How commands show a comparison of plain and speculative decoding."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from ..evaluation import Comparison

PROMPT_STYLE, DRAFTED_STYLE, TARGET_STYLE = "dim", "black on bright_green", "bold blue"


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(
        ("prompt", PROMPT_STYLE),
        "  ",
        ("drafted and accepted", DRAFTED_STYLE),
        "  ",
        ("the target's own token", TARGET_STYLE),
    )


def coloured(comparison: Comparison, tokenizer: Any) -> Text:
    """The text with the drafter, coloured by where each token comes from."""
    text = Text(tokenizer.decode(comparison.prompt_ids[0], skip_special_tokens=True), style=PROMPT_STYLE)
    # Runs of tokens of one origin are decoded with what precedes them: one token may be part of a character.
    ids, origins = comparison.draft_ids[0].tolist(), comparison.origins()
    written = ""
    for end in range(1, len(ids) + 1):
        if end == len(ids) or origins[end] != origins[end - 1]:
            whole = tokenizer.decode(ids[:end], skip_special_tokens=True)
            text.append(whole[len(written) :], style=DRAFTED_STYLE if origins[end - 1] else TARGET_STYLE)
            written = whole
    return text


def show(console: Console, comparison: Comparison, tokenizer: Any, title: str, sampled: bool) -> None:
    """Prints both texts and the figures."""
    console.print(Panel(coloured(comparison, tokenizer), title=title, title_align="left"))
    same = comparison.plain_ids.tolist() == comparison.draft_ids.tolist()
    if sampled:
        plain = tokenizer.decode(comparison.plain_ids[0], skip_special_tokens=True)
        console.print(Panel(Text(plain), title="plain generate, another sample of the same distribution"))
    elif same:
        console.print("[green]✓[/green] plain generate gives the same text, token for token")
    else:
        plain = tokenizer.decode(comparison.plain_ids[0], skip_special_tokens=True)
        console.print(Panel(Text(plain), title="plain generate"))
        console.print(
            "[yellow]![/yellow] the texts differ: in less than float32, or between two nearly equal logits, the order "
            "of arithmetic can decide"
        )
    console.print(figures(comparison), highlight=False)


def figures(comparison: Comparison) -> str:
    """Times, and what the drafter gains."""
    plain = statistics.median(comparison.plain_seconds)
    draft = statistics.median(comparison.draft_seconds)
    return f"plain {plain:.2f} s, drafter {draft:.2f} s   speed {comparison.speedup:.2f}x plain generate\n"
