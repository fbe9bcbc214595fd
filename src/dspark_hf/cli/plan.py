"""`dspark plan`: predicts what training runs will need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from .errors import user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..training.planning import GPU, Prediction
    from ..training.recipe import Arguments, RecipeParser

TARGETS_FILE = "targets.json"
"""Configs of targets by name, looked for beside a recipe, so that nothing has to be asked of the Hub."""

TOKENS, SEQUENCES = 1.24e9, 1.3e6
"""The DSpark paper's data: 1.3 million prompts; the tokens follow from the 38 TB of DeepSpec's cache."""

MARK = "# Predicted, not measured"


def plan(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or folders of them.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, each with a process.")] = 8,
    tokens: Annotated[float, typer.Option(min=1, help="Tokens of the data.")] = TOKENS,
    sequences: Annotated[float, typer.Option(min=1, help="Sequences of the data.")] = SEQUENCES,
    tflops: Annotated[float, typer.Option(help="A GPU's dense bf16 arithmetic.")] = 989.0,
    utilisation: Annotated[float, typer.Option(help="The share of it that is reached.")] = 0.35,
    write: Annotated[bool, typer.Option("--write", help="Write each prediction into its recipe's comments.")] = False,
) -> None:
    """Predict memory, disk and hours of training runs.

    Only the target's config is read, from targets.json beside the recipe or from the Hub. Sizes of weights are exact;
    activations and hours are rough, and none of it is measured.
    """
    from ..training.planning import GB, GIB, GPU, TB

    table = Table(title="Predicted, not measured", title_justify="left")
    table.add_column("recipe", overflow="fold")
    for name in ("drafter, M", "memory per GPU, GiB", "disk, GB", "cached states, TB more", "hours"):
        table.add_column(name, justify="right")
    with user_errors():
        for path in _recipes(recipes):
            prediction, assumed = predict_recipe(path, gpus, tokens, sequences, GPU(tflops, utilisation))
            figures = (
                prediction.parameters / 1e6,
                prediction.memory / GIB,
                prediction.disk / GB,
                prediction.cached_states / TB,
                prediction.hours,
            )
            table.add_row(path.stem, *(f"{figure:.1f}" if figure < 10 else f"{figure:.0f}" for figure in figures))
            if write:
                text = path.read_text(encoding="utf-8")
                path.write_text(with_prediction(text, prediction, assumed), encoding="utf-8")
    Console().print(table)


def predict_recipe(path: Path, gpus: int, tokens: float, sequences: float, gpu: GPU) -> tuple[Prediction, str]:
    """The prediction for a recipe, and what it assumes, in words."""
    from ..factory import complete_config
    from ..training.planning import Run, predict, target_size
    from ..training.recipe import RecipeParser

    parser = RecipeParser()
    drafter_args, _, training_args = _parse(parser, path)
    target = _without_weights(drafter_args.target, path.with_name(TARGETS_FILE))
    run = Run(
        gpus=gpus,
        batch_size=training_args.per_device_train_batch_size,
        max_length=training_args.max_length,
        num_anchors=training_args.num_anchors,
        epochs=training_args.num_train_epochs,
        tokens=tokens,
        sequences=sequences,
        loss_memory=training_args.loss_memory,
        gradient_checkpointing=training_args.gradient_checkpointing,
        shards_target=drafter_args.target_device_map == "fsdp",
        shards_drafter=bool(training_args.fsdp),
        kept_checkpoints=training_args.save_total_limit or 1,
    )
    prediction = predict(target_size(target), complete_config(target, drafter_args.drafter_config()), run, gpu)
    assumed = (
        f"{gpus} GPUs at {gpu.utilisation:.0%} of {gpu.tflops:.0f} TFLOPS, {run.epochs:g} epochs of "
        f"{tokens / 1e9:.2f} billion tokens"
    )
    return prediction, assumed


def with_prediction(text: str, prediction: Prediction, assumed: str) -> str:
    """A recipe's text with the prediction in its comments, in place of an earlier one."""
    lines = [line for line in text.splitlines() if not line.startswith((MARK, "#   "))]
    block = [f"{MARK}: {assumed}.", *(f"#   {line}" for line in prediction.lines())]
    after = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join([*lines[:after], *block, *lines[after:]]) + "\n"


def _recipes(paths: list[Path]) -> list[Path]:
    """The files that are meant; raises `OSError` where there are none."""
    found = []
    for path in paths:
        found += sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not found:
        raise FileNotFoundError(f"There are no recipes (*.yaml) in {', '.join(map(str, paths))}.")
    return found


def _parse(parser: RecipeParser, path: Path) -> Arguments:
    """A recipe's options, as far as sizes go: whether this machine could run it is another question."""
    placeholders = {"data_file": "data", "output_dir": "drafter"}
    return parser.parse_values({**placeholders, **parser.read(path), "use_cpu": True})


def _without_weights(name: str, known: Path) -> PreTrainedModel:
    """The target on the meta device, from its config alone."""
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    configs = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
    if name in configs:
        fields = dict(configs[name])
        config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    else:
        config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


__all__ = ["plan", "predict_recipe", "with_prediction"]
