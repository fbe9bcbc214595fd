"""Predictions of memory and disk, checked where they claim to be exact; recipes and Accelerate's configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import TrainingArguments
from typer.testing import CliRunner

from dspark_hf import DSparkConfig, DSparkDrafter, Eagle3Config, MTPConfig, get_drafter
from dspark_hf.cli import app
from dspark_hf.cli.plan import SEQUENCES, TARGETS_FILE, TOKENS, _without_weights, predict_recipe, with_prediction
from dspark_hf.factory import complete_config
from dspark_hf.training.planning import (
    GPU,
    Rows,
    Run,
    cached_states,
    drafter_memory,
    drafter_parameters,
    optimizer_bytes,
    rows,
    target_size,
)
from dspark_hf.training.recipe import RecipeParser
from dspark_hf.training.sharding import check_wrapping

from ..targets import make_target

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = sorted((EXAMPLES / "recipes").glob("*.yaml"))
KNOWN = EXAMPLES / "recipes" / TARGETS_FILE
RUN = Run(8, 1, 4096, 512, 10, TOKENS, SEQUENCES, 512.0)

# As the model cards count them.
PARAMETERS = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "google/gemma-3-4b-it": 4_300_079_472,
}


@pytest.mark.parametrize(
    "family, options",
    [
        ("qwen3", {}),
        ("qwen3", {"markov_head_type": "gated", "num_hidden_layers": 3, "attention_bias": True}),
        ("gemma3_text", {"markov_head_type": "rnn", "confidence_head_with_markov": False}),
        ("gemma4_text", {"markov_rank": 0}),
        ("gpt2", {"enable_confidence_head": False, "target_layer_ids": [1]}),
        ("qwen3_moe", {"draft_vocab_size": 40}),
        ("qwen3", {"kind": Eagle3Config, "num_hidden_layers": 2, "attention_bias": True}),
        ("gemma4_text", {"kind": Eagle3Config}),
        ("qwen3", {"kind": Eagle3Config, "draft_vocab_size": 40, "share_target_head": False, "head_norms": False}),
        ("qwen3", {"kind": MTPConfig}),
        ("gemma3_text", {"kind": MTPConfig, "block_size": 3}),
    ],
)
def test_parameters_are_counted_exactly(family: str, options: dict[str, Any]) -> None:
    options = dict(options)
    kind = options.pop("kind", DSparkConfig)
    config = kind(**{**({"markov_rank": 8} if kind is DSparkConfig else {}), **options})
    tokens = range(40) if "draft_vocab_size" in options else None
    drafter = get_drafter(make_target(family), config, draft_tokens=tokens)
    assert drafter_parameters(drafter.config) == sum(parameter.numel() for parameter in drafter.parameters())


def test_optimizer_and_gradients_are_counted_exactly() -> None:
    drafter = get_drafter(make_target("qwen3"), DSparkConfig(markov_rank=8)).float()
    optimizer = torch.optim.AdamW(drafter.parameters())
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    count = drafter_parameters(drafter.config)
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
    assert sum(value.nbytes for value in states) == optimizer_bytes() * count
    held = sum(parameter.nbytes + parameter.grad.nbytes for parameter in drafter.parameters())
    # Alone on one GPU: all of these and a copy in bf16.
    assert drafter_memory(count, Run(1, 1, 8, 1, 1, 8, 1, 1.0)) == held + (optimizer_bytes() + 2) * count


def test_targets_are_those_of_the_model_cards() -> None:
    for name, parameters in PARAMETERS.items():
        assert target_size(_without_weights(name, KNOWN)).parameters == parameters


def test_active_parameters() -> None:
    target = make_target("qwen3_moe")
    size = target_size(target)
    experts = sum(p.numel() for name, p in target.named_parameters() if ".experts." in name)
    assert size.in_layers == size.parameters - 2 * target.lm_head.weight.numel(), "all but embeddings and LM head"
    assert size.active == size.in_layers - experts // 2, "two of four experts"


def test_cached_states_are_those_that_deepspec_states() -> None:
    """38 TB for Qwen3-4B; the tokens of the data were found by this."""
    config = complete_config(_without_weights("Qwen/Qwen3-4B", KNOWN))
    assert cached_states(config, RUN) == pytest.approx(38e12, rel=0.01)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_carries_its_prediction(recipe: Path) -> None:
    prediction, assumed = predict_recipe(recipe, 8, TOKENS, SEQUENCES, GPU())
    text = recipe.read_text()
    assert with_prediction(text, prediction, assumed) == text, "run `dspark plan examples/recipes --write`"
    drafter_args, data_args, training_args = RecipeParser().parse(["--recipe", str(recipe), "--use_cpu"])
    batch = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps
    assert 8 * batch == 512 and training_args.num_train_epochs == 10 and training_args.bf16
    assert recipe.stem in data_args.data_file
    assert recipe.stem.replace("_", "").replace(".", "") == "".join(
        part for part in drafter_args.target.split("/")[1].lower().removesuffix("-it").replace(".", "").split("-")
    )
    target = _without_weights(drafter_args.target, KNOWN)
    config = complete_config(target, drafter_args.drafter_config())
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    assert prediction.parameters == sum(parameter.numel() for parameter in drafter.parameters())
    assert prediction.memory < 80e9 and prediction.activation_memory > 0 and prediction.hours > 0


def test_other_methods_are_predicted(tmp_path: Path) -> None:
    """What differs: no blocks at anchors but all positions, as often as tokens are drafted."""
    shutil.copy(KNOWN, tmp_path)
    predictions = {}
    for method, block_size in (("dspark", 7), ("dflash", 7), ("eagle3", 7), ("eagle3", 1), ("mtp", 1)):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"target: Qwen/Qwen3-8B\nmethod: {method}\nblock_size: {block_size}\nbf16: true\n")
        predictions[method, block_size], _ = predict_recipe(recipe, 8, TOKENS, SEQUENCES, GPU())
    long, short = predictions["eagle3", 7], predictions["eagle3", 1]
    assert long.parameters == short.parameters < predictions["dflash", 7].parameters
    assert long.activation_memory > 5 * short.activation_memory
    assert long.hours > 2 * short.hours
    # Three captured layers and the last one, or the last one twice.
    assert predictions["mtp", 1].cached_states == pytest.approx(long.cached_states / 2, rel=1e-3)
    for prediction in predictions.values():
        assert 0 < prediction.hours < 200 and prediction.memory > prediction.target_memory


def test_rows_by_hand() -> None:
    """Of the mask, and of the anchor's slot where it predicts nothing."""
    ours, other = (DSparkConfig(block_size=3, sample_from_anchor=each) for each in (True, False))
    assert rows(ours, length=10, num_anchors=2) == Rows(6, 6, 16, 6, 10)
    assert rows(other, length=10, num_anchors=2) == Rows(8, 6, 18, 8, 10)
    # Steps of 10 rows that see 10, 20 and 30 keys.
    assert rows(Eagle3Config(block_size=3), length=10, num_anchors=2) == Rows(30, 30, 20, 60, 0)


