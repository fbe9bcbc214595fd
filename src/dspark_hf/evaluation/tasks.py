"""What drafters are compared on: benchmarks of the Hub, files of prompts, the embedded pair's held-out prompts."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..embedded import load_prompts


@dataclass(frozen=True)
class Question:
    """One conversation.

    Attributes:
        id: its name.
        turns: what the user says, turn by turn.
        is_text: whether it is text to go on from as it is, rather than what a user says.
    """

    id: str
    turns: tuple[str, ...]
    is_text: bool = False


@dataclass(frozen=True)
class Task:
    """A set of questions.

    Attributes:
        name: its name.
        questions: at least one.
        source: where they are from.
    """

    name: str
    questions: tuple[Question, ...]
    source: str

    @property
    def fingerprint(self) -> str:
        """Hash of all questions."""
        text = json.dumps([asdict(question) for question in self.questions])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class HubSource:
    """Where `datasets` finds a benchmark, and how a row becomes a question.

    Attributes:
        path: the dataset, or `json` for `files`.
        subset: its configuration, where it has several.
        split: which part.
        column: a text, or a list of turns.
        template: `{}` stands for the text.
        appendix: a further column, and how it follows the text in the rows that have it.
        files: addresses of JSON Lines files, read row by row.
    """

    path: str
    subset: str | None
    split: str
    column: str
    template: str = "{}"
    appendix: tuple[str, str] | None = None
    files: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """What it is called."""
        return ", ".join(self.files) or self.path

    def question(self, row: dict[str, Any], name: str) -> Question:
        """The question of a row.

        Raises:
            ValueError: if it has another form.
        """
        value = row.get(self.column)
        turns = value if isinstance(value, (list, tuple)) else [value]
        if not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(
                f"A row of {self.place} has {value!r:.60} as `{self.column}`, which is neither a text nor a list of "
                "texts: it is not as it was. Give `prompts`."
            )
        first, *others = map(str, turns)
        if self.appendix is not None and row.get(self.appendix[0]):
            first += self.appendix[1].format(row[self.appendix[0]])
        return Question(name, (self.template.format(first), *others))


_MATH = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
_PROGRAM = "{}\n\nAnswer with a Python program in a block of code, and with nothing else."

HUB_TASKS: dict[str, HubSource] = {
    "gsm8k": HubSource("openai/gsm8k", "main", "test", "question", _MATH),
    "math500": HubSource("HuggingFaceH4/MATH-500", None, "test", "problem", _MATH),
    "aime25": HubSource("math-ai/aime25", None, "test", "problem", _MATH),
    "mbpp": HubSource("google-research-datasets/mbpp", "sanitized", "test", "prompt"),
    "humaneval": HubSource("openai/openai_humaneval", None, "test", "prompt", _CODE),
    "livecodebench": HubSource(
        "json",
        None,
        "train",
        "question_content",
        _PROGRAM,
        ("starter_code", "\n\nUse this code:\n```python\n{}\n```"),
        tuple(f"hf://datasets/livecodebench/code_generation_lite/{name}.jsonl" for name in ("test", "test2")),
    ),
    "mt-bench": HubSource("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
    "alpaca": HubSource("tatsu-lab/alpaca", None, "train", "instruction", appendix=("input", "\n\nInput:\n{}")),
    "arena-hard": HubSource(
        "json",
        None,
        "train",
        "prompt",
        files=("hf://datasets/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/question.jsonl",),
    ),
}
"""The nine benchmarks of the DSpark paper's Table 1, by domain: mathematics, code, chat.

Prompts are worded as in the paper's evaluation where its wording is known; LiveCodeBench's is ours. The paper takes up
to 500 questions of each and the first turn of every conversation.
"""

EMBEDDED = "embedded"
EMBEDDED_TASKS = {f"{EMBEDDED}-{kind}": kind for kind in ("code", "prose", "structured")}
"""The embedded pair's held-out prompts by kind; `embedded` stands for all three."""

ROWS = 'rows {"id": ..., "turns": ["...", ...]}'


