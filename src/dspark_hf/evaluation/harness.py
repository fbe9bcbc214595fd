"""Comparing drafters of one target on the same questions, in one run that can be broken off and gone on with.

For each task, temperature and batch size, questions are taken a batch at a time. Turn by turn, plain `generate` and
every variant (a drafter under one setting) answer the same prompts one after the other, beginning with another one
each time, so that whatever slows the machine down slows them all: a speed-up is a ratio within the run. The history of
a conversation is what plain `generate` answered, for all of them: the target's own words.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..data import template_options
from ..data.answers import Key
from ..data.journal import Journal, write_json
from ..data.prepare import config_fingerprint, describe_target
from ..generation.capacity import find_profile, target_identity
from ..generation.schedulers import SCHEDULER_NAMES, resolve_scheduler
from ..models import Drafter
from .acceptance import rounds_by_row
from .calibration import Observations, observe
from .comparison import TimedRun, repeated_share, timed_generate
from .report import build_report
from .tasks import Question, Task

JOURNAL = ".journal.jsonl"
"""Added to the report's name: where finished units are."""

PLAIN = "plain"

# Enough for every kernel to have run once, in a round that drafts.
_WARMUP_TOKENS = 8


@dataclass(frozen=True)
class EvaluationSettings:
    """How drafters are compared: every combination of the values that may be several.

    Args:
        temperatures: 0 for greedy decoding, sampled above.
        batch_sizes: questions that are answered at once.
        num_draft_tokens: most tokens drafted in a round; more than a drafter's block has are left out for it. Whole
            blocks if empty.
        thresholds: confidences below which a proposal is cut; 0 never cuts. Others are left out for drafters without
            a confidence head.
        schedulers: what decides how much is verified, see `dspark_scheduler`; others than `none` are left out in the
            same way.
        max_new_tokens: most tokens of an answer.
        top_k: sample from the k likeliest tokens; 0 for all.
        top_p: sample from the likeliest tokens with this total probability.
        chat: whether to use the chat template; for what a user says, where there is one, if unset.
        enable_thinking: given to the chat template; its own default if unset.
        confidence: whether to judge the confidences of drafters that have a confidence head, in further runs that are
            not timed.
        seed: from which each batch's is made.

    Raises:
        ValueError: for a value out of range, or given twice.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_sizes: tuple[int, ...] = (1,)
    num_draft_tokens: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = (0.0,)
    schedulers: tuple[str, ...] = ("none",)
    max_new_tokens: int = 512
    top_k: int = 0
    top_p: float = 1.0
    chat: bool | None = None
    enable_thinking: bool | None = None
    confidence: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperatures", "batch_sizes", "num_draft_tokens", "thresholds", "schedulers"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"`{name}` is {list(values)}; give each value once.")
            if not values and name != "num_draft_tokens":
                raise ValueError(f"`{name}` is empty; give at least one value.")
        for name in ("batch_sizes", "num_draft_tokens"):
            if any(value < 1 for value in getattr(self, name)):
                raise ValueError(f"`{name}` is {list(getattr(self, name))}; each must be at least 1.")
        if not all(0 <= value < math.inf for value in self.temperatures):
            raise ValueError(
                f"`temperatures` is {list(self.temperatures)}; each must be 0 for greedy decoding or "
                "a positive number."
            )
        if not all(0 <= value <= 1 for value in self.thresholds):
            raise ValueError(f"`thresholds` is {list(self.thresholds)}; each is a probability, from 0 to 1.")
        unknown = [name for name in self.schedulers if name not in SCHEDULER_NAMES]
        if unknown:
            raise ValueError(f"`schedulers` has {unknown[0]!r}; choose from {', '.join(SCHEDULER_NAMES)}.")
        if self.max_new_tokens < 2:
            raise ValueError(f"`max_new_tokens` is {self.max_new_tokens}; it must be at least 2, best 128 or more.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` is {self.top_k}; use 0 for all tokens or a positive number.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` is {self.top_p}; it is a probability above 0, 1 for all tokens.")

    def decoding(self, temperature: float) -> dict[str, Any]:
        """Options of `generate` for all runs."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": self.top_k, "top_p": self.top_p}
        return options


