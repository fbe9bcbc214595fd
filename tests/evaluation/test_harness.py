"""The evaluation harness: its counts are those of `generate`, and a broken run goes on as it would have gone."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dspark_hf import DSparkConfig, Eagle3Config, MTPConfig, get_drafter
from dspark_hf.embedded import load_embedded_pair
from dspark_hf.evaluation import Rounds, collect_observations
from dspark_hf.evaluation.calibration import report as judge
from dspark_hf.evaluation.harness import JOURNAL, Evaluation, EvaluationSettings, evaluate_drafters
from dspark_hf.evaluation.report import build_report
from dspark_hf.evaluation.tasks import Question, Task, load_tasks

from ..cli.test_commands import make_drafter, make_target, make_tokenizer, save_pair
from ..data.test_prepare import KEEPING

TIMES = ("tokens_per_second", "plain_tokens_per_second", "speedup", "seconds_per_round", "prefill_seconds")
SHORT = {"max_new_tokens": 12, "temperatures": (0.0,)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target)


@pytest.fixture(autouse=True)
def threads():
    """One, as figures of runs on other numbers of threads are not mixed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def embedded():
    return load_embedded_pair()


def words(*numbers):
    return " ".join(f"w{number}" for number in numbers)


def task(count=3, name="task", turns=1):
    """Questions of different lengths."""
    questions = [
        Question(f"q{index}", tuple(words(*range(10 + 7 * index, 13 + 8 * index + turn)) for turn in range(turns)))
        for index in range(count)
    ]
    return Task(name, tuple(questions), "here")


def evaluate(target, drafters, output, tasks=None, tokenizer=None, progress=None, **settings):
    drafters = drafters if isinstance(drafters, dict) else {"drafter": drafters}
    return evaluate_drafters(
        *(target, drafters, tokenizer or make_tokenizer(), tasks or [task()], output),
        EvaluationSettings(**{**SHORT, **settings}),
        progress,
    )


def counts(report):
    """The report without what clocks say."""
    hidden = {name for time in TIMES for name in (time, f"{time}_interval")}
    rows = [{name: value for name, value in row.items() if name not in hidden} for row in report["rows"]]
    averages = [{**entry, "speedup": None} for entry in report["averages"]]
    return {**report, "rows": rows, "averages": averages}


# --- figures ---------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_generate(embedded, tmp_path):
    target, tokenizer, drafter = embedded
    tasks = load_tasks(["embedded-code"], limit=3)
    report = evaluate(target, drafter, tmp_path / "report.json", tasks, tokenizer, temperatures=(0.0, 0.7))
    assert report == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    greedy, sampled = report["rows"]
    found = []
    for question in tasks[0].questions:
        ids = tokenizer(question.turns[0], return_tensors="pt").input_ids
        options = {"max_new_tokens": 12, "do_sample": False}
        target.generate(ids, assistant_model=drafter, dspark_scheduler="none", **options)
        found.append(Rounds.of(drafter.last_stats))
    rounds = Rounds.join(found)
    assert greedy["accepted_length"] == pytest.approx(rounds.accepted_length)
    assert greedy["rounds"] == len(rounds)
    assert [entry["accepted_length"] for entry in greedy["accepted_length_of_questions"]] == pytest.approx(
        [entry.accepted_length for entry in found]
    )
    assert greedy["accepted_length_per_question"] == pytest.approx(
        sum(entry.accepted_length for entry in found) / len(found)
    )
    assert (greedy["verified"], greedy["wasted"]) == (int(rounds.verified.sum()), int(rounds.wasted.sum()))
    assert greedy["kept"] + greedy["wasted"] == greedy["verified"] <= greedy["drafted"]
    # Positions that were never reached have none.
    expected = rounds.conditional_acceptance()
    assert greedy["conditional_acceptance"] == [None if math.isnan(share) else share for share in expected]
    assert expected[0] > 0.5
    assert greedy["predicted_accepted_length"] == pytest.approx(rounds.predicted_length)
    assert (greedy["identical_to_plain"], greedy["answers"], greedy["new_tokens"]) == (3, 3, 36)
    assert sampled["identical_to_plain"] is None and sampled["temperature"] == 0.7
    assert (greedy["task"], greedy["drafter"], greedy["num_draft_tokens"], greedy["scheduler"]) == (
        *("embedded-code", "drafter", drafter.config.block_size, "none"),
    )
    for row in report["rows"]:
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
        assert all(seconds > 0 for seconds in row["seconds_per_round"].values())
    assert report["drafters"]["drafter"]["class"] == "DSparkDrafter"
    assert report["tasks"] == {"embedded-code": {"source": tasks[0].source, "questions": 3, "turns": 3}}
    assert report["settings"]["temperatures"] == [0.0, 0.7] and report["machine"]["threads"] == 1


