"""Training rows: text, prompts with responses, chats or token ids, turned into `input_ids` and `loss_mask`.

The loss mask says which tokens the target produced (or could have): anchors and labels are taken from these only.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Sequence, Value
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Tokens = tuple[list[int], list[int]]

_COLUMNS = {
    "input_ids": Sequence(Value("int32")),
    "loss_mask": Sequence(Value("int8")),
    "problem": Value("string"),
    "place": Value("string"),
    "is_chat": Value("bool"),
    "is_cut": Value("bool"),
}
"""A sequence, and what is to be reported of the row that it comes from."""

ROW_KINDS = "`input_ids`, `messages`, `prompt` with `response`, or `text`"


class BadRow(ValueError):
    """A row that cannot be trained on; its message is the reason that is counted.

    Args:
        reason: the same for all rows of its sort.
        detail: what is particular to this row; reported with the first one of its sort.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.detail = detail


@dataclass
class DataReport:
    """What became of the rows.

    Args:
        rows: rows read.
        chats: sequences kept that came from `messages`.
        examples: sequences kept; one row may give several where long ones are split.
        tokens: tokens of these sequences.
        trained_tokens: those in the loss mask.
        cut: rows that were longer than a sequence may be, and lost their ends.
        skipped: rows that were left out, by reason.
        first_skipped: where the first of them is, by reason: its line in the file or its row, counted from 1.
    """

    rows: int = 0
    chats: int = 0
    examples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    cut: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first_skipped: dict[str, str] = field(default_factory=dict)


def prepare_dataset(
    data: str | os.PathLike[str] | Dataset,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_length: int,
    vocab_size: int,
    split_long: bool = False,
    enable_thinking: bool | None = None,
    num_proc: int | None = None,
) -> tuple[Dataset, DataReport]:
    """Reads rows and turns them into sequences to train on.

    A row has one of these forms; further columns are ignored:

    - `{"input_ids": [...], "loss_mask": [...]}`: tokens as they are; all are trained on without a mask.
    - `{"messages": [{"role", "content"}, ...]}`: the tokenizer's chat template; trained on what the assistant says.
    - `{"prompt": "...", "response": "..."}`: joined without a template; trained on the response and its end.
    - `{"text": "..."}`: trained on all of it.

    Rows that are no good are counted by reason, reported in the log and left out; so are rows that lose their ends.

    Args:
        data: a JSON Lines file, or a `datasets.Dataset`.
        tokenizer: the target's; not needed where all rows hold token ids.
        max_length: longest sequence; what is beyond it is cut off.
        vocab_size: size of the target's vocabulary.
        split_long: cut long rows into several sequences instead of dropping their ends.
        enable_thinking: given to the chat template, where it has such a mode; its own default if unset.
        num_proc: processes to tokenise with.

    Returns:
        A dataset with the columns `input_ids` and `loss_mask`, and a report.

    Raises:
        OSError: if the file does not exist or cannot be read.
        ValueError: if no row is left, the tokenizer has more tokens than the target, or there is no chat template that
            `enable_thinking` could be given to.
    """
    _check_tokenizer(tokenizer, vocab_size)
    if enable_thinking is not None and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("`enable_thinking` is for a chat template, and the tokenizer has none; leave it out.")
    dataset = _read_lines(Path(data)) if isinstance(data, (str, os.PathLike)) else data
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"`data` is a {type(dataset).__name__}; give the path of a JSON Lines file or a `datasets.Dataset`."
        )
    report = DataReport(rows=len(dataset))
    if not report.rows:
        raise _nothing_left(report, data)
    prepared = dataset.map(
        _RowMapper(tokenizer, max_length, vocab_size, split_long, template_options(enable_thinking)),
        with_indices=True,
        batched=True,
        batch_size=64,
        remove_columns=dataset.column_names,
        features=Features(_COLUMNS),
        num_proc=num_proc,
        desc="Tokenising",
    )
    problems = prepared["problem"][:]
    for problem, place in zip(problems, prepared["place"][:], strict=True):
        if problem:
            report.skipped[problem] = report.skipped.get(problem, 0) + 1
            report.first_skipped.setdefault(problem, place)
    report.chats = sum(prepared["is_chat"][:])
    report.cut = sum(prepared["is_cut"][:])
    prepared = prepared.select_columns(["input_ids", "loss_mask"])
    if report.skipped:
        prepared = prepared.select([index for index, problem in enumerate(problems) if not problem])
        logger.warning("Left out %d of %d rows: %s.", sum(report.skipped.values()), report.rows, _reasons(report))
    if not len(prepared):
        raise _nothing_left(report, data)
    if report.cut:
        logger.warning("Cut the ends of %d of %d rows, longer than %d tokens.", report.cut, report.rows, max_length)
    _count(prepared, report)
    return prepared, report


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
    """Raises `ValueError` for a tokenizer that is certainly of another model.

    Tokens that were added to it are not counted: some models have no place for theirs, and never see them.
    """
    own = getattr(tokenizer, "vocab_size", None) or 0
    if own > vocab_size:
        raise ValueError(
            f"The tokenizer has {own} tokens and the target only {vocab_size}: it belongs to another model. Give the "
            "target's own."
        )


