"""What happened in the rounds of one `generate` call, and how long they took."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class RoundStats:
    """One round of drafting and verification, summed over the rows of the batch.

    Attributes:
        rows: rows that took part.
        drafted: tokens that the drafter computed.
        proposed: drafted tokens left after the confidence threshold.
        verified: proposed tokens given to the target; not those after a drafted end of sequence or the length limit,
            nor those that the scheduler or the budget cut off.
        accepted: drafted tokens kept in the output.
        emitted: tokens added to the output: the accepted ones and the target's own, less what an end cut off.
        draft_seconds: time of drafting.
        verify_seconds: time of the target's forward pass.
        seconds: time of the whole round.
        anchors: text position of each row's anchor.
        emitted_by_row: `emitted`, row by row.
        verified_by_row: `verified`, row by row.
        survived_by_row: drafted tokens that verification accepted, row by row, also those that an end then cut off.
        confidence_logits: of every drafted token, row by row, where the drafter's `record_confidence` asks for them.
    """

    rows: int
    drafted: int
    proposed: int
    verified: int
    accepted: int
    emitted: int
    draft_seconds: float
    verify_seconds: float
    seconds: float = 0.0
    anchors: tuple[int, ...] = ()
    emitted_by_row: tuple[int, ...] = ()
    verified_by_row: tuple[int, ...] = ()
    survived_by_row: tuple[int, ...] = ()
    confidence_logits: list[list[float]] | None = None


@dataclass
class GenerationStats:
    """Statistics of one `generate` call that a drafter served; printing it gives a summary.

    Attributes:
        rounds: one entry per round; the prefill, which gives each row's first token, is not a round.
        prefill_seconds: time of the target's forward over the prompt.
        total_seconds: time from the start of the prefill to the last token.
        batch: rows of the call.
    """

    rounds: list[RoundStats] = field(default_factory=list)
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    batch: int = 1

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens per row and round, τ of equation 1, with the target's own (bonus) token; 0 without rounds."""
        return self.total("emitted") / self.total("rows") if self.num_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of verified drafted tokens that were kept; 0 where none was verified."""
        verified = self.total("verified")
        return self.total("accepted") / verified if verified else 0.0

    @property
    def num_rounds(self) -> int:
        """Rounds so far."""
        return len(self.rounds)

    def add(self, entry: RoundStats) -> None:
        """Takes in one more round."""
        self.rounds.append(entry)

    def accepted_length_by_position(self, width: int = 256) -> dict[int, float]:
        """Mean accepted length of the rounds whose anchor is in each stretch of `width` text positions.

        Shows whether drafts fade where the context is longer than what the drafter was trained on.

        Returns:
            First position of each stretch to the mean, bonus token included.
        """
        stretches: dict[int, list[int]] = {}
        for entry in self.rounds:
            for anchor, emitted in zip(entry.anchors, entry.emitted_by_row, strict=True):
                stretches.setdefault(anchor // width * width, []).append(emitted)
        return {start: statistics.fmean(emitted) for start, emitted in sorted(stretches.items())}

    def total(self, name: str) -> Any:
        """Sum of one field of `RoundStats` over all rounds."""
        return sum(getattr(entry, name) for entry in self.rounds)

    def __str__(self) -> str:
        new_tokens = self.batch + self.total("emitted")
        rate = new_tokens / self.total_seconds if self.total_seconds else 0.0
        other = self.total_seconds - self.prefill_seconds - self.total("draft_seconds") - self.total("verify_seconds")
        return (
            f"{new_tokens} tokens in {self.num_rounds} rounds, {rate:.1f} tokens/s\n"
            f"mean accepted length {self.mean_accepted_length:.2f} (bonus token included), "
            f"{self.acceptance_rate:.0%} of verified drafts kept\n"
            f"drafted {self.total('drafted')}, verified {self.total('verified')}, kept {self.total('accepted')}\n"
            f"seconds: prefill {self.prefill_seconds:.3f}, drafting {self.total('draft_seconds'):.3f}, "
            f"verifying {self.total('verify_seconds'):.3f}, everything else {other:.3f}"
        )


@dataclass
class EngineStats(GenerationStats):
    """Statistics of a `SpeculativeEngine` since it was made; `batch` counts the requests that it has begun.

    `rounds` has the last `kept_rounds` only. Totals, means and the summary are those of all rounds.
    """

    batch: int = 0
    kept_rounds: int = 1024
    _num_rounds: int = field(default=0, repr=False)
    _totals: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def num_rounds(self) -> int:
        return self._num_rounds

    def add(self, entry: RoundStats) -> None:
        super().add(entry)
        del self.rounds[: -self.kept_rounds]
        self._num_rounds += 1
        for name, value in vars(entry).items():
            if isinstance(value, (int, float)):
                self._totals[name] += value  # type: ignore[assignment]

    def total(self, name: str) -> Any:
        return self._totals[name]


class Stopwatch:
    """Times stretches of work on `device`: by events on CUDA, so that nothing has to wait, by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device

    def now(self) -> Any:
        """A mark to give to `seconds`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks; on CUDA both must have been reached by the device."""
        if not self._cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000