def load_tasks(
    names: Iterable[str] = (),
    prompts: str | Path | None = None,
    limit: int | None = None,
    turns: int | None = None,
) -> list[Task]:
    """Reads tasks.

    Args:
        names: of `HUB_TASKS` or `EMBEDDED_TASKS`, `embedded`, or paths of JSON Lines files. Without any: all files of
            `prompts`.
        prompts: a JSON Lines file for the one task, or a folder with `<task>.jsonl` for each; what is not in it is
            read from where it is else. Rows as for `read_questions`.
        limit: most questions of a task, the first ones; all if unset.
        turns: most turns of a question, the first ones; all if unset.

    Raises:
        OSError: if there is no such file, or the Hub cannot be read.
        ValueError: for an unknown or repeated name, an argument out of range, or a row that is no question.
    """
    for name, value in (("limit", limit), ("turns", turns)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    folder = None if prompts is None else Path(prompts)
    if folder is not None and not folder.exists():
        raise FileNotFoundError(f"`prompts` is {str(prompts)!r}, and there is no such file or folder.")
    wanted = list(_names(names, folder))
    repeated = sorted({name for name in wanted if wanted.count(name) > 1})
    if repeated:
        raise ValueError(f"`tasks` has {', '.join(map(repr, repeated))} several times; name each task once.")
    if folder is not None and folder.is_file() and len(wanted) != 1:
        raise ValueError(
            f"`prompts` is {str(prompts)!r}, a file for one task, and `tasks` are {len(wanted)}; give a folder with "
            "<task>.jsonl for each."
        )
    tasks = [_load(name, folder, limit) for name in wanted]
    labels = [task.name for task in tasks]
    if len(set(labels)) < len(labels):
        raise ValueError(f"`tasks` has several files of one name: {', '.join(wanted)}; rename one of them.")
    return tasks if turns is None else [_shortened(task, turns) for task in tasks]


def _names(names: Iterable[str], folder: Path | None) -> Iterator[str]:
    """The tasks, with `embedded` taken apart."""
    given = list(names)
    if not given and folder is not None:
        given = [folder.stem] if folder.is_file() else sorted(path.stem for path in folder.glob("*.jsonl"))
    if not given:
        what = "`tasks` is empty" if folder is None else f"`prompts` is {str(folder)!r}, which has no .jsonl file"
        raise ValueError(f"{what}; name tasks, such as {EMBEDDED} or gsm8k, or JSON Lines files with {ROWS}.")
    for name in given:
        if name == EMBEDDED and not _in_folder(name, folder):
            yield from EMBEDDED_TASKS
        else:
            yield name


def _in_folder(name: str, folder: Path | None) -> Path | None:
    """The file of a task in `prompts`."""
    if folder is None or folder.is_file():
        return folder
    path = folder / f"{name}.jsonl"
    return path if path.is_file() else None


def _shortened(task: Task, turns: int) -> Task:
    return replace(task, questions=tuple(replace(entry, turns=entry.turns[:turns]) for entry in task.questions))


def _load(name: str, folder: Path | None, limit: int | None) -> Task:
    path = _in_folder(name, folder)
    if path is None and (Path(name).suffix == ".jsonl" or Path(name).is_file()):
        path, name = Path(name), Path(name).stem
    if path is not None:
        return Task(name, _first(read_questions(path), limit, f"{str(path)!r}"), str(path))
    if name in EMBEDDED_TASKS:
        kind = EMBEDDED_TASKS[name]
        found = [Question(prompt.id, (prompt.text,), is_text=True) for prompt in load_prompts() if prompt.kind == kind]
        return Task(name, _first(found, limit, name), "embedded in dspark-hf")
    if name in HUB_TASKS:
        return Task(name, _first(_from_hub(name, limit), limit, name), HUB_TASKS[name].place)
    known = ", ".join([EMBEDDED, *EMBEDDED_TASKS, *HUB_TASKS])
    missing = "" if folder is None else f", and `prompts` has no {name}.jsonl"
    raise ValueError(f"{name!r} in `tasks` is none of {known}{missing}; name one of these, or a JSON Lines file.")


def _first(questions: Iterable[Question], limit: int | None, place: str) -> tuple[Question, ...]:
    found = tuple(itertools.islice(questions, limit))
    if not found:
        raise ValueError(f"There is no question in {place}; give a file with {ROWS}.")
    return found


def _from_hub(name: str, limit: int | None) -> list[Question]:
    from datasets import load_dataset

    source = HUB_TASKS[name]
    # Files are large and hold much else: no more of them is read than is asked for.
    options: dict[str, Any] = {"data_files": list(source.files), "streaming": True} if source.files else {}
    try:
        rows = load_dataset(source.path, source.subset, split=source.split, **options)
        found = list(itertools.islice(rows, limit))
    except Exception as error:  # whatever the network, the Hub's client or a changed dataset raise
        raise OSError(
            f"The task {name!r} cannot be read from the Hub ({source.place}): {_first_line(error)} Without a network, "
            f"give as `prompts` a folder that has {name}.jsonl, with {ROWS}."
        ) from error
    return [source.question(row, f"{name}-{number}") for number, row in enumerate(found)]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{(lines[0] if lines else type(error).__name__).rstrip('.')}."


# --- files -----------------------------------------------------------------------------------------------------------


def read_questions(path: str | Path) -> Iterator[Question]:
    """The questions of a JSON Lines file, whose rows have `turns`, a list of texts, or `prompt` or `text`, a text.

    What a user says is in `turns` and `prompt`; a `text` is gone on from as it is. An `id` is kept; further columns
    are ignored.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not in UTF-8, or a row is no question; the message says which.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; give a JSON Lines file.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _question(line, f"Line {number} of {path}", f"{path.stem}-{number - 1}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is no text in UTF-8; give a JSON Lines file.") from error


def _question(line: str, place: str, name: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON ({error}).") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is not a JSON object.")
    column = next((name for name in ("turns", "prompt", "text") if row.get(name) is not None), None)
    if column is None:
        raise ValueError(f"{place} has none of the columns `text`, `prompt` and `turns`.")
    turns = row[column] if column == "turns" else [row[column]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        takes = "a list of texts" if column == "turns" else "a text"
        raise ValueError(f"{place} has {row[column]!r:.60} as `{column}`; it must be {takes}, not empty.")
    if not all(_is_unicode(turn) for turn in turns):
        raise ValueError(f"{place} has a `{column}` that is not valid Unicode; mend or remove it.")
    return Question(name if row.get("id") is None else str(row["id"]), tuple(turns), is_text=column == "text")


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON lets through and tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


__all__ = ["EMBEDDED_TASKS", "HUB_TASKS", "HubSource", "Question", "Task", "load_tasks", "read_questions"]