def _nothing_left(report: DataReport, data: str | os.PathLike[str] | Dataset) -> ValueError:
    place = "the data" if isinstance(data, Dataset) else f"the file {os.fspath(data)!r}"
    if not report.rows:
        return ValueError(f"`data` has no rows: {place} is empty. A row needs {ROW_KINDS}.")
    return ValueError(
        f"None of the {report.rows} rows of {place} can be trained on: {_reasons(report)}. A row needs {ROW_KINDS}, "
        "in UTF-8."
    )


def _reasons(report: DataReport) -> str:
    reasons = [
        f"{count} × {reason} (first: {report.first_skipped[reason]})" for reason, count in report.skipped.items()
    ]
    return ", ".join(reasons)


def _count(dataset: Dataset, report: DataReport) -> None:
    report.examples = len(dataset)
    for batch in dataset.iter(batch_size=1024):
        report.tokens += sum(map(len, batch["input_ids"]))
        report.trained_tokens += sum(map(sum, batch["loss_mask"]))
    logger.info("%d sequences, %d tokens, %d trained on.", report.examples, report.tokens, report.trained_tokens)


def _read_lines(path: Path) -> Dataset:
    """Lines of a file, unparsed: Arrow would refuse the whole file for one line of another form."""
    if path.is_dir():
        raise IsADirectoryError(f"The data file {str(path)!r} is a folder; give a JSON Lines file.")
    if not path.is_file():
        raise FileNotFoundError(f"The data file {str(path)!r} does not exist.")
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ValueError(f"The data file {str(path)!r} is UTF-16; save it as UTF-8.")
    if next(_lines(str(path)), None) is None:
        return Dataset.from_dict({"number": [], "line": []})  # the builder below refuses to build nothing
    stat = path.stat()
    # Size and time are part of the arguments so that a changed file is not taken from the cache.
    arguments = {"path": str(path), "stamp": f"{stat.st_size}-{stat.st_mtime_ns}"}
    features = Features({"number": Value("int64"), "line": Value("large_binary")})
    dataset = Dataset.from_generator(_lines, features=features, gen_kwargs=arguments)
    if not isinstance(dataset, Dataset):
        raise ValueError(f"The data file {str(path)!r} cannot be read as lines of text.")
    return dataset


