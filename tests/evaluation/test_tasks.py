"""Tasks: from files, from the package, from the Hub, and what is said where there are none."""

from __future__ import annotations

import json

import datasets
import pytest

from dspark_hf.embedded import PROMPTS, load_prompts
from dspark_hf.evaluation.tasks import EMBEDDED_TASKS, HUB_TASKS, Question, load_tasks, read_questions


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    """Two tasks."""
    write(tmp_path / "gsm8k.jsonl", {"id": "a", "turns": ["one"]}, {"id": "b", "turns": ["two", "three"]})
    write(tmp_path / "mine.jsonl", {"id": 7, "prompt": "four"}, "\n", {"text": "five", "kind": "x"})
    return tmp_path


def test_folder(folder):
    (gsm8k,) = load_tasks(["gsm8k"], folder)
    assert (gsm8k.name, gsm8k.source) == ("gsm8k", str(folder / "gsm8k.jsonl"))
    assert gsm8k.questions == (Question("a", ("one",)), Question("b", ("two", "three")))
    tasks = load_tasks((), folder)
    assert [task.name for task in tasks] == ["gsm8k", "mine"]
    assert tasks[1].questions == (Question("7", ("four",)), Question("mine-2", ("five",), is_text=True))
    # What is not in it is where it is else.
    assert [task.name for task in load_tasks(["mine", "embedded-prose"], folder)] == ["mine", "embedded-prose"]


def test_file(folder):
    (task,) = load_tasks((), folder / "mine.jsonl")
    assert (task.name, len(task.questions)) == ("mine", 2)
    (task,) = load_tasks(["humaneval"], folder / "mine.jsonl")
    assert (task.name, len(task.questions)) == ("humaneval", 2)
    tasks = load_tasks([str(folder / "mine.jsonl"), str(folder / "gsm8k.jsonl")])
    assert [task.name for task in tasks] == ["mine", "gsm8k"]


def test_limits(folder):
    (task,) = load_tasks(["gsm8k"], folder, limit=1)
    assert [question.id for question in task.questions] == ["a"]
    (task,) = load_tasks(["gsm8k"], folder, turns=1)
    assert [question.turns for question in task.questions] == [("one",), ("two",)]


def test_fingerprint_is_that_of_the_questions(folder):
    def fingerprint(**options):
        (task,) = load_tasks(["gsm8k"], folder, **options)
        return task.fingerprint

    same = fingerprint()
    assert fingerprint() == same != fingerprint(limit=1) != fingerprint(turns=1) != same
    write(folder / "gsm8k.jsonl", {"id": "a", "turns": ["one"]}, {"id": "b", "turns": ["two", "three!"]})
    assert fingerprint() != same


def test_embedded_prompts():
    tasks = load_tasks(["embedded"], limit=3)
    assert (
        [task.name for task in tasks]
        == list(EMBEDDED_TASKS)
        == [f"embedded-{kind}" for kind in ("code", "prose", "structured")]
    )
    assert all(len(task.questions) == 3 and all(question.is_text for question in task.questions) for task in tasks)
    prompts = {prompt.id: (prompt.kind, prompt.text) for prompt in load_prompts()}
    for task in load_tasks(["embedded"]):
        assert len(task.questions) == 40
        assert all(prompts[entry.id] == (EMBEDDED_TASKS[task.name], entry.turns[0]) for entry in task.questions)
    # The same as a file.
    (task,) = load_tasks([str(PROMPTS)])
    assert len(task.questions) == 120 and all(question.is_text for question in task.questions)


