"""A drafter's repository: everything that goes to the Hub, put together in a folder, and pushed in one commit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..conversion.formats import read_json
from ..models import Drafter, without_adapters
from .card import CARD_FILE, EVIDENCE, MARK, RECIPE_FILE, CardRecipe, write_card
from .travelling import GENERATE_FOLDER, generation_code, model_code

PICTURES = ("reliability.png",)


def save_repository(
    drafter: Drafter,
    folder: str | os.PathLike[str],
    *,
    evidence: str | os.PathLike[str] | None = None,
    recipe: CardRecipe | None = None,
    repo_id: str | None = None,
    code: bool = True,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes a drafter as it goes to the Hub.

    Beside config and weights: the code that loads it and decodes with it where this package is not installed, the
    model card, and what is known of its training, calibration, speed and the machine's capacity.

    Args:
        drafter: the drafter.
        folder: new or empty.
        evidence: folder of training, calibration and evaluation, see `card.EVIDENCE`; nothing if unset. A card there
            that somebody wrote by hand goes along as it is.
        recipe: what the card says beyond that.
        repo_id: repository that it goes to; the card's examples name it.
        code: whether the code goes with it.
        max_shard_size: largest file of weights.

    Raises:
        OSError: if something cannot be read or written.
        TypeError: if `drafter` is none.
        ValueError: if the folder is not empty, or `evidence` is no folder.
    """
    drafter = _checked(drafter)
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"`folder` is {str(folder)!r}, which is not empty; give a new one.")
    if evidence is not None and not Path(evidence).is_dir():
        raise ValueError(f"`evidence` is {os.fspath(evidence)!r}, which is no folder; give that of the drafter.")
    drafter.save_pretrained(folder, max_shard_size=max_shard_size)
    config = _public(read_json(folder / "config.json"))
    if recipe is not None and recipe.base_model:
        config["target_name_or_path"] = recipe.base_model
    config.pop("auto_map", None)
    if code:
        sources, config["auto_map"] = model_code(drafter.config.model_type)
        _write_files(folder, sources)
        _write_files(folder / GENERATE_FOLDER, generation_code())
    _write_json(folder / "config.json", config)
    if evidence is not None:
        _copy_evidence(Path(evidence), folder)
    write_card(folder, recipe=recipe, repo_id=repo_id)


def push_drafter(
    drafter: Drafter,
    repo_id: str,
    *,
    evidence: str | os.PathLike[str] | None = None,
    recipe: CardRecipe | None = None,
    code: bool = True,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    tags: list[str] | None = None,
    max_shard_size: int | str = "5GB",
) -> CommitInfo:
    """Pushes what `save_repository` writes, in one commit: a push that breaks off leaves the repository as it was.

    What was uploaded before the break is not uploaded again. A card that somebody wrote by hand stays.

    Args:
        drafter: the drafter.
        repo_id: `owner/name`; made if it is not there.
        evidence: folder of training, calibration and evaluation; nothing if unset.
        recipe: what the card says beyond that.
        code: whether the code goes with it.
        private: whether a new repository is private; by default as the owner's settings have it.
        token: of the Hub; by default that of `hf auth login` or `HF_TOKEN`.
        revision: branch to push to; made if it is not there.
        create_pr: open a pull request instead.
        commit_message: of the commit.
        commit_description: likewise.
        tags: more tags of the card.
        max_shard_size: largest file of weights.

    Returns:
        Facts about the commit, whose `commit_url` shows it.

    Raises:
        OSError: if the Hub cannot be reached, or refuses.
        TypeError: if `drafter` is none.
        ValueError: if `repo_id` is no name, or `evidence` no folder.
    """
    drafter = _checked(drafter)
    _check_name(repo_id)
    if tags:
        recipe = dataclasses.replace(recipe or CardRecipe(), tags=[*(recipe.tags if recipe else []), *tags])
    api = HfApi(token=token, library_name="dspark-hf")
    with tempfile.TemporaryDirectory() as made, _plain_errors(repo_id):
        # First what takes no network and may fail.
        folder = Path(made, "repository")
        repo_id = _full_name(api, repo_id)
        save_repository(
            drafter,
            folder,
            evidence=evidence,
            recipe=recipe,
            repo_id=repo_id,
            code=code,
            max_shard_size=max_shard_size,
        )
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        kept = [CARD_FILE] if _has_own_card(api, repo_id, revision) else []
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or f"Upload {type(drafter).__name__}",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            ignore_patterns=kept,
        )


def _checked(drafter: Any) -> Drafter:
    drafter = without_adapters(drafter)
    if not isinstance(drafter, Drafter):
        raise TypeError(f"`drafter` is a {type(drafter).__name__}; give a drafter, such as a `DSparkDrafter`.")
    return drafter


def _check_name(repo_id: Any) -> None:
    try:
        validate_repo_id(repo_id)
        valid = bool(repo_id)
    except HFValidationError:
        valid = False
    if not valid:
        raise ValueError(
            f"`repo_id` is {repo_id!r}, which is no name of a repository: give `owner/name`, of letters, digits, '-', "
            "'_' and '.'."
        )


def _full_name(api: HfApi, repo_id: str) -> str:
    """`owner/name`: a name alone is the user's own."""
    return repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"


def _has_own_card(api: HfApi, repo_id: str, revision: str | None) -> bool:
    """Whether the repository has a card that this package has not made, or whose mark was taken away."""
    try:
        path = api.hf_hub_download(repo_id, CARD_FILE, revision=revision)
    except (EntryNotFoundError, RevisionNotFoundError):
        return False
    return MARK not in ModelCard.load(path, ignore_metadata_errors=True).content


@contextmanager
def _plain_errors(repo_id: str) -> Iterator[None]:
    """The client's errors as `OSError`, saying what to do."""
    try:
        yield
    except RepositoryNotFoundError as error:
        raise OSError(
            f"`repo_id` is {repo_id!r}, which the Hub does not show: there is no such repository or owner, or the "
            f"token may not see it. Log in with `hf auth login`, or give `token`. {_first_line(error)}"
        ) from error
    except HfHubHTTPError as error:
        raise OSError(
            f"The Hub refused to take {repo_id!r} ({_first_line(error)}). Check that the token may write there "
            "(`hf auth login`, or `token`). Nothing was committed."
        ) from error
    except (OSError, ValueError, TypeError):
        raise
    except Exception as error:  # of the HTTP library, which changes, or of an upload's thread
        reason = _first_line(error.__cause__ or error)
        raise OSError(
            f"The upload to {repo_id!r} broke off ({reason}). Nothing was committed; push again to go on."
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# --- files -----------------------------------------------------------------------------------------------------------


def _write_files(folder: Path, contents: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=path.name == "config.json") + "\n", encoding="utf-8")


def _copy_evidence(source: Path, folder: Path) -> None:
    for name in EVIDENCE.values():
        if (source / name).is_file():
            _write_json(folder / name, _public(read_json(source / name)))
    own_card = (source / CARD_FILE).is_file() and MARK not in (source / CARD_FILE).read_text(encoding="utf-8")
    for name in (*PICTURES, *([CARD_FILE] if own_card else [RECIPE_FILE])):
        if (source / name).is_file():
            shutil.copy2(source / name, folder)


def _public(content: Any) -> Any:
    """Without the folders of somebody's disk: of a path only its last part."""
    if isinstance(content, dict):
        return {name: _public(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_public(value) for value in content]
    is_path = isinstance(content, str) and (os.path.isabs(content) or ("/" in content and os.path.exists(content)))
    return Path(content).name if is_path else content


__all__ = ["push_drafter", "save_repository"]
