"""`dspark calibrate`: what it measures, what it writes, what it never overwrites, and how it fails."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from dspark_hf import AutoDrafter, DSparkConfig, get_drafter
from dspark_hf.cli.calibrate import (
    Prompt,
    _prefix_table,
    _token_table,
    encode_prompt,
    read_prompts,
    split_prompts,
)
from dspark_hf.embedded import DRAFTER, PROMPTS, TARGET
from dspark_hf.evaluation import calibration
from dspark_hf.evaluation.plots import can_plot

from ..parity.fixtures import FIXTURES
from .test_commands import make_drafter, make_target, make_tokenizer, run, save_pair

GAMMA = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved pair with a model card, a drafter without confidence head, and one of another target."""
    root = tmp_path_factory.mktemp("pair")
    target = save_pair(root)
    (root / "drafter" / "README.md").write_text("a card", encoding="utf-8")
    (root / "drafter" / "checkpoint-1").mkdir()
    config = DSparkConfig(block_size=GAMMA, num_hidden_layers=1, markov_rank=4, enable_confidence_head=False)
    get_drafter(target, config).save_pretrained(root / "headless")
    make_drafter(make_target(hidden_size=32)).save_pretrained(root / "other_drafter")
    return root


@pytest.fixture
def prompts(tmp_path):
    """A file of prompts of every form, one of them twice."""
    rows = [
        {"text": "w10 w20 w30", "id": 1},
        {"prompt": "w40 w50"},
        {"turns": ["w60 w70", "w80"]},
        {"text": "w90 w91 w92 w93"},
        {"text": "w10 w20 w30"},
    ]
    return write(tmp_path / "prompts.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def calibrate(folders, prompts, output, *flags, drafter="drafter", target="target"):
    pair = ["--target", folders / target, "--drafter", folders / drafter]
    options = ["--prompts", prompts, "--output", output, "--device", "cpu", "--max-new-tokens", 12]
    return run("calibrate", *pair, *options, *flags)


def temperatures_of(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["confidence_temperatures"]


def test_new_folder(folders, prompts, tmp_path):
    output = tmp_path / "made" / "calibrated"
    before = {path.name: path.read_bytes() for path in (folders / "drafter").iterdir() if path.is_file()}
    result = calibrate(folders, prompts, output, "--samples", 2)
    assert result.exit_code == 0, result.output
    # The drafter is whole, and the one that it was made from is as it was.
    assert {path.name: path.read_bytes() for path in (folders / "drafter").iterdir() if path.is_file()} == before
    figure = {"reliability.png"} if can_plot() else set()
    assert {path.name for path in output.iterdir()} == {*before, "calibration.json", *figure}
    assert {name for name, content in before.items() if (output / name).read_bytes() != content} == {"config.json"}
    drafter = AutoDrafter.from_pretrained(output)
    temperatures = drafter.config.confidence_temperatures
    assert len(temperatures) == GAMMA
    assert all(0.1 <= value <= 10 for value in temperatures)
    assert all((output / name).read_bytes().startswith(b"\x89PNG") for name in figure)
    report = json.loads((output / "calibration.json").read_text(encoding="utf-8"))
    assert report["temperatures"] == temperatures
    # Four different prompts; two texts each.
    assert (report["fitted_prompts"], report["heldout_prompts"]) == (2, 2)
    assert report["decoding"]["temperature"] == 1.0
    assert report["decoding"]["num_return_sequences"] == 2
    for part in ("before", "after"):
        assert [entry["position"] for entry in report[part]] == [1, 2, 3]
        assert report[part][0]["prefix"]["cases"] <= report["heldout_rounds"]
    errors = [entry["prefix"]["ece"] for entry in report["after"]]
    assert report["mean_ece"]["prefix"]["after"] == pytest.approx(sum(errors) / len(errors))
    for words in ("ECE", "Brier", "AUROC", "mean ECE of prefixes", "2 prompts that were not fitted to"):
        assert words in result.output
    assert str(output) in result.output


def test_tables_fit_a_narrow_terminal():
    """Nothing is cut or folded in 80 columns, not even with the widest numbers."""
    scores = calibration.Scores(cases=123456, share=1.0, ece=1.0, brier=0.25, auroc=1.0, chance_ece=1.0)
    entries = [calibration.PositionReport(position, scores, scores) for position in (1, 7)]
    console = Console(width=80, record=True)
    console.print(_token_table(entries, entries, [10.0, 0.1]))
    console.print(_prefix_table(entries, entries))
    text = console.export_text()
    assert "…" not in text
    # A title, two lines of headers, a rule and the rows.
    assert len([line for line in text.splitlines() if line.strip()]) == 2 * (4 + 2)
    for words in ("temperature", "survive", "123456", "100.0%", "before", "after", "chance", "AUROC"):
        assert words in text


def test_same_numbers_as_the_library(folders, prompts, tmp_path):
    flags = ["--temperature", 0, "--no-chat", "--bins", 5, "--fit-share", 0.75, "--seed", 3]
    result = calibrate(folders, prompts, tmp_path / "new", *flags)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "new" / "calibration.json").read_text(encoding="utf-8"))
    assert (report["fitted_prompts"], report["heldout_prompts"]) == (3, 1)
    texts, _ = split_prompts(read_prompts(str(prompts)), 0.75, 3)
    ids = [make_tokenizer()(prompt.text, return_tensors="pt").input_ids for prompt in texts]
    target = make_target()
    rounds = calibration.collect_observations(target, make_drafter(target), ids, max_new_tokens=12, do_sample=False)
    assert report["fitted_rounds"] == len(rounds.logits)
    assert report["temperatures"] == calibration.fit_temperatures(rounds, bins=5)