def _lines(path: str, stamp: str = "") -> Iterator[dict[str, Any]]:
    """Lines as bytes, so that one that is not UTF-8 can be told from the others."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield {"number": number, "line": line}


def frequent_tokens(dataset: Dataset, count: int, vocab_size: int, always: Iterable[int] = ()) -> list[int]:
    """The tokens that are trained on most often, in rising order.

    Where fewer occur than are asked for the lowest others fill up, as the padding of a vocabulary is at its end.

    Args:
        dataset: from `prepare_dataset`.
        count: how many.
        vocab_size: size of the target's vocabulary.
        always: tokens that are among them however rare they are, such as the ends of a sequence.

    Raises:
        ValueError: if there are not so many tokens, or more that are always wanted.
    """
    wanted = sorted(set(always))
    if not max(1, len(wanted)) <= count <= vocab_size:
        raise ValueError(
            f"`draft_vocab_size` is {count}; it must be from {max(1, len(wanted))} (the ends of a sequence) to "
            f"{vocab_size}, the target's vocabulary."
        )
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for batch in dataset.iter(batch_size=1024):
        ids, mask = (torch.tensor(list(chain.from_iterable(batch[name]))) for name in ("input_ids", "loss_mask"))
        counts += ids[mask.bool()].bincount(minlength=vocab_size)
    counts[wanted] = torch.iinfo(torch.long).max
    chosen: list[int] = counts.argsort(descending=True, stable=True)[:count].sort().values.tolist()
    return chosen


# --- one row ---------------------------------------------------------------------------------------------------------


@dataclass
class _RowMapper:
    """Turns a batch of rows into a batch of sequences, with the problem of those that are no good."""

    tokenizer: PreTrainedTokenizerBase | None
    max_length: int
    vocab_size: int
    split_long: bool
    template_options: dict[str, Any]

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        output: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for index, *values in zip(indices, *batch.values(), strict=True):
            row = dict(zip(batch, values, strict=True))
            place = f"line {row['number']}" if _is_line(row) else f"row {index + 1}"
            is_chat = is_cut = False
            try:
                row = _parse(row)
                (sequences, is_cut), problem = self._sequences(row), ""
                is_chat = "messages" in row
            except BadRow as error:
                sequences, problem = [([], [])], str(error)
                place = f"{place}, {error.detail}" if error.detail else place
            for input_ids, loss_mask in sequences:
                output["input_ids"].append(input_ids)
                output["loss_mask"].append(loss_mask)
                output["problem"].append(problem)
                output["place"].append(place)
                output["is_chat"].append(is_chat)
                output["is_cut"].append(is_cut)
        return output

    def _sequences(self, row: dict[str, Any]) -> tuple[list[Tokens], bool]:
        """The sequences of one row, and whether its end is lost; raises `BadRow` where there are none."""
        input_ids, loss_mask = tokenize_row(row, self.tokenizer, self.template_options)
        if not input_ids:
            raise BadRow("empty row")
        outside = next((token for token in input_ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise BadRow(f"token ids outside the target's vocabulary of {self.vocab_size}", f"token id {outside}")
        length = self.max_length
        starts = range(0, len(input_ids), length) if self.split_long else [0]
        windows = [(input_ids[start : start + length], loss_mask[start : start + length]) for start in starts]
        windows = [(ids, mask) for ids, mask in windows if _is_trainable(mask)]
        if not windows:
            raise BadRow(f"no two successive tokens to train on within {length} tokens")
        return windows, len(input_ids) > length and not self.split_long


def _is_trainable(loss_mask: list[int]) -> bool:
    """Whether there is an anchor: two successive tokens in the mask."""
    return any(first and second for first, second in zip(loss_mask, loss_mask[1:], strict=False))


def _is_line(row: dict[str, Any]) -> bool:
    """Whether this is a line of a file, not yet parsed."""
    return row.keys() == {"number", "line"}


def _parse(row: dict[str, Any]) -> dict[str, Any]:
    """The row without unset columns; a line of a file is parsed."""
    if _is_line(row):
        try:
            row = json.loads(row["line"].decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise BadRow("line is not UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise BadRow("line is not JSON") from error
        if not isinstance(row, dict):
            raise BadRow("line is not a JSON object")
    return {name: value for name, value in row.items() if value is not None}


def tokenize_row(
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    template_options: dict[str, Any] | None = None,
) -> Tokens:
    """`input_ids` and `loss_mask` of a row of any form; see `prepare_dataset`. Options are the chat template's.

    Raises:
        BadRow: if the row has no known form or a value of a wrong type.
    """
    if "input_ids" in row:
        return _from_ids(row)
    for column, convert in _CONVERTERS.items():
        if column in row:
            if tokenizer is None:
                raise BadRow(f"`{column}` needs a tokenizer and none was given")
            return convert(row, tokenizer, template_options or {})
    raise BadRow(f"none of the columns {ROW_KINDS}")


def _from_ids(row: dict[str, Any]) -> Tokens:
    input_ids = row["input_ids"]
    if not isinstance(input_ids, list) or not all(type(token) is int for token in input_ids):
        raise BadRow("`input_ids` is not a list of integers")
    loss_mask = row.get("loss_mask", [1] * len(input_ids))
    if not isinstance(loss_mask, list) or not all(value in (0, 1) for value in loss_mask):
        raise BadRow("`loss_mask` is not a list of 0 and 1")
    if len(loss_mask) != len(input_ids):
        raise BadRow("`loss_mask` and `input_ids` differ in length")
    return input_ids, [int(value) for value in loss_mask]


def _from_text(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, _: dict[str, Any]) -> Tokens:
    input_ids = _encode(tokenizer, _string(row, "text"))
    return input_ids, [1] * len(input_ids)


def _from_prompt(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, _: dict[str, Any]) -> Tokens:
    prompt = _encode(tokenizer, _string(row, "prompt"))
    response = _encode(tokenizer, _string(row, "response"), add_special_tokens=False)
    if not response:
        raise BadRow("empty `response`")
    if tokenizer.eos_token_id is not None and response[-1] != tokenizer.eos_token_id:
        response = [*response, tokenizer.eos_token_id]
    return prompt + response, [0] * len(prompt) + [1] * len(response)


def _from_messages(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> Tokens:
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRow("`messages` is not a list of objects")
    messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
    if not all(isinstance(message.get("role"), str) for message in messages):
        raise BadRow("a message without a `role`")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no message of the assistant in `messages`")
    for message in messages:
        _check_unicode(message.get("content"), "messages")
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    if not template:
        raise BadRow("`messages` needs a chat template and the tokenizer has none")
    try:
        if "{% generation" in template or "{%- generation" in template:
            return _from_marked_template(messages, tokenizer, options)
        return _from_rendered_prefixes(messages, tokenizer, options)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadRow(f"the chat template fails with {type(error).__name__}") from error


def _from_marked_template(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> Tokens:
    """A template that marks what the assistant generates."""
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    return list(encoded["input_ids"]), list(encoded["assistant_masks"])


def _from_rendered_prefixes(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> Tokens:
    """A template without marks: the assistant's part is what a message adds to the conversation before it.

    A template may render an earlier message in another way once others follow (thinking is dropped, say). Such a
    message is not what the target would have produced there, so it is not trained on.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True, **options)
        after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False, **options)
        if text.startswith(after) and after.startswith(before):
            spans.append((len(before), len(after)))
    pieces, end = [], 0
    for start, stop in spans:
        pieces += [(text[end:start], 0), (text[start:stop], 1)]
        end = stop
    # Cut at the spans' ends, where generation starts and stops, so that no token lies across them.
    input_ids, loss_mask = [], []
    for piece, value in [*pieces, (text[end:], 0)]:
        tokens = _encode(tokenizer, piece, add_special_tokens=False)
        input_ids += tokens
        loss_mask += [value] * len(tokens)
    return input_ids, loss_mask