def test_figures_from_units_written_by_hand():
    """Two batches of two questions, of which one has two turns and one no round; one variant."""

    def run(seconds, tokens, rows=None, same=()):
        kept = {"seconds": seconds, "tokens": tokens, "repeated": [0.25] * len(tokens)}
        if rows is None:
            return kept
        totals = {"drafted": 20, "draft_seconds": 0.1, "verify_seconds": 0.2, "seconds": 0.5}
        names = ("verified", "survived", "emitted")
        fields = [{name: [entry[place] for entry in row] for place, name in enumerate(names)} for row in rows]
        return {**kept, "same": list(same), "prefill_seconds": 0.01, "rounds": 2, "totals": totals, "rows": fields}

    def unit(number, first, turns):
        ids = [f"q{first}", f"q{first + 1}"]
        return {
            **{"source": number, "sample": 0, "task": "t", "temperature": 0.0, "batch_size": 2, "ids": ids},
            **{"left_out": 0, "turns": turns},
        }

    turns = [
        {
            "rows": [0, 1],
            "runs": {"plain": run(2.0, [5, 1]), "0": run(1.0, [5, 1], [[(4, 1, 2), (4, 1, 2)], []], [True, True])},
        },
        {"rows": [0], "runs": {"plain": run(1.0, [4]), "0": run(0.5, [4], [[(4, 2, 3)]], [False])}},
    ]
    other = [
        {
            "rows": [0, 1],
            "runs": {"plain": run(1.0, [6, 6]), "0": run(1.0, [6, 6], [[(4, 4, 5)], [(4, 4, 5)]], [True, True])},
        }
    ]
    variant = {"drafter": "d", "num_draft_tokens": 4, "threshold": 0.0, "scheduler": "none"}
    report = build_report([unit(1, 0, turns), unit(2, 2, other)], [variant], {})
    (row,) = report["rows"]
    assert (row["questions"], row["answers"], row["rounds"], row["identical_to_plain"]) == (4, 5, 5, 4)
    assert row["accepted_length"] == pytest.approx(17 / 5)
    # Of the first question over both turns, and of the two others; the second of the first batch has no round.
    assert [entry["accepted_length"] for entry in row["accepted_length_of_questions"]] == pytest.approx(
        [7 / 3, None, 5, 5]
    )
    assert row["accepted_length_per_question"] == pytest.approx((7 / 3 + 5 + 5) / 3)
    assert row["conditional_acceptance"] == pytest.approx([1, 3 / 5, 2 / 3, 1])
    assert row["cases"] == [5, 5, 3, 2]
    assert row["predicted_accepted_length"] == pytest.approx(1 + 1 + 3 / 5 + 2 / 5 + 2 / 5)
    assert (row["drafted"], row["verified"], row["kept"], row["wasted"]) == (60, 20, 12, 8)
    assert row["tokens_per_second"] == pytest.approx(22 / 2.5) and row["plain_tokens_per_second"] == pytest.approx(
        22 / 4
    )
    assert row["speedup"] == pytest.approx(4 / 2.5)
    # Speeds of the two batches alone are 2 and 1: the interval lies between them.
    assert row["speedup_interval"] == pytest.approx([1, 2])
    assert row["accepted_length_interval"][0] < 17 / 5 < row["accepted_length_interval"][1] <= 5
    assert row["seconds_per_round"] == pytest.approx({"draft": 0.3 / 6, "verify": 0.6 / 6, "rest": 0.6 / 6})
    assert row["repeated_8grams"] == 0.25
    cut = build_report([unit(1, 0, turns), unit(2, 2, other)], [{**variant, "threshold": 0.5}], {})["rows"][0]
    assert cut["predicted_accepted_length"] is cut["predicted_accepted_length_interval"] is None


