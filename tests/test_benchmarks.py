"""The benchmarks run on a small budget and write what the README quotes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dspark_hf.embedded import DRAFTER

from .scripts import ROOT, run_script


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark and reads its report."""

    def start(name: str, *arguments: str) -> dict:
        output = tmp_path / "report.json"
        run_script(f"benchmarks/{name}.py", *arguments, "--output", str(output))
        return json.loads(output.read_text(encoding="utf-8"))

    return start


@pytest.mark.slow
def test_embedded_pair(run):
    arguments = ("--prompts-per-kind=1", "--repeats=1", "--new-tokens=16", "--batch-size=3")
    report = run("embedded_pair", *arguments)
    assert len(report["rows"]) == 8
    assert all(row["accepted_length"] >= 1 and row["speedup_median"] > 0 for row in report["rows"])
    assert [row["identical_to_plain"] for row in report["rows"] if row["decoding"] == "greedy"] == [1, 1, 1, 3]


@pytest.mark.slow
def test_concurrency(run, tmp_path):
    arguments = ("--loads", "1", "2", "--tokens=4", "--least=4", "--repeats=1", "--profile-repeats=1")
    report = run("concurrency", *arguments)
    policies = 3 + json.loads((DRAFTER / "config.json").read_text(encoding="utf-8"))["block_size"]
    assert [row["load"] for row in report["rows"]] == [1] * policies + [2] * policies
    for row in report["rows"]:
        assert row["tokens_per_second"] > 0 and row["accepted_length"] >= 1
        assert row["policy"] != "plain" or (row["budget"], row["accepted_length"]) == (0, 1)
    assert (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.slow
def test_thresholds(run, tmp_path):
    arguments = ("--prompts-per-kind=1", "--new-tokens=16", "--thresholds", "0", "1")
    report = run("thresholds", *arguments)
    for nothing_cut, all_cut in zip(report["rows"][::2], report["rows"][1::2], strict=True):
        assert nothing_cut["verified_per_round"] > 2 > all_cut["verified_per_round"]
    assert (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.slow
def test_training_memory(tmp_path):
    arguments = (
        "--anchors=32",
        "--hidden-size=32",
        "--vocab-size=30000",
        "--rank=8",
        "--loss-memory=4",
        "--repeats=1",
    )
    output = tmp_path / "report.json"
    # In a process of its own, as its processes start from what this one has in memory.
    command = [sys.executable, str(ROOT / "benchmarks" / "training_memory.py"), *arguments, "--output", str(output)]
    subprocess.run(command, check=True)
    report = json.loads(output.read_text(encoding="utf-8"))
    chunked, full = report["rows"]
    assert chunked["loss"] == pytest.approx(full["loss"], rel=1e-5)
    assert all(error["norm"] < 1e-5 for error in report["gradient_errors"].values())
    # All logits of the 224 positions are 25.6 MiB a tensor.
    assert 0 < chunked["peak_mib"] < full["peak_mib"] / 2 and full["peak_mib"] > 4 * 25
    assert min(chunked["cpu_seconds_median"], full["cpu_seconds_median"]) > 0


@pytest.mark.slow
def test_state_storage(run):
    report = run("state_storage", "--steps=10", "--rows=16", "--held-out=4", "--length=40")
    rows = {row["variant"]: row for row in report["rows"]}
    assert rows["float32"]["largest_loss_difference"] == 0 < rows["bf16"]["largest_loss_difference"] < 1e-2
    assert rows["int8"]["bytes_per_token"] < rows["bf16"]["bytes_per_token"] < rows["float32"]["bytes_per_token"]


def test_readme_quotes_the_committed_results():
    report = json.loads((ROOT / "benchmarks" / "results" / "embedded_pair.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for row in report["rows"]:
        assert (
            f"| {row['decoding']} | {row['kind']} | {row['accepted_length']:.2f} | {row['speedup_median']:.2f}x |"
            in readme
        )