def template_options(enable_thinking: bool | None) -> dict[str, Any]:
    """Options of a chat template: its thinking mode, where one is chosen."""
    return {} if enable_thinking is None else {"enable_thinking": enable_thinking}


def generation_prompt(tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None = None) -> list[int]:
    """The tokens with which the chat template asks for an answer; they tell templates and thinking modes apart.

    Empty where the template fails or adds nothing.
    """
    options, messages = template_options(enable_thinking), [{"role": "user", "content": "?"}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        asking = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, ValueError):
        return []
    return _encode(tokenizer, asking[len(text) :], add_special_tokens=False) if asking.startswith(text) else []


_CONVERTERS: dict[str, Callable[[dict[str, Any], PreTrainedTokenizerBase, dict[str, Any]], Tokens]] = {
    "messages": _from_messages,
    "response": _from_prompt,
    "text": _from_text,
}


def _string(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise BadRow(f"`{column}` is not a string")
    _check_unicode(value, column)
    return value


def _check_unicode(value: Any, column: str) -> None:
    """Raises `BadRow` for half of a surrogate pair, which JSON lets through and tokenizers do not."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"`{column}` is not valid Unicode") from error


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    # `verbose` warns of texts longer than the model, which are cut here anyway.
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]) if text else []


# --- batches ---------------------------------------------------------------------------------------------------------


@dataclass
class DrafterCollator:
    """Pads rows on the right, to the longest.

    Args:
        pad_token_id: what to pad with; masked everywhere, so any token of the vocabulary will do.
    """

    pad_token_id: int = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Rows with `input_ids` and `loss_mask` to tensors `(batch, seq)`, with `attention_mask`."""
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        width = int(lengths.max())
        batch = {
            "input_ids": torch.full((len(rows), width), self.pad_token_id),
            "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
            "loss_mask": torch.zeros(len(rows), width, dtype=torch.long),
        }
        for index, row in enumerate(rows):
            for name in ("input_ids", "loss_mask"):
                batch[name][index, : lengths[index]] = torch.as_tensor(row[name])
        return batch


__all__ = [
    "BadRow",
    "DataReport",
    "DrafterCollator",
    "frequent_tokens",
    "generation_prompt",
    "prepare_dataset",
    "template_options",
    "tokenize_row",
]