@dataclass(frozen=True)
class Variant:
    """A drafter under one setting.

    Attributes:
        drafter: its name.
        num_draft_tokens: most tokens drafted in a round; `None` where the drafter does not say what its block has.
        threshold: confidence below which a proposal is cut.
        scheduler: what decides how much is verified.
    """

    drafter: str
    num_draft_tokens: int | None
    threshold: float
    scheduler: str

    def options(self) -> dict[str, Any]:
        """Options of `generate` for runs with the drafter."""
        return {
            "dspark_num_draft_tokens": self.num_draft_tokens,
            "dspark_confidence_threshold": self.threshold,
            "dspark_scheduler": self.scheduler,
        }


@dataclass(frozen=True)
class Unit:
    """What is measured and written in one go.

    Attributes:
        number: of the unit, from 1.
        task: name of the task.
        temperature: see `EvaluationSettings`.
        batch_size: likewise.
        first: place of the first question in its task.
        questions: at most `batch_size`.
    """

    number: int
    task: str
    temperature: float
    batch_size: int
    first: int
    questions: tuple[Question, ...]


def evaluate_drafters(
    target: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    output: str | os.PathLike[str],
    settings: EvaluationSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compares drafters with plain `generate` and with each other.

    A finished batch of questions is written to `<output>.journal.jsonl` at once. The same call goes on after a break,
    even a kill, and gives the report that it would have given: the counts are the same, as every batch has a seed of
    its own, and the times are those that were taken. What was measured under other settings, with other models or
    questions, or on another machine, is refused and never mixed in.

    Args:
        target: the target.
        drafters: its drafters by the names that the report gives them.
        tokenizer: the target's.
        tasks: from `load_tasks`.
        output: the report, a JSON file; what it goes by lies beside it.
        settings: how to decode.
        progress: called with the numbers of questions that are done and of all, each counted once per temperature and
            batch size.

    Returns:
        The report, as written; see `build_report`.

    Raises:
        OSError: if a file cannot be read or written.
        ValueError: if there is no drafter or task, one does not fit the target, no question fits its context, a
            scheduler lacks what it needs, or `output` was made otherwise.
    """
    settings = settings or EvaluationSettings()
    evaluation = Evaluation(target, drafters, tokenizer, tasks, settings)
    path = Path(output)
    if path.is_dir():
        raise IsADirectoryError(f"`output` is {str(path)!r}, which is a folder; give a JSON file.")
    if path.exists() and not path.with_name(path.name + JOURNAL).exists():
        raise ValueError(
            f"`output` is {str(path)!r}, which exists and has no {path.name}{JOURNAL} beside it; give another file, "
            "or remove it."
        )
    total = sum(len(unit.questions) for unit in evaluation.units)
    done = 0
    with Journal(path, evaluation.manifest(), suffix=JOURNAL) as journal:
        for unit in evaluation.units:
            if progress is not None:
                progress(done, total)
            key = Key(unit.number, 0)
            if key not in journal.done:
                journal.add([{**key._asdict(), **evaluation.measure(unit)}])
            done += len(unit.questions)
        if progress is not None:
            progress(done, total)
        measured = sorted(journal.rows(), key=lambda row: row["source"])
        report = {**evaluation.facts(), **build_report(measured, [asdict(v) for v in evaluation.variants], drafters)}
        write_json(path, report)
    return report


class Evaluation:
    """The units of an evaluation and how one is measured; the arguments are those of `evaluate_drafters`.

    Attributes:
        variants: what is compared with plain `generate`.
        units: what is measured, in this order.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafters: Mapping[str, Drafter],
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[Task],
        settings: EvaluationSettings,
    ) -> None:
        for name, given in (("drafters", drafters), ("tasks", tasks)):
            if not given:
                raise ValueError(f"`{name}` is empty; give at least one.")
        self.target, self.drafters, self.tokenizer = target, dict(drafters), tokenizer
        self.tasks, self.settings = list(tasks), settings
        for drafter in self.drafters.values():
            drafter.check_target(target)
        self.variants = list(self._variants())
        for variant in self.variants:  # better said before a long run than in it
            resolve_scheduler(variant.scheduler, target, self.drafters[variant.drafter], variant.threshold > 0)
        self.context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._check_questions()
        self.units = list(self._units())
        self._is_warm: set[tuple[bool, int]] = set()

    def _variants(self) -> Iterator[Variant]:
        settings = self.settings
        for name, drafter in self.drafters.items():
            block = getattr(drafter.config, "block_size", None)
            counts: list[int | None] = [n for n in settings.num_draft_tokens if block is None or n <= block]
            if settings.num_draft_tokens and not counts:
                raise ValueError(
                    f"`num_draft_tokens` is {list(settings.num_draft_tokens)}, and the drafter {name!r} drafts at "
                    f"most {block} tokens; give at least one number up to that."
                )
            thresholds, schedulers = self._cuts(name, drafter)
            for count, threshold, scheduler in itertools.product(counts or [block], thresholds, schedulers):
                yield Variant(name, count, threshold, scheduler)

    def _cuts(self, name: str, drafter: Drafter) -> tuple[Sequence[float], Sequence[str]]:
        """The thresholds and schedulers for a drafter: those that need confidences are left out where it has none."""
        thresholds, schedulers = self.settings.thresholds, self.settings.schedulers
        if getattr(drafter, "confidence_head", None) is not None:
            return thresholds, schedulers
        without = [value for value in thresholds if value == 0], [entry for entry in schedulers if entry == "none"]
        for option, left, plain in zip(("thresholds", "schedulers"), without, ("0", "none"), strict=True):
            if not left:
                raise ValueError(
                    f"`{option}` is {list(getattr(self.settings, option))}, and the drafter {name!r} has no "
                    f"confidence head that it could go by; give {plain}, too."
                )
        return without

    def _units(self) -> Iterator[Unit]:
        settings, number = self.settings, itertools.count(1)
        for task, temperature, size in itertools.product(self.tasks, settings.temperatures, settings.batch_sizes):
            for first in range(0, len(task.questions), size):
                yield Unit(next(number), task.name, temperature, size, first, task.questions[first : first + size])

    def _check_questions(self) -> None:
        """Raises `ValueError` for a question without a token, and a task of which no question fits the context."""
        for task in self.tasks:
            prompts = [self.encode(question, ()) for question in task.questions]
            for question, prompt in zip(task.questions, prompts, strict=True):
                if not prompt:
                    raise ValueError(
                        f"The question {question.id!r} of the task {task.name!r} has no token for the target's "
                        "tokenizer; leave it out."
                    )
            if not any(map(self._has_room, prompts)):
                raise ValueError(
                    f"No question of the task {task.name!r} and an answer of `max_new_tokens` = "
                    f"{self.settings.max_new_tokens} fit the target's context of {self.context} tokens; set a smaller "
                    "one."
                )

    def _has_room(self, prompt: list[int]) -> bool:
        return self.context is None or len(prompt) + self.settings.max_new_tokens <= self.context

    # --- what was measured ---------------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        """All that a measurement depends on, as JSON reads it."""
        from ..training.state_manifest import weights_fingerprint  # brings `Trainer`, which only a long run is worth

        target = describe_target(self.target.config, self.tokenizer)
        found = {**target, "weights": weights_fingerprint(self.target)[:16]}
        for name, drafter in self.drafters.items():
            found[f"drafter {name}"] = f"{config_fingerprint(drafter.config)[:16]} {weights_fingerprint(drafter)[:16]}"
        for task in self.tasks:
            found[f"task {task.name}"] = f"{len(task.questions)} questions, {task.fingerprint}"
        if any(name != "none" for name in self.settings.schedulers):
            found["profiles"] = [self._profile(drafter) for drafter in self.drafters.values()]
        return {**found, **_settings(self.settings), **self._machine(), **_versions()}

    def _profile(self, drafter: Drafter) -> str | None:
        """Hash of what schedulers go by."""
        profile = find_profile(self.target, drafter)
        if profile is None:
            return None
        return hashlib.sha256(json.dumps(profile.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def _machine(self) -> dict[str, Any]:
        identity = target_identity(self.target)
        names = ("device_name", "devices", "threads", "dtype", "quantization", "attention")
        return {name: identity[name] for name in names}

    def facts(self) -> dict[str, Any]:
        """What the report says beside figures."""
        return {
            "target": self.target.config.name_or_path,
            "drafters": {name: _drafter_facts(drafter) for name, drafter in self.drafters.items()},
            "tasks": {
                task.name: {
                    "source": task.source,
                    "questions": len(task.questions),
                    "turns": sum(len(question.turns) for question in task.questions),
                }
                for task in self.tasks
            },
            "settings": _settings(self.settings),
            "machine": self._machine() | {"processors": os.cpu_count()},
            "versions": _versions(),
        }

    # --- prompts -------------------------------------------------------------------------------------------------

    def encode(self, question: Question, answers: Sequence[str]) -> list[int]:
        """The prompt of the turn that follows `answers`.

        Without a chat template, text is gone on from as it is, and each further turn follows an answer after a blank
        line.

        Raises:
            ValueError: if the chat template fails.
        """
        asked = question.turns[: len(answers) + 1]
        chat = self.settings.chat
        if chat is None:
            chat = bool(self.tokenizer.chat_template) and not question.is_text
        if not chat:
            said = [turn + answer for turn, answer in itertools.zip_longest(asked, answers, fillvalue="")]
            return list(self.tokenizer("\n\n".join(said), verbose=False)["input_ids"])
        messages = []
        for turn, answer in itertools.zip_longest(asked, answers):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template_options(self.settings.enable_thinking)
            )
        except TemplateError as error:
            raise ValueError(
                f"The target's chat template fails on the question {question.id!r} ({error}); leave the question out, "
                "or set `chat` to false."
            ) from error
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @property
    def _pad_id(self) -> int | None:
        """What fills up rows, the end of sequence where there is no token for it; `None` where rows never end."""
        config = self.target.generation_config
        ends = config.eos_token_id
        end = ends[0] if isinstance(ends, (list, tuple)) else ends
        return end if config.pad_token_id is None else config.pad_token_id

    def _batch(self, prompts: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, `(batch, length)`, padded on the left."""
        width = max(map(len, prompts))
        pad = self._pad_id or 0
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        return {"input_ids": ids.to(self.target.device), "attention_mask": mask.to(self.target.device)}

    # --- measuring -----------------------------------------------------------------------------------------------

    def measure(self, unit: Unit) -> dict[str, Any]:
        """One unit, turn by turn, as the journal keeps it.

        A conversation whose next prompt and answer do not fit the target's context ends there.
        """
        answers: list[list[str]] = [[] for _ in unit.questions]
        turns, left_out = [], 0
        for turn in range(max(len(question.turns) for question in unit.questions)):
            going = [
                row
                for row, question in enumerate(unit.questions)
                if len(answers[row]) == turn and turn < len(question.turns)
            ]
            prompts = {row: self.encode(unit.questions[row], answers[row]) for row in going}
            rows = [row for row in going if self._has_room(prompts[row])]
            left_out += len(going) - len(rows)
            if not rows:
                break
            measured, plain = self._measure_turn(unit, turn, [prompts[row] for row in rows])
            turns.append({"rows": rows, **measured})
            for row, text in zip(rows, plain.texts, strict=True):
                answers[row].append(self.tokenizer.decode(text, skip_special_tokens=True))
        return {
            "task": unit.task,
            "temperature": unit.temperature,
            "batch_size": unit.batch_size,
            "ids": [question.id for question in unit.questions],
            "left_out": left_out,
            "turns": turns,
        }

    def _measure_turn(self, unit: Unit, turn: int, prompts: list[list[int]]) -> tuple[dict[str, Any], TimedRun]:
        """What is kept of all runs over the same prompts, and the plain one."""
        batch = self._batch(prompts)
        ids = batch.pop("input_ids")
        # Named, as `generate` would say for each call what it pads with.
        options = {**batch, **self.settings.decoding(unit.temperature), "pad_token_id": self._pad_id}
        runs: dict[str, TimedRun] = {}
        names: list[str | int] = [PLAIN, *range(len(self.variants))]
        start = (unit.number + turn) % len(names)
        self._warm_up(unit, ids, options)
        seed = Key(unit.number, 0).seed(self.settings.seed, turn)
        for name in names[start:] + names[:start]:
            runs[str(name)] = self._generate(name, ids, seed, options)
        plain = runs[PLAIN]
        kept: dict[str, Any] = {"runs": {name: _kept(run, plain) for name, run in runs.items()}}
        if self.settings.confidence and unit.batch_size == self.settings.batch_sizes[0]:
            kept["confidence"] = dict(self._observe(ids, seed, options))
        return kept, plain

    def _generate(self, name: str | int, ids: torch.Tensor, seed: int, options: dict[str, Any]) -> TimedRun:
        if isinstance(name, str):
            return timed_generate(self.target, ids, seed=seed, **options)
        variant = self.variants[name]
        return timed_generate(
            self.target, ids, self.drafters[variant.drafter], seed=seed, **options, **variant.options()
        )

    def _observe(self, ids: torch.Tensor, seed: int, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """What the confidence heads said of whole blocks, in runs of their own: recording takes time."""
        for name, drafter in self.drafters.items():
            if getattr(drafter, "confidence_head", None) is None:
                continue
            torch.manual_seed(seed)
            parts = observe(self.target, drafter, ids, **options)
            if parts:
                found = Observations.join(parts)
                yield name, {"logits": np.round(found.logits, 4).tolist(), **_lists(found, "verified", "survived")}

    def _warm_up(self, unit: Unit, ids: torch.Tensor, options: dict[str, Any]) -> None:
        """Runs everything once that has not run in this process with so many rows."""
        kind = (unit.temperature > 0, ids.shape[0])
        if kind not in self._is_warm:
            for name in (PLAIN, *range(len(self.variants))):
                self._generate(name, ids, 0, {**options, "max_new_tokens": _WARMUP_TOKENS})
            self._is_warm.add(kind)


def _kept(run: TimedRun, plain: TimedRun) -> dict[str, Any]:
    """Of a run, what the report is made from."""
    kept: dict[str, Any] = {
        "seconds": run.seconds,
        "tokens": run.tokens,
        "repeated": [round(repeated_share(text), 4) for text in run.texts],
    }
    if run.stats is None:
        return kept
    totals = ("drafted", "draft_seconds", "verify_seconds", "seconds")
    return kept | {
        "same": [mine == theirs for mine, theirs in zip(run.texts, plain.texts, strict=True)],
        "prefill_seconds": run.stats.prefill_seconds,
        "rounds": run.stats.num_rounds,
        "totals": {name: run.stats.total(name) for name in totals},
        "rows": [_lists(rounds, "verified", "survived", "emitted") for rounds in rounds_by_row(run.stats, run.tokens)],
    }


def _lists(record: Any, *names: str) -> dict[str, list[int]]:
    return {name: getattr(record, name).tolist() for name in names}


def _settings(settings: EvaluationSettings) -> dict[str, Any]:
    """As JSON reads them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


def _drafter_facts(drafter: Drafter) -> dict[str, Any]:
    return {
        "name": drafter.config.name_or_path,
        "class": type(drafter).__name__,
        "block_size": getattr(drafter.config, "block_size", None),
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
    }


def _versions() -> dict[str, str]:
    return {"dspark_hf": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}


__all__ = ["Evaluation", "EvaluationSettings", "Unit", "Variant", "evaluate_drafters"]