def test_acceptance_that_a_real_drafter_has(embedded, tmp_path):
    """A trained pair: drafting pays in tokens per pass, greedy text is plain `generate`'s, thresholds waste less."""
    target, tokenizer, drafter = embedded
    tasks = load_tasks(["embedded"], limit=1)
    report = evaluate(
        *(target, drafter, tmp_path / "report.json", tasks, tokenizer),
        **dict(max_new_tokens=32, thresholds=(0.0, 0.6), num_draft_tokens=(2, 8), temperatures=(0.0, 1.0)),
    )
    assert len(report["rows"]) == 3 * 2 * 4
    for row in report["rows"]:
        assert 1 <= row["accepted_length"] <= row["num_draft_tokens"] + 1
        assert row["identical_to_plain"] == (1 if row["temperature"] == 0 else None)
        assert len(row["conditional_acceptance"]) <= row["num_draft_tokens"]
    by_setting = {
        (entry["temperature"], entry["num_draft_tokens"], entry["threshold"]): entry for entry in report["averages"]
    }
    for temperature in (0.0, 1.0):
        whole, short, cut = (by_setting[(temperature, *key)] for key in ((8, 0.0), (2, 0.0), (8, 0.6)))
        assert whole["tasks"] == 3
        assert whole["accepted_length"] > short["accepted_length"] > 1.5
        assert cut["acceptance_rate"] > whole["acceptance_rate"]
        # Ends of texts apart, acceptance by position says how long proposals survive.
        assert whole["predicted_accepted_length"] == pytest.approx(whole["accepted_length"], rel=0.2)
        assert cut["predicted_accepted_length"] is None


def test_confidences_are_judged_as_calibration_does(embedded, tmp_path):
    target, tokenizer, drafter = embedded
    tasks = load_tasks(["embedded-code"], limit=3)
    report = evaluate(target, drafter, tmp_path / "report.json", tasks, tokenizer, max_new_tokens=24)
    prompts = [tokenizer(question.turns[0], return_tensors="pt").input_ids for question in tasks[0].questions]
    observed = collect_observations(target, drafter, prompts, max_new_tokens=24, do_sample=False)
    expected = judge(observed, drafter.config.confidence_temperatures)
    (entry,) = report["confidence"]
    assert entry["calibrated"] and len(entry["positions"]) == drafter.config.block_size
    for found, position in zip(entry["positions"], expected, strict=True):
        for part in ("token", "prefix"):
            scores = getattr(position, part)
            assert (found[part] is None) == (scores is None)
            if scores is not None:
                assert (found[part]["cases"], found[part]["share"]) == (scores.cases, scores.share)
                assert found[part]["ece"] == pytest.approx(scores.ece, abs=1e-3)
                assert found[part]["auroc"] == pytest.approx(scores.auroc, abs=1e-3)
    assert not drafter.record_confidence
    without = evaluate(target, drafter, tmp_path / "other.json", tasks, tokenizer, max_new_tokens=24, confidence=False)
    assert without["confidence"] == []