def test_in_place_and_again(folders, prompts, tmp_path):
    folder = tmp_path / "drafter"
    shutil.copytree(folders / "drafter", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = (folder / "model.safetensors").read_bytes()
    for _ in range(2):
        result = run(
            *("calibrate", "--target", folders / "target", "--drafter", folder, "--prompts", prompts),
            *("--output", f"{folder}/../drafter", "--device", "cpu", "--max-new-tokens", 8),
        )
        assert result.exit_code == 0, result.output
    temperatures = temperatures_of(folder)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == {
        **config,
        "confidence_temperatures": temperatures,
    }
    assert (folder / "model.safetensors").read_bytes() == weights
    assert (folder / "README.md").read_text(encoding="utf-8") == "a card"
    assert not list(folder.glob("*.new"))


def test_drafter_of_another_format(prompts, tmp_path):
    """Saved in our own format, at the precision that it had."""
    case = FIXTURES / "qwen3-dspark-vanilla"
    folders = tmp_path / "pair"
    folders.mkdir()
    shutil.copytree(case / "drafter", folders / "drafter")
    shutil.copytree(case / "target", folders / "target")
    make_tokenizer().save_pretrained(folders / "target")
    result = calibrate(folders, prompts, folders / "drafter")
    assert result.exit_code == 1
    assert "in another format than this package's; give a new folder" in result.stderr
    result = calibrate(folders, prompts, tmp_path / "new", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    drafter = AutoDrafter.from_pretrained(tmp_path / "new")
    assert len(drafter.config.confidence_temperatures) == 7
    stored, original = load_file(tmp_path / "new" / "model.safetensors"), load_file(case / "drafter/model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        name: tensor.dtype for name, tensor in original.items()
    }
    torch.testing.assert_close(stored["fc.weight"], original["fc.weight"])


def test_without_matplotlib(folders, prompts, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    result = calibrate(folders, prompts, tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert 'No reliability.png: it needs matplotlib, pip install "dspark-hf[plots]".' in result.output
    assert (tmp_path / "new" / "calibration.json").is_file()
    assert not (tmp_path / "new" / "reliability.png").exists()


def test_chat_template_is_for_what_a_user_says(folders, prompts):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}w7 {{ m.content }} w8{% endfor %}"
    texts = read_prompts(str(prompts))

    def shown(chat):
        return [tokenizer.decode(encode_prompt(tokenizer, text, chat, None)[0]) for text in texts]

    plain = ["w10 w20 w30", "w40 w50", "w60 w70", "w90 w91 w92 w93"]
    assert shown(False) == plain
    assert shown(True) == [f"w7 {text} w8" for text in plain]
    assert shown(None) == [plain[0], f"w7 {plain[1]} w8", f"w7 {plain[2]} w8", plain[3]]
    # A thinking mode is for those that have a template.
    assert [tokenizer.decode(encode_prompt(tokenizer, text, None, True)[0]) for text in texts] == shown(None)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_split(share):
    texts = [Prompt(f"w{index}", False) for index in range(20)]
    fitted, heldout = split_prompts(texts, share, seed=0)
    assert len(fitted) == {0.01: 1, 0.5: 10, 0.99: 19}[share]
    assert set(fitted) | set(heldout) == set(texts)
    assert not set(fitted) & set(heldout)
    assert split_prompts(texts, share, seed=0) == (fitted, heldout)
    assert split_prompts(texts, share, seed=1) != (fitted, heldout)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--fit-share", 0], "--fit-share is 0.0; give a share between 0 and 1"),
        (["--fit-share", 1], "--fit-share is 1.0"),
        (["--bins", 0], "--bins is 0"),
        (["--samples", 0], "--samples is 0"),
        (["--samples", 2, "--temperature", 0], "at --temperature 0 all would be the same"),
        (["--temperature", -1], "--temperature is -1.0"),
        (["--max-new-tokens", 0], "--max-new-tokens is 0"),
        (["--max-new-tokens", 2], "--max-new-tokens of 3 or more"),
        (["--dtype", "float8"], "--dtype is 'float8'"),
        (["--device", "nowhere"], "--device is 'nowhere'"),
        (["--chat"], "no chat template"),
        (["--no-thinking"], "--no-thinking is for a chat template, and the target's tokenizer has none"),
    ],
    ids=str,
)
def test_options_out_of_range(folders, prompts, tmp_path, flags, says):
    assert_one_line(calibrate(folders, prompts, tmp_path / "new", *flags), says)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drafter": "absent"}, "absent'; --drafter takes a folder"),
        ({"drafter": "headless"}, "no confidence head"),
        ({"drafter": "other_drafter"}, "`hidden_size` is 32"),
        ({"drafter": "target"}, "is a qwen3 language model, not a drafter"),
        ({"target": "absent"}, "absent'; --target takes a folder"),
        ({"target": "drafter"}, "is a drafter, not a target"),
    ],
    ids=str,
)
def test_wrong_models(folders, prompts, tmp_path, changes, says):
    assert_one_line(calibrate(folders, prompts, tmp_path / "new", **changes), says)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "with 0 different prompts; give at least 2"),
        ('{"text": "w10"}\n{"text": "w10"}\n', "with 1 different prompts"),
        ('{"text": "w10"}\nnonsense\n', "Line 2 of"),
        ('{"text": "w10"}\n\n[1]\n', "Line 3 of"),
        ('{"text": "w10"}\n{"id": 1}\n', "has none of the columns `text`, `prompt` and `turns`"),
        ('{"text": "w10"}\n{"text": 3}\n', "has 3 as `text`; it must be a text, not empty"),
        ('{"text": "w10"}\n{"prompt": ""}\n', "has '' as `prompt`"),
        ('{"text": "w10"}\n{"turns": []}\n', "has [] as `turns`; it must be a list of texts"),
        ('{"text": "w10"}\n{"turns": [{"role": "user"}]}\n', "it must be a list of texts"),
        ('{"text": "w10"}\n{"text": " "}\n', "The prompt ' ' has no token"),
    ],
)
def test_wrong_prompts(folders, tmp_path, text, says):
    path = write(tmp_path / "prompts.jsonl", text)
    assert_one_line(calibrate(folders, path, tmp_path / "new"), says)
    assert not (tmp_path / "new").exists()


