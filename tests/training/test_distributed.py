from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from dspark_hf.training import load_target
from dspark_hf.training.sharding import shard_layers

from .distributed_script import train

SCRIPT = Path(__file__).with_name("distributed_script.py")
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Trained(NamedTuple):
    losses: list[float]  # of each optimiser step
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]


def run(target: Path, output: Path) -> None:
    """In two processes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *LAUNCHER, str(SCRIPT), str(target), str(output)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]


def read(folder: Path) -> Trained:
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    metrics = json.loads((folder / "training_summary.json").read_text())["metrics"]
    names = ("train_loss", "eval_loss", "eval_tau", "eval_accept_rate@3")
    return Trained(
        [entry["loss"] for entry in log if "loss" in entry],
        {name: metrics[name] for name in names},
        load_file(folder / "model.safetensors"),
    )


@pytest.mark.slow
def test_two_processes_train_as_one(target_folder: Path, tmp_path: Path) -> None:
    """The same losses at every step, whether the target is whole in each process or in pieces over both.

    So it is with blocks at anchors and with steps from every position.
    """
    for name, kind in (("whole", "vanilla"), ("eagle3", "eagle3")):
        train(str(target_folder), tmp_path / "one" / name, processes=1, kind=kind)
    run(target_folder, tmp_path / "two")
    for name, same in (("whole", "whole"), ("sharded", "whole"), ("eagle3", "eagle3")):
        one = read(tmp_path / "one" / same)
        assert len(one.losses) == 6 and len(set(one.losses)) == 6
        two = read(tmp_path / "two" / name)
        assert two.losses == pytest.approx(one.losses, rel=1e-5)
        assert two.metrics == pytest.approx(one.metrics, rel=1e-5)
        assert two.weights.keys() == one.weights.keys()
        for parameter, weight in one.weights.items():
            torch.testing.assert_close(two.weights[parameter], weight, atol=1e-6, rtol=0)


def test_one_process_has_nothing_to_spread_over(target_folder: Path) -> None:
    with pytest.raises(ValueError, match="`target_device_map` is 'fsdp', which needs several processes"):
        load_target(target_folder, device_map="fsdp")


def test_what_cannot_be_spread_is_refused(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sharding", "run"):
        monkeypatch.setattr(f"dspark_hf.training.{name}.world_size", lambda: 2)
    target, _ = load_target(target_folder)
    target._no_split_modules = None
    with pytest.raises(ValueError, match="Qwen3ForCausalLM names no layers"):
        shard_layers(target)
    with pytest.raises(ValueError, match="`target_device_map` is 'auto' in 2 processes"):
        load_target(target_folder, device_map="auto")


def test_device_map_of_one_process(target_folder: Path) -> None:
    for device_map in ("auto", "cpu", torch.device("cpu")):
        assert load_target(target_folder, device_map=device_map)[0].device.type == "cpu"
    with pytest.raises(ValueError, match="'auto', 'balanced'"):
        load_target(target_folder, device_map="nonsense")