@pytest.mark.parametrize("kind", [DSparkConfig, Eagle3Config, MTPConfig])
def test_drafters_without_confidence_head_beside_one_that_has_it(target, drafter, kind, tmp_path):
    """They are not asked for what needs confidences; of other kinds, drafters are compared all the same."""
    own = {"markov_rank": 0, "enable_confidence_head": False} if kind is DSparkConfig else {}
    other = get_drafter(target, kind(block_size=2, mask_token_id=0, **own))
    settings = {"thresholds": (0.0, 0.5), "temperatures": (0.0, 1.0), "batch_sizes": (2,)}
    report = evaluate(target, {"one": drafter, "other": other}, tmp_path / "report.json", **settings)
    assert [(row["drafter"], row["threshold"]) for row in report["rows"]] == [
        ("one", 0),
        ("one", 0.5),
        ("other", 0),
    ] * 2
    assert [row["identical_to_plain"] for row in report["rows"]] == [3] * 3 + [None] * 3
    assert report["drafters"]["other"]["class"] == type(other).__name__
    assert {entry["drafter"] for entry in report["confidence"]} == {"one"}
    for name, value in (("thresholds", (0.5,)), ("schedulers", ("hardware",))):
        with pytest.raises(ValueError, match=f"`{name}` is .* the drafter 'other' has no confidence head"):
            evaluate(target, {"other": other}, tmp_path / "another.json", **{name: value})


# --- what is generated -----------------------------------------------------------------------------------------------


@pytest.fixture
def calls(target, monkeypatch):
    """Prompts without padding, and options, of every call that is measured or warmed up with."""
    seen, generate = [], target.generate

    def spy(input_ids, attention_mask, assistant_model=None, **options):
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        output = generate(
            input_ids=input_ids, attention_mask=attention_mask, assistant_model=assistant_model, **options
        )
        seen.append((rows, assistant_model, options, output[:, input_ids.shape[1] :].tolist()))
        return output

    monkeypatch.setattr(target, "generate", spy)
    return seen


def test_turns_follow_what_plain_generate_answered(target, drafter, calls, tmp_path):
    """With a chat template and without; prompts are the same for all; questions of one turn leave the batch."""
    tokenizer = make_tokenizer()
    questions = (
        Question("a", (words(20, 21), words(22))),
        Question("b", (words(30),)),
        Question("c", (words(40), words(41))),
    )
    for template in (None, KEEPING):
        tokenizer.chat_template = template
        calls.clear()
        evaluate(
            *(target, drafter, tmp_path / f"{bool(template)}.json", [Task("t", questions, "here")], tokenizer),
            **dict(batch_sizes=(3,), confidence=False, enable_thinking=True if template else None),
        )
        timed = [call for call in calls if call[2]["max_new_tokens"] == 12]
        assert [call[1] for call in timed] == [drafter, None, None, drafter]
        first, second = timed[1], timed[2]
        assert timed[0][0] == first[0] and timed[3][0] == second[0]
        assert (len(first[0]), len(second[0])) == (3, 2)
        answers = [tokenizer.decode(ids) for ids in first[3]]
        if template is None:
            texts = [words(20, 21), words(30), words(40)]
            later = [f"{words(20, 21)}{answers[0]} {words(22)}", f"{words(40)}{answers[2]} {words(41)}"]
        else:
            texts = [f"w5 {text} </s> w6 w7" for text in (words(20, 21), words(30), words(40))]
            later = [
                f"w5 {said} </s> w6 {answer} </s> w5 {asked} </s> w6 w7"
                for said, answer, asked in (
                    *((words(20, 21), answers[0], words(22)), (words(40), answers[2], words(41))),
                )
            ]
        assert first[0] == [tokenizer(text).input_ids for text in texts]
        assert second[0] == [tokenizer(text).input_ids for text in later]


def test_runs_take_turns_and_begin_with_another_each_time(target, drafter, calls, tmp_path):
    other = make_drafter(target)
    evaluate(target, {"one": drafter, "two": other}, tmp_path / "report.json", confidence=False)
    timed = [call for call in calls if call[2]["max_new_tokens"] == 12]
    order = [{id(None): "plain", id(drafter): "one", id(other): "two"}[id(call[1])] for call in timed]
    assert order == ["one", "two", "plain", "two", "plain", "one", "plain", "one", "two"]
    # Everything ran once before.
    assert [call[1] for call in calls[:3]] == [None, drafter, other]
    assert all(call[2]["max_new_tokens"] == 8 for call in calls[:3]) and len(calls) == 3 + 9
    assert all("dspark_scheduler" not in call[2] for call in timed if call[1] is None)


