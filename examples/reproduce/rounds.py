"""What a round's time goes to: the parallel pass, the sequential head, the verification, the rest."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from dspark_hf.evaluation.comparison import timed_generate
from dspark_hf.models import Drafter

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}
HEAD_METHODS = ("embed_previous", "draft_step")
"""What a drafter's sequential head does in a round, token by token: look up the token before, add its bias."""


@contextlib.contextmanager
def head_clock(drafter: Drafter) -> Iterator[Callable[[], float]]:
    """While it is open the drafter's sequential head is timed; gives a function that tells the seconds so far.

    On a CPU a call has done its work when it returns, so the clock needs no events. A drafter without a sequential
    head shows what the clock itself takes.
    """
    total = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal total
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                total += time.perf_counter() - start

        return call

    names = [name for name in HEAD_METHODS if hasattr(drafter, name)]
    for name in names:
        setattr(drafter, name, timed(getattr(drafter, name)))
    try:
        yield lambda: total
    finally:
        for name in names:
            delattr(drafter, name)


def same_length(tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Token ids `(prompts, length)`, cut to the shortest, so that no batch of them needs padding."""
    ids = [tokenizer(text).input_ids for text in texts]
    length = min(map(len, ids))
    return torch.tensor([row[:length] for row in ids])


def time_rounds(
    target: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    prompts: torch.Tensor,
    sizes: Sequence[int],
    new_tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Milliseconds of the parts of a round at temperature 1, for each number of rows and each drafter.

    Args:
        target: the target.
        drafters: by name.
        prompts: `(prompts, length)`, gone through from the first on, again and again.
        sizes: numbers of rows.
        new_tokens: of each answer, whose end of sequence is ignored so that all rows stay to the last round.
        repeats: runs of each drafter, which take turns; figures are medians over them, ranges go from least to most.
    """
    rows = []
    for size in sizes:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in drafters}
        for repeat in range(-1, repeats):  # the first is a warm-up
            order = torch.arange(size * max(0, repeat), size * (max(0, repeat) + 1)) % len(prompts)
            for name, drafter in drafters.items():
                parts = _round_parts(target, drafter, prompts[order], new_tokens, seed=repeat + 1)
                if repeat >= 0:
                    found[name].append(parts)
        for name, runs in found.items():
            shares = [run["head"] / run["round"] for run in runs]
            rows.append(
                {
                    "drafter": name,
                    "rows": size,
                    "ms": {part: 1000 * statistics.median(run[part] for run in runs) for part in runs[0]},
                    "head_share": statistics.median(shares),
                    "head_share_range": [min(shares), max(shares)],
                }
            )
    return rows


def _round_parts(
    target: PreTrainedModel, drafter: Drafter, prompts: torch.Tensor, new_tokens: int, seed: int
) -> dict[str, float]:
    """Mean seconds per round; `parallel` is what drafting takes without the head."""
    with head_clock(drafter) as head_seconds:
        run = timed_generate(
            target,
            prompts,
            drafter,
            seed=seed,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            dspark_scheduler="none",
            **SAMPLED,
        )
        head = head_seconds()
    stats = run.stats
    draft, verify, whole = (stats.total(name) for name in ("draft_seconds", "verify_seconds", "seconds"))
    parts = {"parallel": draft - head, "head": head, "verify": verify, "rest": whole - draft - verify, "round": whole}
    return {name: seconds / stats.num_rounds for name, seconds in parts.items()}
