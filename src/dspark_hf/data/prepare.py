"""Training data in the target's own words: prompts in, answers of the target out."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..conversion.loading import check_location, load_language_model, load_tokenizer
from ..models import DSparkDrafter
from .answers import Answerer, Key
from .backends import Backend, BackendGone, Decoding, EngineBackend, RowFailed
from .journal import Journal
from .server import Server, ServerBackend
from .text import BadRow, _is_line, _read_lines, template_options

# Of a config, what says where it lies or how it was loaded.
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}

Outcome: TypeAlias = "list[dict[str, Any]] | RowFailed"


@dataclass
class PrepareReport:
    """What became of the prompts; a row is one answered sample of one of them.

    Args:
        rows: rows written.
        already_done: rows that were there from an earlier run.
        already_failed: rows that failed in an earlier run and were not tried again.
        failed: rows that failed, by reason.
        first_failed: where the first of them is, by reason: its line in the file or its row, counted from 1.
        tokens: tokens generated.
        seconds: how long it took.
    """

    rows: int = 0
    already_done: int = 0
    already_failed: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    first_failed: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0


def prepare_data(
    target: str | os.PathLike[str] | PreTrainedModel,
    prompts: str | os.PathLike[str] | Dataset,
    output: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter: DSparkDrafter | None = None,
    max_batch: int = 8,
    server: Server | None = None,
    decoding: Decoding | None = None,
    samples: int = 1,
    prompt_tokens: int = 64,
    enable_thinking: bool | None = None,
    seed: int = 0,
    retry_failed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PrepareReport:
    """Lets the target answer prompts, and writes what it says as rows for `train_drafter`.

    A prompt has one of these forms; further columns are ignored, but for an `id`, which is kept:

    - `{"messages": [{"role", "content"}, ...]}`: a chat. What the assistant says in it is replaced turn by turn, each
      answer following the new ones before it; a last message of the user is answered, too.
    - `{"turns": ["...", ...]}` and `{"prompt": "..."}`: what a user says. A `prompt` is gone on from as it is where
      the tokenizer has no chat template.
    - `{"text": "..."}`: gone on from as it is, from its first `prompt_tokens` tokens.

    Written are `input_ids`, as they were generated, and a `loss_mask`, which is 1 where the target spoke; beside them
    the `messages` or the `text`, the prompt's number (`source`, from 1), `sample` and `id`, `finish_reason` and
    `enable_thinking`. A chat whose template renders earlier answers in another way gives several lines, `part` 1 to
    `parts`.

    The output only grows, in any order. A run that was broken off, even killed, goes on with the same call: nothing
    is lost or written twice. `<output>.manifest.json` says what the rows were made with; rows that cannot be answered
    go to `<output>.failed.jsonl`. Let one process at a time write a file.

    Each answer has a seed made from `seed`, its prompt's number, sample and turn. A server keeps to it as far as it
    can, and so does this process with `max_batch=1`; rows that are decoded together here draw from one generator, and
    then a run that is resumed gives other samples, of the same distribution, than one that is not.

    Args:
        target: the model to draft for, or its name or path; with `server` its weights are not loaded.
        prompts: a JSON Lines file or a `Dataset`.
        output: the JSON Lines file to write or to go on with.
        tokenizer: the target's; loaded with the target if that is given by name.
        drafter: a drafter for the target, which makes decoding here faster and leaves its distribution as it is.
        max_batch: most rows that are decoded here at once.
        server: a server that answers in place of this process.
        decoding: how answers are decoded.
        samples: answers to each prompt.
        prompt_tokens: see above.
        enable_thinking: given to the chat template, where it has such a mode; its own default if unset.
        seed: see above.
        retry_failed: try again what failed in an earlier run.
        progress: called with the numbers of rows that are done and of all.

    Raises:
        OSError: if a model, a file or the server is not where it should be; also later, if the server goes away.
        ValueError: if an argument is out of range, or `output` has rows that were made otherwise.

    Example:
        ```python
        report = prepare_data(target, "prompts.jsonl", "train.jsonl", tokenizer=tokenizer, drafter=drafter)
        train_drafter(target, "train.jsonl", drafter, args, tokenizer=tokenizer)
        ```
    """
    start = time.perf_counter()
    decoding = decoding or Decoding()
    _check(samples, prompt_tokens, decoding, drafter, server)
    rows = prompts if isinstance(prompts, Dataset) else _read_lines(Path(prompts))
    target, tokenizer, config = _load(target, tokenizer, weights=server is None)
    if enable_thinking is not None and not tokenizer.chat_template:
        raise ValueError("`enable_thinking` is for a chat template, and the tokenizer has none; leave it out.")
    manifest = {
        **describe_target(config, tokenizer),
        "prompts": _hash_prompts(prompts),
        "prompt_tokens": prompt_tokens,
        "enable_thinking": enable_thinking,
        "decoding": asdict(decoding),
        "seed": seed,
    }
    with Journal(Path(output), manifest, retry_failed) as journal:
        backend: Backend
        if server is None:
            backend = EngineBackend(target, drafter, max_batch, decoding, Key(len(journal.done), 0).seed(seed))
        else:
            backend = ServerBackend(server, config.name_or_path, decoding)
        answerer = Answerer(
            backend,
            tokenizer,
            decoding.max_new_tokens,
            getattr(config.get_text_config(decoder=True), "max_position_embeddings", None),
            prompt_tokens,
            template_options(enable_thinking),
            seed,
        )
        report = _run(answerer, rows, samples, journal, progress or (lambda done, total: None))
    report.seconds = time.perf_counter() - start
    return report


def _check(
    samples: int, prompt_tokens: int, decoding: Decoding, drafter: DSparkDrafter | None, server: Server | None
) -> None:
    for name, value in (("samples", samples), ("prompt_tokens", prompt_tokens)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    if samples > 1 and decoding.temperature == 0:
        raise ValueError(f"`samples` is {samples}, but at `temperature` 0 all would be the same; leave it out.")
    if drafter is not None and server is not None:
        raise ValueError("`drafter` is for decoding in this process; leave it out with a `server`.")


def _load(
    target: Any, tokenizer: PreTrainedTokenizerBase | None, weights: bool
) -> tuple[Any, PreTrainedTokenizerBase, PreTrainedConfig]:
    """The target, as it is where its weights are not needed, its tokenizer and its config."""
    if isinstance(target, PreTrainedModel):
        if tokenizer is None:
            raise ValueError("`tokenizer` is missing; give the target's, or the target by its name.")
        return target, tokenizer, target.config
    check_location(target, "`target`")
    tokenizer = tokenizer or load_tokenizer(target)
    if not weights:
        return target, tokenizer, AutoConfig.from_pretrained(target)
    target = load_language_model(target, dtype="auto").eval()
    return target, tokenizer, target.config


# --- manifest --------------------------------------------------------------------------------------------------------


def describe_target(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What makes a target's text its own: hashes of its config, tokenizer and chat template."""
    return {
        "target": config.name_or_path,
        "config": config_fingerprint(config),
        "vocab_size": len(tokenizer),
        "tokenizer": _hash(tokenizer.get_vocab()),
        "chat_template": _hash(tokenizer.get_chat_template()) if tokenizer.chat_template else None,
    }