def test_wrong_files(folders, prompts, tmp_path):
    assert_one_line(calibrate(folders, tmp_path / "absent", tmp_path / "new"), "which is no file that exists")
    assert_one_line(calibrate(folders, tmp_path, tmp_path / "new"), "which is a folder")
    (tmp_path / "latin").write_bytes(b'{"text": "caf\xe9"}\n')
    assert_one_line(calibrate(folders, tmp_path / "latin", tmp_path / "new"), "no text in UTF-8")
    # Nothing is written over.
    assert_one_line(calibrate(folders, prompts, prompts), "which is a file; give a folder")
    assert_one_line(calibrate(folders, prompts, tmp_path), "which is not empty; give a new folder")
    # Said before anything is loaded.
    assert_one_line(calibrate(folders, prompts, prompts / "new", target="absent"), "prompts.jsonl' is a file; give a")
    assert_one_line(calibrate(folders, prompts, "", target="absent"), "--output is empty; give a folder")


def assert_one_line(result, says):
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, result.stderr
    assert says in lines[0]
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_embedded_pair(tmp_path):
    rows = PROMPTS.read_text(encoding="utf-8").splitlines()[::20]
    prompts = write(tmp_path / "prompts.jsonl", "\n".join(rows))
    pair = ["--target", TARGET, "--drafter", DRAFTER, "--device", "cpu"]
    options = ["--prompts", prompts, "--output", tmp_path / "new", "--max-new-tokens", 24]
    result = run("calibrate", *pair, *options)
    assert result.exit_code == 0, result.output
    block_size = json.loads((DRAFTER / "config.json").read_text(encoding="utf-8"))["block_size"]
    assert len(temperatures_of(tmp_path / "new")) == block_size
