"""What a target is asked and how it answers; the backend that decodes in this process.

A backend is called from several threads, `workers` of them, and is a context manager.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..models import DSparkDrafter


class RowFailed(Exception):
    """A row that got no answer.

    Args:
        reason: what is counted, the same for all rows that fail in this way.
        detail: what is this row's own.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class BackendGone(OSError):
    """No row can be answered any more, through no fault of the row."""


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded.

    Args:
        max_new_tokens: most tokens of an answer.
        temperature: 0 for greedy decoding.
        top_p: sample from the likeliest tokens with this total probability.
        top_k: sample from the k likeliest tokens; 0 for all.

    Raises:
        ValueError: for a value out of range.
    """

    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` is {self.max_new_tokens}; it must be at least 1.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` is {self.temperature}; use 0 for greedy decoding or a positive number.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` is {self.top_p}; it is a probability above 0, 1 for all tokens.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` is {self.top_k}; use 0 for all tokens or a positive number.")


@dataclass(frozen=True)
class Question:
    """One request to a backend.

    Attributes:
        input_ids: the prompt.
        max_new_tokens: most tokens of the answer, which fit into the target's context.
        seed: of the sampling.
        messages: the prompt before the chat template; `None` for text that is gone on from.
        template_options: given to the chat template.
    """

    input_ids: list[int]
    max_new_tokens: int
    seed: int
    messages: list[dict[str, str]] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came back: token ids, text, or both.

    Attributes:
        finish_reason: `stop` where the target ended the answer, `length` where it was cut.
        input_ids: the tokens of the answer, with those that end it.
        text: the answer without these.
        prompt_ids: the prompt that was answered, where the backend made it itself.
    """

    finish_reason: str
    input_ids: list[int] | None = None
    text: str | None = None
    prompt_ids: list[int] | None = None


class Backend(Protocol):
    """Answers questions."""

    @property
    def workers(self) -> int: ...

    def __call__(self, question: Question) -> Answer: ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class EngineBackend:
    """Answers with a `SpeculativeEngine`.

    With `max_batch=1` each answer depends on the seed of its question alone. Rows that are decoded together draw from
    one generator, torch's, in the order in which they come; then `seed` decides only where that generator starts.

    Args:
        target: the model that answers.
        drafter: a drafter made for it, which makes it faster; `None` for plain decoding.
        max_batch: most rows that are decoded at once.
        decoding: how.
        seed: of torch's generator.

    Raises:
        TypeError, ValueError: for a drafter of another target, or a `max_batch` that is no positive number.
    """

    def __init__(
        self, target: PreTrainedModel, drafter: DSparkDrafter | None, max_batch: int, decoding: Decoding, seed: int
    ) -> None:
        from ..generation import SpeculativeEngine  # training imports this package and needs no engine

        options: dict[str, Any] = {"do_sample": decoding.temperature > 0}
        if options["do_sample"]:
            options |= {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": decoding.top_k}
        torch.manual_seed(seed)
        self._engine = SpeculativeEngine(target, drafter, max_batch, max_queue=max_batch, **options)
        # As many wait as are decoded, so that a row that ends is followed by another at once.
        self.workers = 1 if max_batch == 1 else 2 * max_batch
        self._lock = threading.Lock()
        ends = target.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, (list, tuple)) else [ends])

    def __call__(self, question: Question) -> Answer:
        with self._lock:
            if self.workers == 1:
                torch.manual_seed(question.seed)
            try:
                request = self._engine.submit(question.input_ids, max_new_tokens=question.max_new_tokens)
            except RuntimeError as error:
                raise BackendGone(str(error)) from error
        input_ids = request.result()
        return Answer("stop" if input_ids and input_ids[-1] in self._ends else "length", input_ids)

    def __enter__(self) -> EngineBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close(cancel=kind is not None)


__all__ = ["Answer", "Backend", "BackendGone", "Decoding", "EngineBackend", "Question", "RowFailed"]