def config_fingerprint(config: PreTrainedConfig, left_out: Collection[str] = ()) -> str:
    """Hash of what `config` says of the model, and not of where it lies or how it was loaded.

    Args:
        config: of a target.
        left_out: further fields that do not matter.
    """
    names = _NOT_THE_MODEL.union(left_out)
    return _hash({name: value for name, value in config.to_diff_dict().items() if name not in names})


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _hash_prompts(prompts: str | os.PathLike[str] | Dataset) -> str:
    """Tells prompts apart: a file by its content, a dataset by its ends, as reading all of one takes long."""
    if isinstance(prompts, Dataset):
        ends = [prompts[0], prompts[len(prompts) - 1]] if len(prompts) else []
        return _hash([len(prompts), prompts.column_names, ends])
    found = hashlib.sha256()
    with open(prompts, "rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


# --- work ------------------------------------------------------------------------------------------------------------


def _run(
    answerer: Answerer, rows: Dataset, samples: int, journal: Journal, progress: Callable[[int, int], None]
) -> PrepareReport:
    """Has all rows answered that are not in the journal, and writes them there."""
    known = journal.done | journal.failed
    report = PrepareReport(already_done=len(journal.done), already_failed=len(journal.failed))
    done, total = len(known), len(rows) * samples
    jobs: dict[Future[Outcome], tuple[Key, dict[str, Any]]] = {}

    def collect(limit: int) -> None:
        """Writes what is finished, until no more than `limit` jobs are left."""
        nonlocal done
        while len(jobs) > limit:
            for future in wait(jobs, return_when=FIRST_COMPLETED).done:
                _write(future.result(), *jobs.pop(future), journal, report)
                done += 1
                progress(done, total)

    progress(done, total)
    # The backend goes first, so that an error ends what the workers wait for.
    with ThreadPoolExecutor(answerer.backend.workers) as executor, answerer.backend:
        try:
            for key, row in _keys(rows, samples):
                if key not in known:
                    jobs[executor.submit(_answer, answerer, key, row)] = key, row
                    collect(2 * answerer.backend.workers)
            collect(0)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return report


def _keys(rows: Dataset, samples: int) -> Iterator[tuple[Key, dict[str, Any]]]:
    for number, row in enumerate(rows, start=1):
        for sample in range(samples):
            yield Key(row["number"] if _is_line(row) else number, sample), row


def _answer(answerer: Answerer, key: Key, row: dict[str, Any]) -> Outcome:
    """A row's lines, or why there are none: hours into a run, no row may end it."""
    try:
        return answerer(key, row)
    except BackendGone:
        raise
    except RowFailed as error:
        return error
    except BadRow as error:
        return RowFailed(str(error))
    except Exception as error:
        return RowFailed(f"answering fails with {type(error).__name__}", str(error))


def _write(outcome: Outcome, key: Key, row: dict[str, Any], journal: Journal, report: PrepareReport) -> None:
    if not isinstance(outcome, RowFailed):
        journal.add(outcome)
        report.rows += 1
        report.tokens += sum(sum(part["loss_mask"]) for part in outcome)
        return
    place = f"{'line' if _is_line(row) else 'row'} {key.source}"
    journal.fail({**key._asdict(), "place": place, "reason": outcome.reason, "detail": outcome.detail})
    report.failed[outcome.reason] = report.failed.get(outcome.reason, 0) + 1
    report.first_failed.setdefault(outcome.reason, place)


__all__ = ["PrepareReport", "config_fingerprint", "describe_target", "prepare_data"]