# --- the Hub ---------------------------------------------------------------------------------------------------------

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS = {
    "gsm8k": ({"question": "1 + {x}?", "answer": "2"}, ("1 + {x}?" + BOXED,)),
    "math500": ({"problem": "$x$?", "solution": ""}, ("$x$?" + BOXED,)),
    "aime25": ({"problem": "$y$?", "answer": "3"}, ("$y$?" + BOXED,)),
    "mbpp": ({"prompt": "Write it.", "code": ""}, ("Write it.",)),
    "humaneval": (
        {"prompt": "def f():\n"},
        (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```",
        ),
    ),
    "livecodebench": (
        {"question_content": "Sum them.", "starter_code": "class S:"},
        (
            "Sum them.\n\nUse this code:\n```python\nclass S:\n```\n\nAnswer with a Python program in a block of code,"
            " and with nothing else.",
        ),
    ),
    "mt-bench": ({"prompt": ["Write.", "Rewrite."], "prompt_id": 1}, ("Write.", "Rewrite.")),
    "alpaca": ({"instruction": "Sort.", "input": "3, 1", "output": ""}, ("Sort.\n\nInput:\n3, 1",)),
    "arena-hard": ({"prompt": "Hard {one}.", "uid": "u"}, ("Hard {one}.",)),
}


def test_all_nine_are_there():
    assert set(HUB_TASKS) == set(ROWS) and len(ROWS) == 9


@pytest.mark.parametrize("name", HUB_TASKS)
def test_hub_row_becomes_a_question(name, monkeypatch):
    """Datasets of the columns that these have."""
    row, turns = ROWS[name]
    asked = []

    def load_dataset(path, subset, split, **options):
        asked.append((path, subset, split, options))
        return datasets.Dataset.from_list([row] * 4)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (task,) = load_tasks([name], limit=2)
    assert task.questions == (Question(f"{name}-0", turns), Question(f"{name}-1", turns))
    source = HUB_TASKS[name]
    ((path, subset, split, options),) = asked
    assert (path, subset, split) == (source.path, source.subset, source.split)
    assert options == ({"data_files": list(source.files), "streaming": True} if source.files else {})
    assert task.source == source.place and task.source != "json"


def test_appendix_only_where_there_is_one():
    assert HUB_TASKS["alpaca"].question({"instruction": "Sort.", "input": ""}, "x").turns == ("Sort.",)


def test_dataset_that_has_changed(monkeypatch):
    rows = datasets.Dataset.from_list([{"query": "?"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(ValueError, match="openai/gsm8k has None as `question`, which is neither a text"):
        load_tasks(["gsm8k"])


@pytest.mark.parametrize("name", ["gsm8k", "arena-hard"])
def test_without_network_and_file(name, folder):
    """Tests run offline."""
    write(folder / "gsm8k.jsonl").unlink()
    with pytest.raises(
        OSError,
        match=f"The task '{name}' cannot be read from the Hub .* give as `prompts` a folder that has {name}.jsonl",
    ):
        load_tasks([name], folder)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({}, ValueError, "`tasks` is empty; name tasks, such as embedded or gsm8k"),
        ({"names": ["gsm9k"]}, ValueError, "'gsm9k' in `tasks` is none of embedded, embedded-code, .*; name one of"),
        ({"names": ["embedded", "embedded-prose"]}, ValueError, "`tasks` has 'embedded-prose' several times"),
        ({"names": ["nowhere.jsonl"]}, OSError, "There is no file 'nowhere.jsonl'"),
        ({"names": ["embedded"], "limit": 0}, ValueError, "`limit` is 0; it must be at least 1"),
        ({"names": ["embedded"], "turns": 0}, ValueError, "`turns` is 0; it must be at least 1"),
        ({"prompts": "nowhere"}, OSError, "`prompts` is 'nowhere', and there is no such file or folder"),
    ],
)
def test_wrong_arguments(arguments, error, says):
    with pytest.raises(error, match=says):
        load_tasks(**arguments)


def test_wrong_files(folder):
    with pytest.raises(ValueError, match="a file for one task, and `tasks` are 2; give a folder"):
        load_tasks(["gsm8k", "mbpp"], folder / "mine.jsonl")
    (folder / "other").mkdir()
    with pytest.raises(ValueError, match="`prompts` is .*other', which has no .jsonl file"):
        load_tasks((), folder / "other")
    write(folder / "other" / "mine.jsonl", {"turns": ["x"]})
    with pytest.raises(ValueError, match="several files of one name"):
        load_tasks([str(folder / "mine.jsonl"), str(folder / "other" / "mine.jsonl")])
    with pytest.raises(ValueError, match="There is no question in .*empty.jsonl"):
        load_tasks([str(write(folder / "empty.jsonl", "\n"))])
    with pytest.raises(ValueError, match="and `prompts` has no gsm9k.jsonl"):
        load_tasks(["gsm9k"], folder)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("nonsense\n", "Line 2 of .*rows.jsonl is not JSON"),
        ([1], "Line 2 of .* is not a JSON object"),
        ({"id": 1}, "has none of the columns `text`, `prompt` and `turns`"),
        ({"turns": "x"}, "has 'x' as `turns`; it must be a list of texts, not empty"),
        ({"turns": ["x", ""]}, "it must be a list of texts, not empty"),
        ({"text": ""}, "has '' as `text`; it must be a text, not empty"),
        ({"prompt": "\ud800"}, "has a `prompt` that is not valid Unicode"),
    ],
)
def test_wrong_rows(tmp_path, row, says):
    path = write(tmp_path / "rows.jsonl", {"turns": ["fine"]}, row)
    with pytest.raises(ValueError, match=says):
        list(read_questions(path))


def test_other_encodings(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="latin.jsonl' is no text in UTF-8"):
        list(read_questions(tmp_path / "latin.jsonl"))
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    assert list(read_questions(tmp_path / "marked.jsonl")) == [Question("marked-0", ("x",), is_text=True)]
    with pytest.raises(OSError, match="is a folder; give a JSON Lines file"):
        list(read_questions(tmp_path))
