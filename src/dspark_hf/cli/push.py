"""`dspark push`: a drafter to the Hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .errors import user_errors


def push(
    source: Annotated[str, typer.Argument(help="The drafter, in any format: a local folder or a Hub repository.")],
    repo_id: Annotated[str, typer.Argument(help="Repository of the Hub (`owner/name`); made if it is not there.")],
    card: Annotated[
        str | None,
        typer.Option(
            help="YAML file with what the model card cannot know: base_model, license, language, datasets, tags, "
            "title, training_data, limits, authors, citation."
        ),
    ] = None,
    private: Annotated[
        bool | None, typer.Option(help="Whether a new repository is private. (default: the owner's settings)")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to. (default: main)")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    code: Annotated[
        bool, typer.Option(help="Whether the code goes along that works where dspark-hf is not installed.")
    ] = True,
    folder: Annotated[
        str | None, typer.Option(help="Write the repository to this new folder, and push nothing.")
    ] = None,
) -> None:
    """Push a drafter to the Hub: weights, calibration, model card, and the code that it runs with.

    The card tells what the drafter's folder knows of its training (`dspark train`), calibration (`dspark calibrate`),
    accepted lengths and speed (`dspark eval --card`). The token is that of `hf auth login`, or HF_TOKEN.
    """
    from ..conversion.loading import check_output
    from ..factory import AutoDrafter
    from ..hub import CardRecipe, push_drafter, save_repository

    flags = {"pretrained_model_name_or_path": "SOURCE", "repo_id": "REPO_ID", "folder": "--folder"}
    with user_errors(**flags, token="HF_TOKEN"):
        if folder is not None:
            check_output(folder, "--folder")
        if card is not None and not Path(card).is_file():
            raise ValueError(f"--card is {card!r}, and there is no such file.")
        recipe = None if card is None else CardRecipe.load(card)
        drafter = AutoDrafter.from_pretrained(source)
        evidence = source if os.path.isdir(source) else None
        name = (recipe and recipe.base_model) or drafter.config.target_name_or_path
        if name is None or os.path.isdir(name):
            typer.echo(f"! The target is {name or 'unknown'}, no repository: give it as base_model with --card.")
        if folder is not None:
            save_repository(drafter, folder, evidence=evidence, recipe=recipe, repo_id=repo_id, code=code)
            typer.echo(f"The repository is in {folder}.")
            return
        commit = push_drafter(
            drafter,
            repo_id,
            evidence=evidence,
            recipe=recipe,
            code=code,
            private=private,
            revision=revision,
            create_pr=create_pr,
            commit_message=message,
        )
    typer.echo(f"Pushed: {commit.pr_url or commit.commit_url}")


__all__ = ["push"]
