"""An engine for many requests: prompts come at any time, rows join and leave the batch between rounds.

Why not Transformers' own continuous batching (`generate_batch`, `ContinuousBatchingManager`)? As of Transformers 5.24:

- A request gets one new token per step: scores are kept for the last position of each request only, the forward pass,
  the processors and the choice of a token are one function on the device (`ModelRunner`), and a request takes in one
  token at a time. A verification needs scores at several positions of each request, and takes several tokens or one.
- The paged cache only grows. Its blocks are freed with their request, nothing takes back the last positions of one,
  and in a sliding layer, a ring, a rejected token has overwritten one that is still needed.
- Of the target's output it keeps the logits; a drafter needs hidden states.
- Greedy or sampled is one choice for all requests. Each may have its own temperature, top-k and top-p, and no other
  processors or criteria.

So this engine puts requests into the batched loop of `decoding.py`. Prompts are prefilled one by one; it is meant for
one process that serves or evaluates, or writes training answers. For fleets, use vLLM or SGLang.
"""

from __future__ import annotations

import atexit
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from itertools import count
from queue import Full
from types import TracebackType
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .. import _compat
from ..models import Drafter, without_adapters
from .decoding import DecodingLoop, check_call, warn_on_collapse, warn_on_other_template
from .drafting import Proposal
from .hook import check_options
from .processing import RowProcessors, copy_processor
from .record import Record
from .rows import Rows
from .schedulers import Plain, Scheduler, resolve_scheduler
from .settings import GENERATION_OPTIONS, DecodingSettings, resolve_settings
from .stats import EngineStats
from .target import COLUMN_INPUTS, TargetSession
from .verification import Verdict

# What the target may be given beside the ids: a request is text.
_KNOWN_INPUTS = {*COLUMN_INPUTS, _compat.CACHE_ARGUMENT, "use_cache", "logits_to_keep"}

_NOT_FOR_REQUESTS = {
    **dict.fromkeys(GENERATION_OPTIONS, "it holds for the whole engine: give it to `SpeculativeEngine`"),
    **dict.fromkeys(("cache", "past_key_values"), "each request has a cache of its own"),
    "assistant_model": "the engine has a drafter of its own: give it to `SpeculativeEngine`",
    "custom_generate": "the engine decodes in its own loop; leave it out",
    "streamer": "iterate over the request instead",
}


class Request:
    """One prompt on its way through a `SpeculativeEngine`, made by its `submit`.

    Iterating gives the new token ids as they come, from the first one each time. Where the request fails or is
    cancelled, that follows the tokens that came before.

    Attributes:
        number: counts the requests of the engine.
    """

    def __init__(self, engine: SpeculativeEngine, number: int) -> None:
        self.number = number
        self._engine = engine
        self._tokens: list[int] = []
        self._done = False
        self._error: BaseException | None = None
        # Under the engine's lock, and the request's own: of many that wait, only those that it concerns wake up.
        self._grew, self._ended = (threading.Condition(engine._lock) for _ in range(2))

    @property
    def done(self) -> bool:
        """Whether the request has ended, failed or been cancelled."""
        return self._done

    def __iter__(self) -> Iterator[int]:
        seen = 0
        while self._has_more_than(seen):
            yield self._tokens[seen]
            seen += 1
        if self._error is not None:
            raise self._error

    def _has_more_than(self, seen: int) -> bool:
        """Waits for the next token; false where none will come."""
        self._engine._wait_for(self._grew, lambda: self._done or len(self._tokens) > seen)
        return len(self._tokens) > seen

    def result(self, timeout: float | None = None) -> list[int]:
        """The new token ids, once the request has ended.

        Args:
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: where it takes longer.
            CancelledError: (of `concurrent.futures`) where the request was cancelled.
            Exception: what the request failed with.
        """
        if not self._engine._wait_for(self._ended, lambda: self._done, timeout):
            raise TimeoutError(
                f"Request {self.number} has not ended after {timeout} seconds. Wait longer, or cancel it."
            )
        if self._error is not None:
            raise self._error
        return list(self._tokens)

    def cancel(self) -> bool:
        """Ends the request with `CancelledError`; false where it had ended before.

        A waiting request leaves the queue. The row of an active one leaves the batch with the next round.
        """
        return self._engine._end(self, CancelledError(f"Request {self.number} was cancelled."))


