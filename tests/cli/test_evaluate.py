"""`dspark eval`: what it writes and prints, how it takes lists, goes on after a break, and fails."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.cli.evaluate import confidence_table, figures_tables, name_drafters
from dspark_hf.embedded import DRAFTER, TARGET
from dspark_hf.evaluation.plots import can_plot, plot_evaluation

from .test_commands import make_drafter, make_target, run, save_pair

FIGURES = ("accepted-length", "speed", "acceptance", "draft-lengths", "thresholds")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pair, a second drafter with a longer block, one of another target, and two tasks."""
    root = tmp_path_factory.mktemp("pair")
    target = save_pair(root)
    torch.manual_seed(1)
    config = DSparkConfig(block_size=5, num_hidden_layers=1, markov_rank=4, mask_token_id=0)
    get_drafter(target, config).save_pretrained(root / "longer")
    make_drafter(make_target(hidden_size=32)).save_pretrained(root / "other")
    (root / "prompts").mkdir()
    for name, rows in {
        "gsm8k": [{"id": f"g{index}", "turns": [f"w{10 + index} w20", "w30"]} for index in range(3)],
        "mine": [{"text": "w40 w41 w42"}, {"prompt": "w50"}],
    }.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (root / "prompts" / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return root


def evaluate(folders, output, *flags, drafters=("drafter",), target="target", prompts="prompts", columns=400):
    pair = ["--target", folders / target, *(part for name in drafters for part in ("--drafter", folders / name))]
    given = [] if prompts is None else ["--prompts", folders / prompts]
    options = [*given, "--output", output, "--device", "cpu", "--max-new-tokens", 8]
    return run("eval", *pair, *options, *flags, columns=columns)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_report_tables_and_figures(folders, tmp_path):
    output = tmp_path / "made" / "report.json"
    lists = (
        "--tasks",
        "gsm8k",
        "mine",
        "--temperatures",
        "0",
        "1",
        "--num-draft-tokens",
        "2,5",
        "--thresholds",
        0,
        0.5,
    )
    result = evaluate(folders, output, *lists, drafters=("drafter", "longer"))
    assert result.exit_code == 0, result.output
    report = read(output)
    assert list(report["drafters"]) == ["drafter", "longer"]
    assert list(report["tasks"]) == ["gsm8k", "mine"]
    assert report["settings"]["temperatures"] == [0.0, 1.0] and report["settings"]["thresholds"] == [0.0, 0.5]
    # Two tasks and temperatures; blocks of 3 allow one of the lengths, of 5 both; two thresholds.
    assert len(report["rows"]) == 2 * 2 * (1 + 2) * 2
    greedy = [row for row in report["rows"] if row["temperature"] == 0]
    assert all(row["identical_to_plain"] == row["answers"] > 0 for row in greedy)
    for words in ("gsm8k", "mine", "drafts", "below", "6/6", "2/2", "ECE", f"The report is in {output}."):
        assert words in result.output
    assert "batch" not in result.output.split("accepted length:")[0]  # only what differs
    figures = [output.parent / f"report-{name}.png" for name in FIGURES] if can_plot() else []
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
    assert {path.name for path in output.parent.iterdir()} == {
        *(path.name for path in figures),
        *("report.json", "report.json.journal.jsonl", "report.json.manifest.json", "report.json.lock"),
    }
    # Again: nothing is measured, and all is written as it was.
    before = output.read_bytes()
    again = evaluate(folders, output, *lists, drafters=("drafter", "longer"))
    assert again.exit_code == 0 and output.read_bytes() == before


@pytest.mark.parametrize(
    "flags",
    [
        ("--temperatures", "0", "0.5", "--batch-sizes", "1", "2"),
        ("--temperatures", "0,0.5", "--batch-sizes=1,2"),
        ("--temperatures=0", "0.5", "--batch-sizes", "1,", "2"),
    ],
    ids=str,
)
def test_lists_by_commas_and_spaces(folders, tmp_path, flags):
    result = evaluate(folders, tmp_path / "report.json", *flags, "--tasks", "mine", "--no-confidence")
    assert result.exit_code == 0, result.output
    settings = read(tmp_path / "report.json")["settings"]
    assert (settings["temperatures"], settings["batch_sizes"]) == ([0.0, 0.5], [1, 2])
    assert "batch" in result.output and "ECE" not in result.output
    sampled = evaluate(folders, tmp_path / "sampled.json", "--tasks", "mine", "--temperatures", 1)
    assert "2/2" in result.output and "same" not in sampled.output.split("accepted length:")[0]


def test_all_tasks_of_a_folder_and_limits(folders, tmp_path):
    flags = ("--limit", 1, "--turns", 1, "--temperatures", 0)
    result = evaluate(folders, tmp_path / "report.json", *flags)
    assert result.exit_code == 0, result.output
    tasks = read(tmp_path / "report.json")["tasks"]
    assert {name: (entry["questions"], entry["turns"]) for name, entry in tasks.items()} == {
        **{"gsm8k": (1, 1), "mine": (1, 1)},
    }


def test_without_matplotlib(folders, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    result = evaluate(folders, tmp_path / "report.json", "--tasks", "mine", "--temperatures", 0)
    assert result.exit_code == 0, result.output
    assert 'No figures: they need matplotlib, pip install "dspark-hf[plots]".' in result.output
    assert not list(tmp_path.glob("*.png"))


def test_tables_fit_a_narrow_terminal(folders, tmp_path):
    """Nothing but a drafter's name is folded in 80 columns, and nothing is cut."""
    flags = ("--num-draft-tokens", "2,3", "--thresholds", "0,0.5", "--temperatures", "0,1", "--tasks", "mine")
    result = evaluate(folders, tmp_path / "report.json", *flags, drafters=("drafter", "longer"), columns=80)
    assert result.exit_code == 0, result.output
    table = result.output[result.output.index("accepted") : result.output.index("how well confidences fit")]
    assert "…" not in result.output.split("The report")[0]
    # A second line of headers, a rule, and for each of 16 rows its figures and their intervals.
    assert len([line for line in table.splitlines() if line.strip()]) == 1 + 1 + 1 + 2 * 16


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/drafter"], ["drafter"]),
        (["a/drafter", "b/drafter/"], ["a/drafter", "b/drafter"]),
        (["org/one", "org/two"], ["one", "two"]),
        (["x/a/d", "x/b/d", "x/c"], ["a/d", "b/d", "x/c"]),
        (["d", "a/d"], ["d", "a/d"]),
    ],
)
def test_short_names(paths, names):
    assert name_drafters(paths) == names


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--temperatures", "0,hot"], "--temperatures is '0,hot'; give numbers separated by commas or spaces"),
        (["--batch-sizes", "1.5"], "--batch-sizes is '1.5'; give whole numbers"),
        (["--batch-sizes", "0"], "--batch-sizes is [0]; each must be at least 1"),
        (["--temperatures", ","], "--temperatures is empty"),
        (["--thresholds", "2"], "--thresholds is [2.0]; each is a probability"),
        (["--schedulers", "best"], "--schedulers has 'best'; choose from"),
        (["--num-draft-tokens", "9"], "--num-draft-tokens is [9], and the drafter 'drafter' drafts at most 3"),
        (["--max-new-tokens", 1], "--max-new-tokens is 1; it must be at least 2"),
        (["--limit", 0], "--limit is 0"),
        (["--turns", 0], "--turns is 0"),
        (["--top-p", 0], "--top-p is 0.0"),
        (["--dtype", "float8"], "--dtype is 'float8'"),
        (["--device", "nowhere"], "--device is 'nowhere'"),
        (["--seed", -1], "--seed is -1"),
        (["--tasks", "gsm9k"], "'gsm9k' in --tasks is none of embedded,"),
        (["--tasks", "mbpp"], "The task 'mbpp' cannot be read from the Hub"),
        (["--tasks", "nowhere.jsonl"], "There is no file 'nowhere.jsonl'"),
        (["--chat"], "--chat was given, but the target's tokenizer has no chat template"),
        (["--no-thinking"], "--no-thinking is for a chat template"),
        (["--output", "."], "--output is '.', which is a folder; give a JSON file"),
    ],
    ids=str,
)
def test_options_out_of_range(folders, tmp_path, monkeypatch, flags, says):
    monkeypatch.chdir(tmp_path)
    assert_one_line(evaluate(folders, tmp_path / "report.json", *flags), says)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drafters": ("absent",)}, "absent'; --drafter takes a folder"),
        ({"drafters": ("drafter", "other")}, "`hidden_size` is 32"),
        ({"drafters": ("drafter", "drafter")}, "--drafter has one drafter several times"),
        ({"drafters": ("target",)}, "not a drafter"),
        ({"target": "absent"}, "absent'; --target takes a folder"),
        ({"target": "drafter"}, "is a drafter, not a target"),
        ({"prompts": "absent"}, "absent', and there is no such file or folder"),
        ({"prompts": None}, "--tasks is empty; name tasks"),
    ],
    ids=str,
)
def test_wrong_models_and_files(folders, tmp_path, changes, says):
    assert_one_line(evaluate(folders, tmp_path / "report.json", **changes), says)
    assert not list(tmp_path.iterdir())


