"""What a drafter brings on held-out prompts, and what limits it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dspark_hf import DSparkDrafter
from dspark_hf.evaluation import Comparison, Rounds, compare, repeated_share
from dspark_hf.generation.capacity import CapacityProfile

DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature 1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}


def encode(prompt: dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> torch.Tensor:
    """Token ids `(1, length)` of a prompt, as `prepare_data` makes them."""
    if "messages" not in prompt:
        return tokenizer(prompt["text"], return_tensors="pt").input_ids[:, :prompt_tokens]
    return tokenizer.apply_chat_template(
        prompt["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


Comparisons = dict[tuple[str, str], list[Comparison]]
"""By decoding and scheduler, one for each prompt."""


def compare_prompts(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    prompts: list[torch.Tensor],
    new_tokens: int,
    repeats: int,
    schedulers: dict[str, Any],
    is_late: Callable[[], bool],
) -> Comparisons:
    """Each prompt both ways, plain and with the drafter in turns, until it is late; one prompt at least.

    Args:
        target: the target.
        drafter: its drafter.
        prompts: `(1, length)` each.
        new_tokens: most tokens of an answer.
        repeats: times that each is decoded.
        schedulers: by the names that the figures get.
        is_late: asked after each prompt.
    """
    found: Comparisons = {(decoding, name): [] for decoding in DECODINGS for name in schedulers}
    compare(target, drafter, prompts[0], attention_mask=torch.ones_like(prompts[0]), max_new_tokens=4)  # warm-up
    for prompt in prompts:
        for (decoding, name), comparisons in found.items():
            comparisons.append(
                compare(
                    target,
                    drafter,
                    prompt,
                    repeats=repeats,
                    draft_options={"dspark_scheduler": schedulers[name]},
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=new_tokens,
                    **DECODINGS[decoding],
                )
            )
        if is_late():
            break
    return found


def summarise(decoding: str, scheduler: str, comparisons: list[Comparison]) -> dict[str, Any]:
    """Figures of several prompts; a speed is a ratio within one repeat of one prompt."""
    rounds = [entry for item in comparisons for stats in item.stats for entry in stats.rounds]
    if not rounds:
        raise ValueError("No prompt had an answer longer than one token; raise `new_tokens`, or use another target.")
    by_row = Rounds.join([Rounds.of(stats) for item in comparisons for stats in item.stats])
    speeds = [
        tokens / seconds / (plain_tokens / plain_seconds)
        for item in comparisons
        for tokens, seconds, plain_tokens, plain_seconds in zip(
            item.draft_tokens, item.draft_seconds, item.plain_tokens, item.plain_seconds, strict=True
        )
    ]
    return {
        "decoding": decoding,
        "scheduler": scheduler,
        "prompts": len(comparisons),
        "rounds": len(rounds),
        "accepted_length": by_row.accepted_length,
        "verified_per_round": float(by_row.verified.mean()),
        "speedup_median": statistics.median(speeds),
        "speedup_range": [min(speeds), max(speeds)],
        # A position that was never reached has none.
        "acceptance_by_position": [share for share in by_row.conditional_acceptance() if not math.isnan(share)],
        "ms_per_round": {
            "draft": 1000 * statistics.median(entry.draft_seconds for entry in rounds),
            "verify": 1000 * statistics.median(entry.verify_seconds for entry in rounds),
            "rest": 1000
            * statistics.median(entry.seconds - entry.draft_seconds - entry.verify_seconds for entry in rounds),
        },
        "plain_ms_per_token": 1000
        * sum(sum(item.plain_seconds) for item in comparisons)
        / sum(sum(item.plain_tokens) for item in comparisons),
        "repeated_8grams": statistics.fmean(repeated_share(item.draft_ids[0].tolist()) for item in comparisons),
        "identical_to_plain": sum(torch.equal(item.plain_ids, item.draft_ids) for item in comparisons)
        if decoding == "greedy"
        else None,
    }


def measure_limits(target: PreTrainedModel, block: int, profile: CapacityProfile, repeats: int) -> dict[str, Any]:
    """Milliseconds of a verification by the tokens that it runs, of the LM head's share of it, and of drafting."""
    (context,) = profile.contexts
    verify = dict(zip(profile.lengths, profile.verify_seconds[0][0], strict=True))
    counts = [count for count in (1, 2, 4, 8, 16) if count in verify]
    return {
        "verify_ms": {str(count): 1000 * verify[count] for count in counts},
        "lm_head_ms": {str(count): 1000 * _head_seconds(target, count, repeats) for count in counts},
        "draft_ms": {str(count): 1000 * profile.draft_seconds(1, context, count) for count in (1, block)},
    }


@torch.inference_mode()
def _head_seconds(target: PreTrainedModel, count: int, repeats: int) -> float:
    head = target.get_output_embeddings()
    hidden = torch.randn(1, count, target.config.get_text_config(decoder=True).hidden_size)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        head(hidden)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@torch.inference_mode()
def top_probability(target: PreTrainedModel, comparisons: list[Comparison]) -> float:
    """Mean of the target's largest probability along its own samples: what is hard to guess for any drafter."""
    largest = []
    for item in comparisons:
        logits = target(torch.cat([item.prompt_ids, item.plain_ids], dim=1)).logits[0]
        largest.append(logits[item.prompt_ids.shape[1] - 1 : -1].softmax(dim=-1).amax(dim=-1))
    return torch.cat(largest).mean().item()


def show(report: dict[str, Any]) -> None:
    """Prints the figures."""
    console = Console()
    table = Table(
        title="held-out prompts: ms of a round's parts and of a plain token; speed is times plain",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("decoding", "scheduler"):
        table.add_column(column, no_wrap=True)
    for column in ("verified", "accepted", "speed", "range", "draft", "verify", "rest", "plain"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["rows"]:
        low, high = row["speedup_range"]
        table.add_row(
            row["decoding"],
            row["scheduler"],
            f"{row['verified_per_round']:.2f}",
            f"{row['accepted_length']:.2f}",
            f"{row['speedup_median']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            *(f"{row['ms_per_round'][part]:.1f}" for part in ("draft", "verify", "rest")),
            f"{row['plain_ms_per_token']:.1f}",
        )
    console.print(table)
    for row in report["rows"]:
        shares = " ".join(f"{share:.0%}" for share in row["acceptance_by_position"])
        console.print(
            f"{row['decoding']}, {row['scheduler']}: accepted at each position, if all before it were: {shares}"
        )
    console.print(f"the target's largest probability, mean over its samples: {report['top_probability']:.2f}")
    for name, times in report["limits"].items():
        console.print(f"{name}:", ", ".join(f"{count}: {ms:.1f}" for count, ms in times.items()))