@dataclass
class _Member:
    """What the engine needs to decode a request."""

    request: Request
    rows: Rows
    processors: RowProcessors
    session: TargetSession
    do_sample: bool

    def fail(self, error: BaseException) -> None:
        """Ends the request. The error keeps the lines it came from, but not what their variables held."""
        traceback.clear_frames(error.__traceback__)
        self.request._engine._end(self.request, error)


Members = dict[int, _Member]
"""Requests of one loop by their numbers, which stand for their rows."""


class _RequestRows:
    """The text of several requests. A request that fails here ends, and the others go on."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.device = next(iter(members.values())).rows.device

    @property
    def batch(self) -> int:
        return len(self.members)

    @property
    def active(self) -> list[int]:
        return list(self.members)

    @property
    def lengths(self) -> dict[int, int]:
        return {row: member.rows.lengths[0] for row, member in self.members.items()}

    @property
    def ended(self) -> dict[int, bool]:
        return {row: member.request.done for row, member in self.members.items()}

    def room(self, row: int) -> int:
        return self.members[row].rows.room(0)

    def last_ids(self, rows: list[int]) -> torch.Tensor:
        return torch.cat([self.members[row].rows.last_ids([0]) for row in rows])

    def length_to_verify(self, tokens: list[int], row: int) -> int:
        member = self.members[row]
        return 0 if member.request.done else member.rows.length_to_verify(tokens, 0)

    def append(self, rows: list[int], tokens: list[list[int]]) -> list[int]:
        return [self._append(self.members[row], new) for row, new in zip(rows, tokens, strict=True)]

    def _append(self, member: _Member, tokens: list[int]) -> int:
        if member.request.done:
            return 0
        try:
            (length,) = member.rows.append([0], [tokens])
        except Exception as error:
            member.fail(error)
            return 0
        request = member.request
        request._engine._deliver(request, tokens[:length], ended=member.rows.ended[0])
        return length


class _RequestProcessors:
    """The logits processors of several requests. A request that fails here ends, and the others go on.

    Attributes:
        samples: whether the round samples. Then a greedy request's scores become those of a distribution that has all
            its mass on the likeliest token, under which sampling, for drafts and targets alike, is greedy choice.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self.samples = False

    @property
    def needs_ids(self) -> bool:
        return any(member.processors.needs_ids for member in self.members.values())

    def begin(self) -> None:
        for member in self.members.values():
            member.processors.begin()

    def begin_certain(self) -> None:
        for member in self.members.values():
            member.processors.begin_certain()

    def process(self, active: list[int], drafts: list[list[int]], offset: int, scores: torch.Tensor) -> torch.Tensor:
        for index, (row, draft) in enumerate(zip(active, drafts, strict=True)):
            member = self.members[row]
            if member.processors.stages and not member.request.done:
                try:
                    scores[index] = member.processors.process([0], [draft], offset, scores[index : index + 1])[0]
                except Exception as error:
                    member.fail(error)
            if self.samples and not member.do_sample:
                scores[index] = _one_hot(scores[index])
        return scores

    def commit(self, active: list[int], before: list[int]) -> None:
        for row, length in zip(active, before, strict=True):
            member = self.members[row]
            if not member.request.done:
                try:
                    member.processors.commit([0], [length])
                except Exception as error:
                    member.fail(error)


def _one_hot(scores: torch.Tensor) -> torch.Tensor:
    """Scores `(n, vocab)` of the law that has all its mass on the argmax of `scores`; NaN where that is NaN."""
    best = scores.argmax(dim=-1, keepdim=True)
    largest = scores.gather(-1, best)
    return torch.full_like(scores, -torch.inf).scatter(-1, best, largest.masked_fill(~largest.isnan(), 0.0))


class _RequestLoop(DecodingLoop):
    """A decoding loop over requests, which others can join.

    Args:
        engine: the engine.
        member: the first request.
    """

    def __init__(self, engine: SpeculativeEngine, member: _Member) -> None:
        self.members: Members = {member.request.number: member}
        self.score_processors = _RequestProcessors(self.members)
        super().__init__(
            member.session,
            engine.drafter,
            _RequestRows(self.members),
            self.score_processors,
            replace(engine.settings, do_sample=member.do_sample),
            engine.scheduler,
            Record(GenerationConfig(), 1, []),
        )
        self.stats = engine.stats

    def join(self, others: Sequence[_RequestLoop]) -> None:
        """Takes in the requests of other loops, between rounds."""
        for other in others:
            self.members.update(other.members)
        self.session.join([other.session for other in others])
        self.drafts.join([other.drafts for other in others])
        self.active = [row for loop in (self, *others) for row in loop.active]

    def round(self) -> None:
        self.drafts.do_sample = self.score_processors.samples = any(
            member.do_sample for member in self.members.values()
        )
        super().round()
        for row in set(self.members).difference(self.active):
            del self.members[row]

    def _judge(self, proposal: Proposal, lengths: list[int], scores: torch.Tensor) -> Verdict:
        verdict = super()._judge(proposal, lengths, scores)
        # The greedy rule takes NaN for the largest score.
        deciding = scores[torch.arange(len(lengths), device=scores.device), verdict.accepted]
        return replace(verdict, next_ids=verdict.next_ids.masked_fill(deciding.isnan().any(dim=-1), -1))


