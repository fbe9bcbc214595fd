"""A run that is killed goes on as if nothing had been; half precision and checkpointing of activations."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import PreTrainedModel
from typer.testing import CliRunner

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.cli import app
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments, find_checkpoint

# Kills itself as nothing else can be killed, so that no clean-up runs, at a step that is no checkpoint's.
KILLED_AT_STEP_7 = """
import os, signal, sys
from transformers import Trainer
from dspark_hf.cli import main

compute_loss = Trainer.get_batch_samples

def get_batch_samples(self, *args):
    if self.state.global_step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return compute_loss(self, *args)

Trainer.get_batch_samples = get_batch_samples
main()
"""


def command(target: Path, data: Path, output: Path) -> list[str]:
    options = ["--target", target, "--data", data, "--output", output, "--max-steps", 12, "--save-steps", 3]
    options += ["--drafter-layers", 1, "--block-size", 4, "--markov-rank", 8, "--num-anchors", 6, "--batch-size", 3]
    options += ["--gradient-accumulation", 2, "--logging-steps", 1, "--use-cpu", "--disable-tqdm=true"]
    return ["train", *map(str, options)]


def invoke(options: list[str]) -> None:
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output


def losses(folder: Path) -> list[float]:
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


@pytest.mark.slow
def test_killed_run_ends_with_the_weights_of_an_unbroken_one(
    target_folder: Path, dataset: Dataset, tmp_path: Path
) -> None:
    """Bit for bit, on one CPU process; the kill comes in the middle of an epoch and after a checkpoint."""
    data = tmp_path / "rows.jsonl"
    dataset.to_json(data)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    invoke(command(target_folder, data, unbroken))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT_STEP_7, *command(target_folder, data, broken)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not (broken / "model.safetensors").exists()
    assert {path.name for path in broken.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6"}
    invoke([*command(target_folder, data, broken), "--resume"])
    assert losses(broken) == losses(unbroken)
    weights, expected = (load_file(folder / "model.safetensors") for folder in (broken, unbroken))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def make_trainer(target: PreTrainedModel, dataset: Dataset, folder: Path, **options: Any) -> DSparkTrainer:
    torch.manual_seed(0)
    drafter = get_drafter(target, DSparkConfig(num_hidden_layers=2, markov_rank=8, block_size=4))
    args = DSparkTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_anchors=6,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return DSparkTrainer(drafter.float(), target, args, dataset)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, reentrant: bool
) -> None:
    """One step of plain SGD is the gradient."""
    step = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "warmup_steps": 0, "max_grad_norm": 0.0}
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain, again = (make_trainer(target, dataset, tmp_path, **step, **more) for more in ({}, checkpointing))
    before = plain.model.fc.weight.detach().clone()
    assert (count_layer_calls(plain), count_layer_calls(again)) == (2, 4), "layers are computed again"
    assert not torch.equal(plain.model.fc.weight, before)
    for (name, weight), other in zip(plain.model.named_parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(other, weight, atol=1e-6, rtol=1e-5, msg=name)


def count_layer_calls(trainer: DSparkTrainer) -> int:
    """Trains, and counts how often a layer begins to be computed."""
    calls: list[int] = []
    for layer in trainer.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(0))
    trainer.train()
    return len(calls)


def test_bf16_with_checkpointing_learns(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    trainer = make_trainer(
        target, dataset, tmp_path, bf16=True, gradient_checkpointing=True, max_steps=16, learning_rate=3e-3
    )
    trainer.train()
    log = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(log[-4:]) < 0.98 * sum(log[:4])
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}, "weights stay float32"


def test_part_of_a_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """As a kill leaves it while the checkpoint is written."""
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-11").mkdir()
    assert find_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_trained_drafter_is_not_overwritten(tmp_path: Path, name: str) -> None:
    assert find_checkpoint(str(tmp_path), resume=False) is None
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(ValueError, match=f"`output_dir` is .*has a drafter .{name}. that would be overwritten"):
        find_checkpoint(str(tmp_path), resume=False)