def test_other_settings_and_other_files_are_refused(folders, tmp_path):
    output, flags = tmp_path / "report.json", ("--tasks", "mine", "--temperatures", 0, "--no-confidence")
    assert evaluate(folders, output, *flags).exit_code == 0
    before = output.read_bytes()
    for more, says in (
        (("--seed", 1), "`seed` was 0 and is 1. Give another file, or run it as before."),
        (("--max-new-tokens", 9), "--max-new-tokens was 8 and is 9"),
        (("--thresholds", "0,0.5"), "--thresholds was [0.0] and is [0.0, 0.5]"),
    ):
        assert_one_line(evaluate(folders, output, *flags, *more), says)
    assert output.read_bytes() == before
    shutil.copy(output, tmp_path / "copy.json")
    assert_one_line(evaluate(folders, tmp_path / "copy.json", *flags), "copy.json', which exists and has no")


def assert_one_line(result, says):
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert says in line
    assert "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.skipif(not can_plot(), reason="needs matplotlib")
def test_embedded_pair(tmp_path):
    """Tables and figures of real figures, and of many: nine tasks, three drafters."""
    pair = ["--target", TARGET, "--drafter", DRAFTER, "--device", "cpu"]
    options = ["--tasks", "embedded", "--limit", 2, "--max-new-tokens", 16, "--output", tmp_path / "report.json"]
    result = run("eval", *pair, *options)
    assert result.exit_code == 0, result.output
    report = read(tmp_path / "report.json")
    assert len(report["rows"]) == 6 and len(figures_tables(report)) == 3 and confidence_table(report).row_count == 6
    names = ("gsm8k", "math500", "aime25", "mbpp", "humaneval", "livecodebench", "mt-bench", "alpaca", "arena-hard")
    rows = [
        {**report["rows"][number % 6], "task": task, "temperature": temperature, "drafter": drafter}
        for number, (task, temperature, drafter) in enumerate(
            (task, temperature, drafter)
            for task in names
            for temperature in (0.0, 1.0)
            for drafter in ("eagle3", "dflash", "dspark")
        )
    ]
    for path in plot_evaluation({**report, "rows": rows}, tmp_path / "many.json"):
        assert path.stat().st_size > 10_000