def test_text_is_gone_on_from_even_where_there_is_a_chat_template(target, drafter, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = KEEPING
    asked = Question("a", (words(20),))
    text = Question("b", (words(20),), is_text=True)
    prompts = {}
    for chat in (None, True, False):
        settings = EvaluationSettings(chat=chat, **SHORT)
        evaluation = Evaluation(target, {"d": drafter}, tokenizer, [Task("t", (asked, text), "here")], settings)
        prompts[chat] = [tokenizer.decode(evaluation.encode(question, ())) for question in (asked, text)]
    assert prompts == {
        None: ["w5 w20 </s> w6", "w20"],
        True: ["w5 w20 </s> w6"] * 2,
        False: ["w20"] * 2,
    }


def test_conversation_that_fills_the_context_ends(tmp_path):
    target = make_target(max_position_embeddings=30)
    questions = (
        Question("fits", (words(*range(20, 24)), words(50))),
        Question("ends", (words(*range(20, 34)), words(50))),
        Question("never", (words(*range(20, 45)), words(50))),
    )
    report = evaluate(target, make_drafter(target), tmp_path / "report.json", [Task("t", questions, "here")])
    (row,) = report["rows"]
    # Turns of 4 + 12 and 4 + 12 + 1 + 12; of 14 + 12; of none.
    assert (row["questions"], row["answers"], report["left_out"]) == (3, 3, {"t": 2})
    assert [entry["id"] for entry in row["accepted_length_of_questions"]] == ["fits", "ends"]
    with pytest.raises(ValueError, match="No question of the task 't' and an answer of `max_new_tokens` = 12 fit the"):
        evaluate(target, make_drafter(target), tmp_path / "other.json", [Task("t", questions[2:], "here")])


def test_batches(target, drafter, tmp_path):
    """Each row keeps its own rounds: greedy figures do not depend on the batch."""
    report = evaluate(target, drafter, tmp_path / "report.json", [task(5)], batch_sizes=(1, 2, 8))
    alone, pairs, all_at_once = counts(report)["rows"]
    assert alone["batch_size"] == 1 and alone == {**pairs, "batch_size": 1} == {**all_at_once, "batch_size": 1}
    # Confidences do not either, and are judged once.
    assert len(report["confidence"]) == 1


def test_sampling_is_seeded(target, drafter, tmp_path):
    runs = [
        counts(evaluate(target, drafter, tmp_path / f"{number}.json", temperatures=(1.5,), seed=seed))
        for number, seed in enumerate((0, 0, 1))
    ]
    assert runs[0] == runs[1]
    assert runs[0]["rows"] != runs[2]["rows"]


def test_draft_lengths_beyond_a_block_are_left_out(target, drafter, tmp_path):
    longer = get_drafter(target, DSparkConfig(block_size=5, num_hidden_layers=1, markov_rank=4, mask_token_id=0))
    report = evaluate(target, {"a": drafter, "b": longer}, tmp_path / "report.json", num_draft_tokens=(2, 5))
    assert [(row["drafter"], row["num_draft_tokens"]) for row in report["rows"]] == [("a", 2), ("b", 2), ("b", 5)]
    for row in report["rows"]:
        assert len(row["conditional_acceptance"]) <= row["num_draft_tokens"]
    with pytest.raises(ValueError, match=r"`num_draft_tokens` is \[5\], and the drafter 'a' drafts at most 3 tokens"):
        evaluate(target, {"a": drafter}, tmp_path / "other.json", num_draft_tokens=(5,))


# --- going on --------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """Stands for whatever ends a run."""


def breaking_at(number):
    """A progress function that ends the run before its unit of that number, from 0."""
    calls = iter(range(10**6))

    def progress(done, total):
        if next(calls) == number:
            raise Broken

    return progress


SEVERAL = {"temperatures": (0.0, 1.0), "batch_sizes": (1, 2), "thresholds": (0.0, 0.9), "max_new_tokens": 8}


@pytest.fixture(scope="module")
def whole(target, drafter, tmp_path_factory):
    """A run that nothing broke off: 2 · (3 + 2) units."""
    path = tmp_path_factory.mktemp("whole") / "report.json"
    torch.set_num_threads(1)
    return path, evaluate(target, drafter, path, [task(turns=2)], **SEVERAL)


@pytest.mark.parametrize("number", [1, 4, 9])
def test_broken_run_goes_on(target, drafter, whole, tmp_path, number):
    path = tmp_path / "report.json"
    with pytest.raises(Broken):
        evaluate(target, drafter, path, [task(turns=2)], progress=breaking_at(number), **SEVERAL)
    assert not path.exists()
    lines = (tmp_path / f"report.json{JOURNAL}").read_bytes().splitlines(keepends=True)
    assert len(lines) == number
    # As a kill may leave it.
    (tmp_path / f"report.json{JOURNAL}").write_bytes(b"".join(lines) + lines[0][:50])
    seen = []
    report = evaluate(
        target, drafter, path, [task(turns=2)], progress=lambda done, total: seen.append((done, total)), **SEVERAL
    )
    assert counts(report) == counts(whole[1])
    assert seen[0] == (0, 12) and seen[-1] == (12, 12) and len(seen) == 11
    after = (tmp_path / f"report.json{JOURNAL}").read_bytes().splitlines(keepends=True)
    assert after[:number] == lines and len(after) == 10
    # Times are those that were recorded.
    assert report["rows"] == json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert (
        report["rows"]
        == build_report([json.loads(line) for line in after], [asdict_of(row) for row in report["rows"][:2]], {})[
            "rows"
        ]
    )
    assert {entry.name for entry in tmp_path.iterdir()} == {
        *("report.json", f"report.json{JOURNAL}", "report.json.manifest.json", "report.json.lock"),
    }


def asdict_of(row):
    return {name: row[name] for name in ("drafter", "num_draft_tokens", "threshold", "scheduler")}


def test_finished_run_measures_nothing_again(target, drafter, whole, monkeypatch):
    path, report = whole
    before = path.read_bytes()
    monkeypatch.setattr(target, "generate", None)
    assert evaluate(target, drafter, path, [task(turns=2)], **SEVERAL) == report
    assert path.read_bytes() == before


SCRIPT = """
import sys, torch
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from dspark_hf import AutoDrafter
from tests.evaluation.test_harness import killed_run
target = AutoModelForCausalLM.from_pretrained("target")
target.generation_config.eos_token_id = None
killed_run(target, AutoDrafter.from_pretrained("drafter"), "report.json")
"""


def killed_run(target, drafter, output):
    return evaluate(
        target, {"drafter": drafter}, output, [task(12, turns=2)], temperatures=(0.0, 1.0), batch_sizes=(1, 3)
    )


@pytest.mark.skipif(sys.platform == "win32", reason="kills")
def test_killed_run_goes_on(tmp_path, monkeypatch):
    """By SIGKILL."""
    save_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    root = str(Path(__file__).resolve().parents[2])
    journal = tmp_path / f"report.json{JOURNAL}"
    with open("log", "a+b") as log:
        command = [sys.executable, "-c", SCRIPT.format(root=root)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": root + "/src"})
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= 8):
            assert process.poll() is None, Path("log").read_text(encoding="utf-8")
            time.sleep(0.005)
        process.kill()
        process.wait()
    assert 8 <= journal.read_bytes().count(b"\n") < 32 and not (tmp_path / "report.json").exists()
    models = load_models("target", "drafter")
    report = killed_run(*models, tmp_path / "report.json")
    assert counts(report) == counts(killed_run(*models, tmp_path / "whole.json"))
    assert sum(row["answers"] for row in report["rows"]) == 4 * 24


def load_models(target, drafter):
    """The pair as a process of its own loads it."""
    from transformers import AutoModelForCausalLM

    from dspark_hf import AutoDrafter

    model = AutoModelForCausalLM.from_pretrained(target)
    model.generation_config.eos_token_id = None
    return model, AutoDrafter.from_pretrained(drafter)


def test_what_was_made_otherwise_is_refused(target, drafter, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    with pytest.raises(Broken):
        evaluate(target, drafter, path, progress=breaking_at(2))
    journal = (tmp_path / f"report.json{JOURNAL}").read_bytes()
    other_target = make_target()
    with torch.no_grad():
        other_target.model.layers[0].mlp.up_proj.weight += 0.1
    other_drafter = make_drafter(target)
    with torch.no_grad():
        other_drafter.fc.weight += 0.1
    tokenizer = make_tokenizer()
    tokenizer.chat_template = KEEPING
    for arguments, says in (
        ({"seed": 1}, "`seed` was 0 and is 1"),
        ({"temperatures": (1.0,)}, r"`temperatures` was \[0.0\] and is \[1.0\]"),
        ({"max_new_tokens": 13}, "`max_new_tokens` was 12 and is 13"),
        ({"confidence": False}, "`confidence` was True and is False"),
        ({"tasks": [task(4)]}, "`task task` was '3 questions"),
        ({"tasks": [task(name="other")]}, "`task task` was .* and is None"),
        ({"drafters": other_drafter}, "`drafter drafter` was"),
        ({"drafters": {"other": drafter}}, "`drafter other` was None"),
        ({"target": other_target}, "`weights` was"),
        ({"tokenizer": tokenizer}, "`chat_template` was None"),
    ):
        with pytest.raises(ValueError, match=f"`output` is .* whose rows were made otherwise: .*{says}"):
            evaluate(**{"target": target, "drafters": drafter, "output": path, **arguments})
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="`threads` was 1 and is 2"):
        evaluate(target, drafter, path)
    torch.set_num_threads(1)
    assert (tmp_path / f"report.json{JOURNAL}").read_bytes() == journal and not path.exists()
    assert evaluate(target, drafter, path)["rows"]


def test_another_file_is_not_written_over(target, drafter, tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(ValueError, match="mine.json', which exists and has no mine.json.journal.jsonl beside it"):
        evaluate(target, drafter, tmp_path / "mine.json")
    with pytest.raises(OSError, match="which is a folder; give a JSON file"):
        evaluate(target, drafter, tmp_path)
    assert (tmp_path / "mine.json").read_text() == "{}" and len(list(tmp_path.iterdir())) == 1


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperatures": ()}, "`temperatures` is empty"),
        ({"temperatures": (-1.0,)}, r"`temperatures` is \[-1.0\]; each must be 0"),
        ({"temperatures": (float("inf"),)}, "`temperatures` is"),
        ({"temperatures": (1.0, 1.0)}, "give each value once"),
        ({"batch_sizes": (0,)}, "`batch_sizes` is"),
        ({"num_draft_tokens": (0,)}, "`num_draft_tokens` is"),
        ({"thresholds": (1.5,)}, "`thresholds` is .*; each is a probability"),
        ({"schedulers": ("best",)}, "`schedulers` has 'best'; choose from auto"),
        ({"max_new_tokens": 1}, "`max_new_tokens` is 1; it must be at least 2"),
        ({"top_k": -1}, "`top_k` is -1"),
        ({"top_p": 0.0}, "`top_p` is 0.0"),
    ],
)
def test_settings_out_of_range(options, says):
    with pytest.raises(ValueError, match=says):
        EvaluationSettings(**options)


def test_what_cannot_be_measured_is_said_at_once(target, drafter, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    for arguments, says in (
        ({"drafters": {}}, "`drafters` is empty"),
        ({"schedulers": ("none", "hardware")}, "has not been measured. Run `dspark profile"),
        ({"drafters": make_drafter(make_target(hidden_size=32))}, "`hidden_size` is 32"),
        ({"tasks": [Task("t", (Question("x", (" ",)),), "here")]}, "The question 'x' of the task 't' has no token"),
        (
            {"tokenizer": tokenizer},
            "chat template fails on the question 'q0' .no.; leave the question out, or set `chat`",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            evaluate(**{"target": target, "drafters": drafter, "output": tmp_path / "report.json", **arguments})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="`tasks` is empty"):
        evaluate_drafters(target, {"d": drafter}, make_tokenizer(), [], tmp_path / "report.json")
