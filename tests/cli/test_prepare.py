"""`dspark prepare`: what it writes and prints, that `dspark train` takes it, and how it fails."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from ..data.stand_in import StandIn
from ..data.test_prepare import CHAT, KEEPING
from .test_commands import make_drafter, make_target, make_tokenizer, run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target, tokenizer = make_target(), make_tokenizer()
    tokenizer.chat_template = KEEPING
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    make_drafter(target).save_pretrained(root / "drafter")
    return root


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"messages": CHAT}, {"prompt": "w20"}, {"text": "w21 w22"}, {"text": ""}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(folders, output, *flags):
    return run("prepare", "--target", folders / "target", "--output", output, *flags)


def sources(path):
    return sorted(json.loads(line)["source"] for line in path.read_text(encoding="utf-8").splitlines())


def test_prepare_and_train(folders, prompts, tmp_path):
    output = tmp_path / "train.jsonl"
    flags = ["--prompts", prompts, "--drafter", folders / "drafter", "--device", "cpu", "--max-new-tokens", 8]
    result = prepare(folders, output, *flags)
    assert result.exit_code == 0, result.output
    assert "3 rows written, 0 skipped (of earlier runs: 0 written, 0 failed), 1 failed" in result.output
    assert "24 tokens in" in result.output and "1 × empty `text` (first: line 4)" in result.output
    assert (
        f"The data is in {output}." in result.output and f"Failed rows are in {output}.failed.jsonl" in result.output
    )
    assert sources(output) == [1, 2, 3]
    result = prepare(folders, output, *flags)
    assert "0 rows written, 4 skipped (of earlier runs: 3 written, 1 failed), 0 failed" in result.output
    shape = ["--drafter-layers", 1, "--block-size", 3, "--markov-rank", 4, "--num-anchors", 4, "--mask-token-id", 0]
    result = run(
        *("train", "--target", folders / "target", "--data", output, "--output", tmp_path / "drafter"),
        *(*shape, "--max-steps", 5, "--batch-size", 2),
    )
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "drafter" / "training_summary.json").read_text())
    assert (summary["data"]["rows"], summary["data"]["skipped"], summary["data"]["trained_tokens"]) == (3, {}, 24)


def test_server_and_dataset(folders, tmp_path):
    """A folder of the Hub's layout, a server that has the target under another name."""
    (tmp_path / "data").mkdir()
    Dataset.from_list([{"prompt": f"w{20 + index}"} for index in range(4)]).to_parquet(tmp_path / "data/train.parquet")
    output = tmp_path / "train.jsonl"
    with StandIn(key="secret") as server:
        flags = ["--dataset", tmp_path / "data", "--base-url", server.url, "--api-key", "secret", "--concurrency", 2]
        result = prepare(folders, output, *flags)
        assert result.exit_code == 1
        assert "Error: " in result.stderr and "give the name under which it serves the target as --served-model" in (
            result.stderr
        )
        result = prepare(folders, output, *flags, "--served-model", "tiny", "--samples", 2)
        assert result.exit_code == 0, result.output
    assert sources(output) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert "8 rows written" in result.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "Give either --prompts, a JSON Lines file, or --dataset."),
        (["--prompts", "nowhere.jsonl"], "--prompts is 'nowhere.jsonl', and there is no such file"),
        (["--prompts", "."], "--prompts is '.', which is a folder; give a JSON Lines file"),
        (["--prompts", __file__, "--temperature", -1], "--temperature is -1.0"),
        (["--prompts", __file__, "--max-new-tokens", 0], "--max-new-tokens is 0"),
        (["--prompts", __file__, "--samples", 0], "--samples is 0"),
        (["--prompts", __file__, "--dtype", "float8"], "--dtype is 'float8'"),
        (["--prompts", __file__, "--served-model", "x"], "give --base-url, too"),
        (["--prompts", __file__, "--base-url", "localhost"], "--base-url is 'localhost'; give one such as"),
        (["--prompts", __file__, "--base-url", "http://x", "--drafter", "y"], "leave it out with --base-url"),
        (
            ["--prompts", __file__, "--base-url", "http://127.0.0.1:9/v1"],
            "No server answers at 'http://127.0.0.1:9/v1'",
        ),
        (["--prompts", __file__, "--target", "./nope"], "There is no folder './nope'; --target takes"),
        (["--prompts", __file__, "--output", "."], "--output is '.', which is a folder; give a JSON Lines file"),
    ],
    ids=str,
)
def test_user_errors_are_one_line(folders, tmp_path, flags, says):
    result = prepare(folders, tmp_path / "out.jsonl", *flags)
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert says in line and "Traceback" not in result.output


def test_empty_prompts_are_refused_before_the_target_is_loaded(folders, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    result = prepare(folders, tmp_path / "out.jsonl", "--prompts", tmp_path / "in.jsonl", "--target", "./nope")
    assert result.exit_code == 1 and "in.jsonl', which has no rows: the file is empty" in result.stderr


def test_no_row_could_be_answered(folders, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n')
    result = prepare(folders, tmp_path / "out.jsonl", "--prompts", tmp_path / "in.jsonl", "--device", "cpu")
    assert result.exit_code == 1
    assert "1 × empty `text` (first: line 1)" in result.output
    assert "Error: No row could be answered." in result.stderr
