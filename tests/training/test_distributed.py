from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("distributed_script.py")
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def train(target: Path, output: Path, launcher: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(SCRIPT), str(target), str(output)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    metrics = json.loads((output / "training_summary.json").read_text())["metrics"]
    names = ("train_loss", "eval_loss", "eval_tau", "eval_accept_rate@3")
    return load_file(output / "model.safetensors"), {name: metrics[name] for name in names}


@pytest.mark.slow
def test_two_processes_train_as_one(target_folder: Path, tmp_path: Path) -> None:
    one, metrics_of_one = train(target_folder, tmp_path / "one", [])
    two, metrics_of_two = train(target_folder, tmp_path / "two", LAUNCHER)
    assert metrics_of_two == pytest.approx(metrics_of_one, rel=1e-5)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-6, rtol=0)