def test_every_known_target_has_a_recipe() -> None:
    named = {RecipeParser().read(recipe)["target"] for recipe in RECIPES}
    assert named == set(json.loads(KNOWN.read_text()))


def test_plan(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name in ("qwen3_0.6b.yaml", TARGETS_FILE):
        shutil.copy(EXAMPLES / "recipes" / name, folder / name)
    recipe = folder / "qwen3_0.6b.yaml"
    before = recipe.read_text()
    result = CliRunner().invoke(app, ["plan", str(folder)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "Predicted, not measured" in result.output and "qwen3_0.6b" in result.output
    assert recipe.read_text() == before
    for gpus in (2, 8):
        result = CliRunner().invoke(app, ["plan", str(recipe), "--gpus", str(gpus), "--write"])
        assert result.exit_code == 0, result.output
        assert f"# Predicted, not measured: {gpus} GPUs" in recipe.read_text()
    assert recipe.read_text() == before, "an earlier prediction is replaced"
    for path, message in ((tmp_path / "none", "none"), (tmp_path, "There are no recipes")):
        result = CliRunner().invoke(app, ["plan", str(path)])
        assert result.exit_code == 1 and message in result.output and "Traceback" not in result.output


CONFIGURATIONS = {
    "multi_gpu": ("multi_gpu", 8, 1),
    "several_nodes": ("multi_gpu", 16, 2),
    "fsdp": ("use_fsdp", 8, 1),
    "deepspeed_zero2": ("use_deepspeed", 8, 1),
}


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_takes_the_configuration(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "examples/train_drafter.py"])
    arguments, *_ = _validate_launch_command(arguments)
    kind, processes, machines = CONFIGURATIONS[path.stem]
    assert [name for name in ("multi_gpu", "use_fsdp", "use_deepspeed") if getattr(arguments, name)] == [kind]
    assert (arguments.num_processes, arguments.num_machines) == (processes, machines)
    assert arguments.mixed_precision == "bf16"
    if kind == "use_deepspeed":
        assert arguments.zero_stage == 2
        return
    for name, value in prepare_multi_gpu_env(arguments).items():
        if "FSDP" in name:
            monkeypatch.setenv(name, value)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    check_wrapping(args)
    if kind == "use_fsdp":
        assert DSparkDrafter._no_split_modules == [arguments.fsdp_transformer_layer_cls_to_wrap]
        for name, value in (("FSDP_VERSION", "1"), ("FSDP_RESHARD_AFTER_FORWARD", "true")):
            with monkeypatch.context() as changed, pytest.raises(ValueError, match="FSDP can train a drafter"):
                changed.setenv(name, value)
                check_wrapping(args)


def test_weights_that_are_taken_away_too_early_are_refused(tmp_path: Path) -> None:
    for version, reshards in ((2, True), (2, False)):
        config = {"version": version, "reshard_after_forward": reshards}
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fsdp=True, fsdp_config=config)
        if not reshards:
            check_wrapping(args)
            continue
        with pytest.raises(ValueError, match="`fsdp_reshard_after_forward: false`"):
            check_wrapping(args)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    args.deepspeed_plugin = type("Plugin", (), {"zero_stage": 3})()
    with pytest.raises(ValueError, match="ZeRO-3 cannot train a drafter"):
        check_wrapping(args)
