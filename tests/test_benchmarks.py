"""The benchmarks run on a small budget and write what the README quotes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_embedded_pair(tmp_path):
    output = tmp_path / "report.json"
    options = {"prompts-per-kind": 1, "repeats": 1, "new-tokens": 16, "batch-size": 3, "output": output}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "embedded_pair.py"), *arguments], check=True)
    report = json.loads(output.read_text(encoding="utf-8"))
    assert len(report["rows"]) == 8
    assert all(row["accepted_length"] >= 1 and row["speedup_median"] > 0 for row in report["rows"])
    assert [row["identical_to_plain"] for row in report["rows"] if row["decoding"] == "greedy"] == [1, 1, 1, 3]


def test_readme_quotes_the_committed_results():
    report = json.loads((ROOT / "benchmarks" / "results" / "embedded_pair.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for row in report["rows"]:
        assert (
            f"| {row['decoding']} | {row['kind']} | {row['accepted_length']:.2f} | {row['speedup_median']:.2f}x |"
            in readme
        )
