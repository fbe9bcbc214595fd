"""The study of `examples/reproduce`: its stages with few drafters and a break in the middle, and its summary."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "reproduce"
MODULES = ("drafters", "figures", "findings", "run", "summary")
KINDS = ("code", "prose", "structured")
TASKS = tuple(f"embedded-{kind}" for kind in KINDS)

SIZES = {
    "batches": 1,
    "row_tokens": 80,
    "steps": 2,
    "batch_size": 2,
    "num_anchors": 4,
    "questions": 2,
    "new_tokens": 12,
    "calibration_prompts": 2,
    "loads": [1, 2],
    "load_tokens": 8,
    "load_total": 16,
    "repeats": 1,
}


@pytest.fixture
def study(monkeypatch):
    """The modules of the study by name; others may have modules of the same names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def text(tmp_path):
    """A folder as `prepare_text.py` makes it."""
    folder = tmp_path / "text"
    folder.mkdir()
    row = {"source": "a", "text": "def f(x):\n    return x + 1\n" * 60}
    for part in ("train", "heldout"):
        lines = "".join(json.dumps({"kind": kind, **row}) + "\n" for kind in KINDS)
        (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "sources.json").write_text("{}", encoding="utf-8")
    return folder


# --- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stages_go_on_after_a_break(study, text, tmp_path, monkeypatch):
    drafters, run = study["drafters"], study["run"]
    few = {name: entry for name, entry in drafters.comparison().items() if name in ("eagle3", "markov-2", "mtp-1")}
    monkeypatch.setattr(run, "comparison", lambda: few)
    monkeypatch.setattr(run, "draft_lengths", lambda: {"dflash-2-of-3": drafters.dflash(2, 3)})
    monkeypatch.setattr(run, "under_load", lambda: {"mtp-1": few["mtp-1"], "markov-2": few["markov-2"]})
    given = {}
    monkeypatch.setattr(run, "write_summary", lambda reports, facts, folder: given.update(reports, facts=facts))
    args = run.StudyArguments(work_dir=str(tmp_path / "work"), text_dir=str(text), **SIZES)

    broken = run.Study(args)
    monkeypatch.setattr(broken, "compare", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.run()
    times = {name: path.stat().st_mtime_ns for name, path in weights(tmp_path / "work").items()}
    assert set(times) == {"eagle3", "markov-2", "mtp-1", "dflash-2-of-3"}

    run.Study(args).run()
    assert {name: path.stat().st_mtime_ns for name, path in weights(tmp_path / "work").items()} == times
    rows = given["comparison"]["rows"]
    assert {(row["task"], row["drafter"]) for row in rows} == set(itertools.product(TASKS, few))
    greedy = [row for name in ("comparison", "draft_lengths") for row in given[name]["rows"] if not row["temperature"]]
    assert all(row["identical_to_plain"] == row["answers"] for row in greedy)
    assert {row["num_draft_tokens"] for row in given["eagle3_lengths"]["rows"]} == {3, 11, 15}
    assert [row["policy"] for row in given["load"]["rows"]] == ["plain", "MTP-1", "DSpark"] * 2
    budgets = {row["policy"]: row["budget"] for row in given["load"]["rows"]}
    assert budgets["plain"] == 0 < budgets["MTP-1"] <= 1
    assert len(given["facts"]["stages"]["calibrate"]["temperatures"]) == drafters.BLOCK
    assert given["facts"]["stages"]["train-markov-2"]["parameters"] > 0
    assert set(given["facts"]["stages"]["step_times"]["median_step_seconds"]) == set(few)

    with pytest.raises(ValueError, match="`steps` was 2 and is 3"):
        run.Study(run.StudyArguments(work_dir=args.work_dir, text_dir=str(text), **{**SIZES, "steps": 3}))


def weights(folder):
    return {path.parent.name: path for path in folder.glob("drafters/*/model.safetensors")}


def test_bad_arguments_are_named(study):
    with pytest.raises(ValueError, match="`steps` is 0"):
        study["run"].StudyArguments(steps=0)
    with pytest.raises(ValueError, match=r"`loads` is \[1, -2\]"):
        study["run"].StudyArguments(loads=[1, -2])
    with pytest.raises(ValueError, match="`target` is 'nowhere'"):
        study["run"].StudyArguments(target="nowhere")


def test_training_is_the_same_for_all_but_the_loss(study):
    """Equal budgets: nothing but a method's own loss may differ, and the passes of those named for it."""
    drafters = study["drafters"]
    entries = {**drafters.comparison(), **drafters.draft_lengths(), **drafters.under_load()}
    assert {frozenset(entry.loss) for entry in entries.values()} == {frozenset(), frozenset(drafters.CROSS_ENTROPY)}
    assert {entry.config.intermediate_size for entry in entries.values()} == {704}
    longer = {name for name, entry in entries.items() if entry.passes != 1}
    assert longer == {name for name in entries if name.endswith("-long")} and len(longer) == 3
    layers = {name: entry.config.num_hidden_layers for name, entry in entries.items()}
    assert (layers["eagle3"], layers["mtp-1"], layers["dflash-5"], layers["rnn-2"]) == (1, 1, 5, 2)


# --- summary ---------------------------------------------------------------------------------------------------------


def made_up_row(drafter, task, temperature, length, block, questions=6):
    rng = np.random.default_rng(abs(hash((drafter, task, temperature))) % 2**32)
    rounds = rng.integers(10, 40, questions)
    own = length + 0.1 * rng.standard_normal(questions)
    mean = float((own * rounds).sum() / rounds.sum())
    return {
        "drafter": drafter,
        "task": task,
        "temperature": temperature,
        "batch_size": 1,
        "num_draft_tokens": block,
        "accepted_length": mean,
        "accepted_length_interval": [mean - 0.1, mean + 0.1],
        "accepted_length_of_questions": [
            {"id": f"{task}-{index}", "accepted_length": float(own[index]), "rounds": int(rounds[index])}
            for index in range(questions)
        ],
        "conditional_acceptance": [0.8] * block,
        "conditional_acceptance_interval": [[0.7] * block, [0.9] * block],
        "cases": [int(100 * 0.8**place) for place in range(block)],
        "speedup": length / 2,
        "speedup_interval": [length / 2 - 0.1, length / 2 + 0.1],
        "seconds_per_round": {"draft": 0.001 * length, "verify": 0.009, "rest": 0.001},
    }


def made_up_report(drafters, lengths=None):
    rows = [
        made_up_row(name, task, temperature, 2.0 + 0.1 * place, block)
        for place, (name, blocks) in enumerate(drafters.items())
        for block in blocks
        for task in TASKS
        for temperature in (0.0, 1.0)
    ]
    return {"tasks": dict.fromkeys(TASKS), "rows": rows}


@pytest.fixture
def reports(study):
    drafters = study["drafters"]
    load = [
        {
            "load": load,
            "policy": policy,
            "tokens_per_second": rate * load**0.7,
            "tokens_per_second_range": [rate, 2 * rate],
            "budget": 1.0,
        }
        for load in (1, 2, 4)
        for policy, rate in (("plain", 100.0), ("MTP-1", 120.0), ("DSpark", 200.0))
    ]
    return {
        "comparison": made_up_report({name: [e.config.block_size] for name, e in drafters.comparison().items()}),
        "draft_lengths": made_up_report({name: [e.config.block_size] for name, e in drafters.draft_lengths().items()}),
        "eagle3_lengths": made_up_report({"eagle3": [3, 11, 15]}),
        "load": {"rows": load},
    }


@pytest.mark.slow
def test_summary(study, reports, tmp_path):
    names = list(study["drafters"].comparison())
    stages = {f"train-{name}": {"parameters": 10**6} for name in names}
    stages["step_times"] = {"median_step_seconds": dict.fromkeys(names, 0.5)}
    study["summary"].write_summary(reports, {"stages": stages}, tmp_path / "results")
    text = (tmp_path / "results" / "tables.md").read_text(encoding="utf-8")
    assert text.count("###") == 6
    assert all(f"| {name} |" in text for name in names)
    for line in text.splitlines():
        assert "nan" not in line
    drawn = {path.stem for path in (tmp_path / "results").glob("*.png") if path.stat().st_size > 8_000}
    assert drawn == {"acceptance", "accepted-length", "depth", "draft-lengths", "load", "speed"}
    kept = json.loads((tmp_path / "results" / "comparison.json").read_text(encoding="utf-8"))
    assert len(kept["rows"]) == 6 * len(names) and "accepted_length_of_questions" not in kept["rows"][0]


def test_ratio_is_paired_and_weighs_tasks_alike(study):
    findings = study["findings"]
    rows = [made_up_row("a", task, 1.0, length, 7) for task, length in zip(TASKS, (2.0, 3.0, 4.0), strict=True)]
    doubled = [
        {
            **row,
            "accepted_length_of_questions": [
                {**question, "accepted_length": 2 * question["accepted_length"]}
                for question in row["accepted_length_of_questions"]
            ],
        }
        for row in rows
    ]
    found = findings.ratio(doubled, rows)
    assert found.value == pytest.approx(2)
    assert found.interval == pytest.approx((2, 2))  # whatever questions are drawn
    assert str(found) == "2.00 (2.00 to 2.00)"
    alone = findings.ratio(rows, rows[:0] + rows)
    assert alone.value == pytest.approx(1)
    low, high = findings.mean_length_interval(rows)
    assert low < findings.mean_length(rows) < high
    with pytest.raises(ValueError, match="other questions"):
        findings.ratio(rows, rows[::-1])


def test_pooled_acceptance_counts_rounds(study):
    rows = [
        {"cases": [30, 10], "conditional_acceptance": [0.5, 1.0]},
        {"cases": [10, 0, 0], "conditional_acceptance": [0.9, None, None]},
    ]
    pooled = study["findings"].pooled_acceptance
    assert pooled(rows, min_cases=1) == pytest.approx([24 / 40, 1.0])
    assert pooled(rows, min_cases=40) == pytest.approx([24 / 40])
    assert pooled(rows, min_cases=41) == []


def test_speed_at_a_throughput(study):
    curve = [{"load": 1, "tokens_per_second": 100.0}, {"load": 4, "tokens_per_second": 200.0}]
    at = study["findings"].at_throughput
    assert at(curve, 100.0) == 100 and at(curve, 200.0) == 50 and at(curve, 150.0) == 75
    assert at(curve, 99.0) is None and at(curve, 201.0) is None
