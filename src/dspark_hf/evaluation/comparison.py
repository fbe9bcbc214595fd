"""Plain `generate` beside `generate` with a drafter: same prompts, same run, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models import Drafter
from .acceptance import Rounds


@dataclass(frozen=True)
class TimedRun:
    """One timed `generate` call.

    Attributes:
        ids: `(batch, n)`, the new tokens, padded after the end of a row.
        tokens: new tokens of each row, up to and with its end.
        seconds: from the call to its last token, the prefill included.
        stats: `GenerationStats` of the drafter, `None` without one.
    """

    ids: torch.Tensor
    tokens: list[int]
    seconds: float
    stats: Any = None

    @property
    def texts(self) -> list[list[int]]:
        """The new tokens of each row, without padding."""
        return [row[:count] for row, count in zip(self.ids.tolist(), self.tokens, strict=True)]


@dataclass
class Comparison:
    """Plain and speculative decoding of one prompt, or of a batch of prompts.

    Attributes:
        prompt_ids: `(batch, length)`.
        plain_ids: `(batch, n)`, new tokens of plain `generate` in its last repeat.
        draft_ids: `(batch, n)`, new tokens with the drafter in its last repeat.
        plain_seconds: one time per repeat.
        draft_seconds: one time per repeat.
        plain_tokens: new tokens of each plain repeat, all rows together, without padding.
        draft_tokens: new tokens of each repeat with the drafter, counted in the same way.
        stats: `GenerationStats` of each repeat with the drafter.
    """

    prompt_ids: torch.Tensor
    plain_ids: torch.Tensor
    draft_ids: torch.Tensor
    plain_seconds: list[float]
    draft_seconds: list[float]
    plain_tokens: list[int]
    draft_tokens: list[int]
    stats: list[Any]

    @property
    def speedup(self) -> float:
        """Tokens per second with the drafter over those of plain `generate`: a ratio of medians over the repeats."""
        plain = statistics.median(map(_ratio, self.plain_tokens, self.plain_seconds))
        draft = statistics.median(map(_ratio, self.draft_tokens, self.draft_seconds))
        return draft / plain

    @property
    def accepted_length(self) -> float:
        """Mean tokens per round over all repeats, the bonus token included."""
        rounds = Rounds.join([Rounds.of(stats) for stats in self.stats])
        return rounds.accepted_length if len(rounds) else 0.0

    def origins(self) -> list[bool]:
        """For each token of `draft_ids` of a single prompt, whether it was drafted or the target's own (false)."""
        drafted = [False]
        for entry in self.stats[-1].rounds:
            drafted += [True] * entry.accepted + [False] * (entry.emitted - entry.accepted)
        return drafted


def _ratio(tokens: int, seconds: float) -> float:
    return tokens / seconds


def compare(
    target: PreTrainedModel,
    drafter: Drafter,
    prompt_ids: torch.Tensor,
    *,
    repeats: int = 1,
    seed: int = 0,
    draft_options: dict[str, Any] | None = None,
    **options: Any,
) -> Comparison:
    """Generates `repeats` times without and with `drafter`, in turns.

    Args:
        target: the target.
        drafter: its drafter.
        prompt_ids: `(batch, length)`; padding, on the left, goes with an `attention_mask` among the options.
        repeats: timed runs of each; the figures are medians over them.
        seed: seed of the first repeat, the following ones count up from it; matters only when sampling.
        draft_options: options of `generate` for the runs with the drafter only.
        options: options of `generate` for all runs.
    """
    if repeats < 1:
        raise ValueError(f"`repeats` is {repeats}; it must be at least 1.")
    plain, draft = [], []
    for repeat in range(repeats):
        plain.append(timed_generate(target, prompt_ids, seed=seed + repeat, **options))
        draft.append(
            timed_generate(target, prompt_ids, drafter, seed=seed + repeat, **{**options, **(draft_options or {})})
        )
    return Comparison(
        prompt_ids=prompt_ids,
        plain_ids=plain[-1].ids,
        draft_ids=draft[-1].ids,
        plain_seconds=[run.seconds for run in plain],
        draft_seconds=[run.seconds for run in draft],
        plain_tokens=[sum(run.tokens) for run in plain],
        draft_tokens=[sum(run.tokens) for run in draft],
        stats=[run.stats for run in draft],
    )


def timed_generate(
    target: PreTrainedModel, prompt_ids: torch.Tensor, drafter: Drafter | None = None, *, seed: int = 0, **options: Any
) -> TimedRun:
    """Generates once and takes the time.

    Args:
        target: the target.
        prompt_ids: `(batch, length)`; padding, on the left, goes with an `attention_mask` among the options.
        drafter: its drafter; plain `generate` without one.
        seed: of sampling.
        options: options of `generate`.
    """
    if drafter is not None:
        options["assistant_model"] = drafter
    torch.manual_seed(seed)
    _wait_for_device()
    start = time.perf_counter()
    sequences = target.generate(input_ids=prompt_ids, **options)
    _wait_for_device()
    seconds = time.perf_counter() - start
    ids = sequences[:, prompt_ids.shape[1] :]
    return TimedRun(
        ids, _new_tokens(ids, _ends(target, options)), seconds, drafter.last_stats if drafter is not None else None
    )


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _ends(target: PreTrainedModel, options: dict[str, Any]) -> set[int]:
    """Tokens that end a text."""
    eos = options.get("eos_token_id", target.generation_config.eos_token_id)
    return set() if eos is None else set(eos if isinstance(eos, (list, tuple)) else [eos])


def _new_tokens(ids: torch.Tensor, ends: set[int]) -> list[int]:
    """Tokens of each row of `ids (batch, n)`, up to and with its end of sequence."""
    return [next((index + 1 for index, token in enumerate(row) if token in ends), len(row)) for row in ids.tolist()]


def repeated_share(ids: Iterable[int], n: int = 8) -> float:
    """Share of the n-grams of a text that stood in it before: how much it loops. 0 for a text shorter than `n`."""
    tokens = list(ids)
    grams = [tuple(tokens[index : index + n]) for index in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


__all__ = ["Comparison", "TimedRun", "compare", "repeated_share", "timed_generate"]