class SpeculativeEngine:
    """Generates for many requests at once.

    A new request takes a row as soon as one is free. Greedy requests give what `generate` gives for their prompt
    alone, sampled ones have the target's law, whatever runs beside them; where one fails, the others go on. Between
    rounds, requests are taken from the queue in the order in which they came.

    An engine has a thread that decodes while there is work. Without one (`threaded=False`), `step` does the work, and
    so does whatever waits: `Request.result`, iterating over a request, `submit` with a full queue, `generate` and
    `close`. Only one thread may then use the engine.

    As a context manager the engine is closed at the end: after the requests that it has, or, after an exception,
    without them.

    Args:
        target: the model whose text this is. No other call may run it meanwhile.
        drafter: a drafter made for `target`; `None` for plain decoding in the same loop.
        max_batch: most requests that are decoded at once.
        max_queue: most requests that wait for a row.
        threaded: whether a thread does the work.
        options: options of `generate` for every request, and `dspark_*` options, which hold for the whole engine:
            budgets and schedulers go over all active requests.

    Attributes:
        stats: statistics since the engine was made.

    Raises:
        TypeError: for a drafter that is none, or a number of another type.
        ValueError: for a drafter of another target, or a `dspark_*` option out of range.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None,
        max_batch: int = 8,
        max_queue: int = 64,
        threaded: bool = True,
        **options: Any,
    ) -> None:
        drafter = without_adapters(drafter)
        self.target, self.drafter = target, drafter
        self.max_batch, self.max_queue = _at_least_one("max_batch", max_batch), _at_least_one("max_queue", max_queue)
        choices = {name: options.pop(name) for name in GENERATION_OPTIONS if name in options}
        self.settings, self.scheduler = _resolve(target, drafter, choices)
        self.stats = EngineStats()
        self._options = options
        self._numbers = count()
        self._queue: deque[_Member] = deque()
        self._open: dict[int, Request] = {}
        self._loop: _RequestLoop | None = None
        self._closed = False
        # Guards all that is shared with other threads.
        self._lock = threading.RLock()
        # The queue, or whether the engine is closed.
        self._changed = threading.Condition(self._lock)
        # Guards the loop: held while a step runs.
        self._stepping = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True) if threaded else None
        if self._thread is not None:
            # A thread that is still in torch when the interpreter goes down would abort the process.
            atexit.register(self.close, cancel=True)
            self._thread.start()

    # --- requests --------------------------------------------------------------------------------------------------

    def submit(
        self, input_ids: torch.Tensor | Sequence[int], *, timeout: float | None = None, **options: Any
    ) -> Request:
        """Puts a prompt into the queue; waits while that is full.

        Args:
            input_ids: the prompt, a list of ids or a tensor `(length,)` or `(1, length)`.
            timeout: seconds to wait at most.
            options: options of `generate`, which go before those of the engine. Processors are copied for the
                request; criteria are not, so those that remember something belong to one request each. `max_time`
                counts from here.

        Raises:
            queue.Full: where the queue is full for longer than `timeout`.
            ValueError, TypeError: for a prompt or options that cannot be served.
            RuntimeError: where the engine is closed.
        """
        member = self._prepare(input_ids, options)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._closed:
                    raise RuntimeError("The engine is closed. Make a new one to submit further prompts.")
                if len(self._queue) < self.max_queue:
                    self._queue.append(member)
                    self._open[member.request.number] = member.request
                    self._changed.notify_all()
                    return member.request
            left = None if end is None else end - time.monotonic()
            if not self._wait_for(self._changed, lambda: self._closed or len(self._queue) < self.max_queue, left):
                raise Full(
                    f"{self.max_queue} requests have been waiting for {timeout} seconds. Submit again later, or make "
                    "the engine with a larger `max_queue`."
                )

    def generate(self, prompts: Sequence[torch.Tensor | Sequence[int]], **options: Any) -> list[list[int]]:
        """New token ids for each of `prompts`, in their order; arguments as for `submit`, errors too.

        Where one request fails, those after it are cancelled.
        """
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.submit(prompt, **options))
            return [request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel()

    def _prepare(self, input_ids: torch.Tensor | Sequence[int], options: dict[str, Any]) -> _Member:
        options = {**self._options, **options}
        for name, reason in _NOT_FOR_REQUESTS.items():
            if options.get(name) is not None:
                raise ValueError(f"`{name}` is not an option of a request: {reason}.")
        ids = _one_prompt(input_ids)
        size = self.target.config.get_text_config(decoder=True).vocab_size
        least, most = int(ids.min()), int(ids.max())
        if not 0 <= least <= most < size:
            raise ValueError(f"`input_ids` goes from {least} to {most}; the target's tokens are 0 to {size - 1}.")
        call = _prepare_call(self.target, ids.to(self.target.device), options)
        call.check(self.target)
        if self.drafter is not None:
            warn_on_other_template(call.input_ids, self.drafter)
        # The embeddings, which cost nothing, stand for captured states that nobody needs.
        layers = [-1] if self.drafter is None else self.drafter.config.target_layer_ids
        rows = Rows(call.input_ids, call.config, call.criteria)
        return _Member(
            Request(self, next(self._numbers)),
            rows,
            RowProcessors(LogitsProcessorList(map(copy_processor, call.processors)), rows),
            TargetSession(self.target, layers, call.model_kwargs, joins=self.max_batch > 1),
            bool(call.config.do_sample),
        )

    def _deliver(self, request: Request, tokens: list[int], ended: bool) -> None:
        """Hands new tokens to an open request."""
        with self._lock:
            if not request._done:
                request._tokens += tokens
                request._grew.notify_all()
        if ended:
            self._end(request)

    def _end(self, request: Request, error: BaseException | None = None) -> bool:
        """Ends a request, with `error` if there is one; false where it had ended before."""
        with self._lock:
            if request._done:
                return False
            request._done, request._error = True, error
            self._open.pop(request.number, None)
            self._queue = deque(member for member in self._queue if not member.request._done)
            for change in (request._grew, request._ended, self._changed):
                change.notify_all()
            return True

    def _wait_for(
        self, change: threading.Condition, condition: Callable[[], bool], timeout: float | None = None
    ) -> bool:
        """Waits until `condition` holds, which a `change` may bring; false after `timeout` seconds.

        Without a thread by taking steps.
        """
        if self._thread is not None:
            with change:
                return change.wait_for(condition, timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while not condition():
            if end is not None and time.monotonic() >= end:
                return False
            self.step()
        return True

    # --- work ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> bool:
        """Lets waiting requests join and runs one round over all active ones; returns whether there is more to do.

        Errors go to the requests: one of a request's own to it alone, one of the pass that all share to all of them.
        """
        with self._stepping:
            start = time.perf_counter()
            try:
                self._admit()
                if self._loop is not None:
                    self._loop.round()
            except BaseException as error:
                self._fail_active(error)
                if not isinstance(error, Exception):
                    raise
            if self._loop is not None and all(member.request.done for member in self._loop.members.values()):
                self._loop = None
            self.stats.total_seconds += time.perf_counter() - start
        return self._has_work()

    def _has_work(self) -> bool:
        return self._loop is not None or bool(self._queue)

    def _admit(self) -> None:
        """Gives free rows to waiting requests. Not without end, where each ends with its first token."""
        loops = [] if self._loop is None else [self._loop]
        known = len(loops)
        try:
            for _ in range(self.max_batch):
                member = self._next(self.max_batch - sum(len(loop.active) for loop in loops))
                if member is None:
                    break
                loop = self._prefill(member)
                if loop.active:
                    loops.append(loop)
        finally:
            # All at once, as the whole cache is written anew.
            if len(loops) > known:
                self._loop = loops[0]
                self._loop.join(loops[1:])

    def _next(self, free: int) -> _Member | None:
        """The next request from the queue, if there is one and a row is free for it."""
        with self._lock:
            if not self._queue or free < 1:
                return None
            self._changed.notify_all()
            return self._queue.popleft()

    def _prefill(self, member: _Member) -> _RequestLoop:
        """A loop of its own for a request, which has its first token; without active rows if it has ended."""
        self.stats.batch += 1
        loop = _RequestLoop(self, member)
        try:
            loop.prefill(member.rows.buffer)
        except BaseException as error:
            member.fail(error)
            loop.active = []
            if not isinstance(error, Exception):
                raise
        return loop

    def _fail_active(self, error: BaseException) -> None:
        if self._loop is not None:
            for member in self._loop.members.values():
                member.fail(error)

    def _run(self) -> None:
        """What the thread does."""
        try:
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._closed or self._has_work())
                    if not self._has_work():
                        return
                self.step()
        finally:
            # Nothing is left, unless what is no `Exception` ended the thread.
            with self._lock:
                self._closed = True
                for request in list(self._open.values()):
                    self._end(request, RuntimeError("The engine's thread has ended. Make a new engine."))

    def close(self, cancel: bool = False) -> None:
        """Takes no further requests and waits for those that it has; safe to call again.

        Args:
            cancel: whether to cancel them instead.
        """
        with self._lock:
            self._closed = True
            for request in list(self._open.values()) if cancel else []:
                request.cancel()
            self._changed.notify_all()
        if self._thread is None:
            while self.step():
                pass
        elif self._thread is not threading.current_thread():
            self._thread.join()
            atexit.unregister(self.close)
        if self.drafter is not None:
            warn_on_collapse(self.stats, self.drafter)

    def __enter__(self) -> SpeculativeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` is {value!r}; give a whole number, at least 1.")
    if value < 1:
        raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    return value


def _resolve(
    target: PreTrainedModel, drafter: Drafter | None, choices: dict[str, Any]
) -> tuple[DecodingSettings, Scheduler]:
    """Settings and scheduler of an engine, whose drafter is bound to the target."""
    if drafter is None:
        for name, value in choices.items():
            if value is not None:
                raise ValueError(f"`{name}` is {value!r}, but without a drafter nothing is drafted. Leave it out.")
        return DecodingSettings(0, 0.0, None, None, do_sample=False), Plain()
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"`drafter` is a {type(drafter).__name__}; give a drafter, such as a `DSparkDrafter`, or `None`."
        )
    drafter.bind_target(target)
    settings = resolve_settings(drafter, target.generation_config, choices)
    return settings, resolve_scheduler(settings.scheduler, target, drafter, settings.is_limited)


def _one_prompt(input_ids: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """`(1, length)`."""
    try:
        ids = torch.as_tensor(input_ids)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"`input_ids` is a {type(input_ids).__name__}; give the token ids of one prompt, such as "
            "`tokenizer(text).input_ids`."
        ) from error
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(
            f"`input_ids` has shape {tuple(torch.as_tensor(input_ids).shape)}; give one prompt of at least one token, "
            "a list of ids or a tensor (length,) or (1, length). For several, see `generate`."
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"`input_ids` has the dtype {ids.dtype}; give token ids, which are whole numbers.")
    return ids.long()


@dataclass
class _Call:
    """What `generate` hands to a decoding method."""

    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]

    def check(self, target: PreTrainedModel) -> None:
        """Raises `ValueError` for what an engine cannot serve."""
        check_call(target, self.input_ids, self.processors, self.config, self.model_kwargs, joins=True)
        check_options(self.config)
        if (self.config.num_return_sequences or 1) > 1:
            raise ValueError(
                f"`num_return_sequences` is {self.config.num_return_sequences}; a request has one. Submit the prompt "
                "as often as you need it."
            )
        if self.config.return_dict_in_generate:
            raise ValueError("`return_dict_in_generate` is true, but a request gives token ids only. Set it to false.")
        if self.config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"`cache_implementation` is {self.config.cache_implementation!r}; rows join and leave the cache of "
                "an engine, which has to be dynamic. Leave it out."
            )
        given = {name for name, value in self.model_kwargs.items() if value is not None and value is not False}
        if unknown := sorted(given - _KNOWN_INPUTS):
            raise ValueError(
                f"A request is text, and gives ids only; the engine cannot serve {unknown}. Leave it out."
            )


def _prepare_call(target: PreTrainedModel, input_ids: torch.Tensor, options: dict[str, Any]) -> _Call:
    """Lets `generate` prepare a call for `input_ids (1, length)`."""
    # `generate` does not look for a tokenizer where it is given a decoding method.
    tokenizer, strings = options.pop("tokenizer", None), options.pop("stop_strings", None)
    if strings is not None:
        criteria = StoppingCriteriaList(options.pop("stopping_criteria", None) or [])
        options["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])
    calls = []

    def keep(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        calls.append(_Call(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs))
        return input_ids

    target.generate(input_ids, custom_generate=keep, **options)
    return calls[0]


__all__ = ["Request", "SpeculativeEngine"]
