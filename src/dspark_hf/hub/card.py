"""Model cards of drafters, filled from what lies beside their weights.

Training, calibration, profiling and evaluation each leave a JSON file in a drafter's folder or are asked to
(`EVIDENCE`); `write_card` makes the card from these and the config. What no file can say (licence, language, where the
data came from) comes from a recipe, a YAML file with the fields of `CardRecipe`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..conversion.formats import DSPARK, detect_format, read_json
from ..models import DrafterConfig

CARD_FILE = "README.md"
RECIPE_FILE = "card.yaml"
TEMPLATE = Path(__file__).with_name("drafter_card.md")

EVIDENCE = {
    "training": "training_summary.json",
    "calibration": "calibration.json",
    "evaluation": "evaluation.json",
    "capacity": "capacity.json",
}
"""Files that a card is filled from, by what they tell of."""

MARK = "<!-- Made by dspark-hf. Remove this line to keep your own text: the card is then left as it is. -->"

_KINDS = {
    "dspark": "DSpark",
    "dspark_eagle3": "EAGLE-3",
    "dspark_mtp": "multi-token prediction",
}


@dataclass
class CardRecipe:
    """What a card says that no file of the drafter knows.

    Attributes:
        base_model: repository of the target; by default what the drafter's config says, if that is one.
        license: a licence as the Hub names it, such as `apache-2.0`.
        language: languages of the text that it was trained on.
        datasets: repositories of the training data.
        tags: more tags.
        title: heading of the card.
        training_data: a sentence or more on the training data.
        limits: a sentence or more on what it is not for.
        authors: who made it.
        citation: BibTeX beyond that of the method.
    """

    base_model: str | None = None
    license: str | None = None
    language: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    title: str | None = None
    training_data: str | None = None
    limits: str | None = None
    authors: str | None = None
    citation: str | None = None

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            is_list = entry.default is dataclasses.MISSING
            if is_list and isinstance(value, str):
                value = [value]
                setattr(self, entry.name, value)
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
            if not (fits if is_list else value is None or isinstance(value, str)):
                raise TypeError(f"`{entry.name}` is {value!r}; give {'strings' if is_list else 'a string'}.")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CardRecipe:
        """Reads a YAML file.

        Raises:
            OSError: if it cannot be read.
            TypeError: if a field has a value of another type.
            ValueError: if it is no mapping, or has a field that cards do not have.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{os.fspath(path)!r} is no YAML file: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{os.fspath(path)!r} holds no mapping of names to values.")
        known = [entry.name for entry in dataclasses.fields(cls)]
        unknown = [name for name in content if name not in known]
        if unknown:
            raise ValueError(f"{os.fspath(path)!r} has {unknown[0]!r}; a card takes {', '.join(known)}.")
        return cls(**content)


def write_card(
    folder: str | os.PathLike[str], *, recipe: CardRecipe | None = None, repo_id: str | None = None
) -> ModelCard:
    """Writes `README.md` of the drafter in `folder`, in place of an earlier one that this function wrote.

    Args:
        folder: of a drafter in this package's format, with what there is of `EVIDENCE`.
        recipe: what no file says; that of an earlier call, which `card.yaml` keeps, if unset.
        repo_id: the repository that the drafter goes to; examples name it.

    Returns:
        The card; one that somebody else wrote is left as it is.

    Raises:
        OSError: if the folder has no drafter, or a file cannot be read or written.
        ValueError: if the drafter is in another format.
    """
    folder = Path(folder)
    place = folder / CARD_FILE
    if place.is_file() and MARK not in place.read_text(encoding="utf-8"):
        return ModelCard.load(place)
    recipe = _kept_recipe(folder, recipe)
    found = read_json(folder / "config.json")
    if detect_format(found) != DSPARK:
        raise ValueError(f"{str(folder)!r} has no drafter in this package's format, so no card can be made for it.")
    evidence = {name: read_json(path) for name, file in EVIDENCE.items() if (path := folder / file).is_file()}
    has = {
        "has_code": (folder / "custom_generate" / "generate.py").is_file(),
        "has_diagram": (folder / "reliability.png").is_file(),
    }
    card = _card(found, evidence, recipe, repo_id, has)
    card.save(place)
    return card


def _kept_recipe(folder: Path, recipe: CardRecipe | None) -> CardRecipe:
    """The recipe given, which is kept for later cards, or the one kept."""
    path = folder / RECIPE_FILE
    if recipe is None:
        return CardRecipe.load(path) if path.is_file() else CardRecipe()
    given = {name: value for name, value in dataclasses.asdict(recipe).items() if value}
    if given:
        path.write_text(yaml.safe_dump(given, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return recipe


def _card(
    config: dict[str, Any],
    evidence: Mapping[str, dict[str, Any]],
    recipe: CardRecipe,
    repo_id: str | None,
    has: Mapping[str, bool],
) -> ModelCard:
    base_model = recipe.base_model or _repository(config.get("target_name_or_path"))
    name = repo_id or "this repository"
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="adapter" if base_model else None,
        datasets=recipe.datasets or None,
        eval_results=_eval_results(evidence.get("evaluation")),
        language=recipe.language or None,
        library_name="transformers",
        license=recipe.license,
        model_name=name.rpartition("/")[2],
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(["dspark-hf", "speculative-decoding", config["model_type"], *recipe.tags])),
    )
    values: dict[str, Any] = {
        "mark": MARK,
        "kind": _kind(config),
        "config": {**_defaults(config), **config},
        "has_target": base_model is not None,
        "target": base_model or "TARGET",
        "repo_id": repo_id or "OWNER/NAME",
        "recipe": recipe,
        **has,
        "rows": _rows(evidence.get("evaluation")),
        **{part: evidence.get(part) for part in EVIDENCE},
    }
    return ModelCard.from_template(data, template_path=str(TEMPLATE), **values)


def _kind(config: dict[str, Any]) -> str:
    if config["model_type"] == "dspark" and not (config.get("markov_rank") or config.get("enable_confidence_head")):
        return "DFlash"
    return _KINDS.get(config["model_type"], config["model_type"])


def _defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Fields that a template may ask for and that this kind of drafter need not have."""
    return {name: config.get(name) for name in DrafterConfig.drafter_fields()}


def _repository(name: Any) -> str | None:
    """`name`, if the Hub could have it and it is no folder of somebody's disk."""
    if not isinstance(name, str) or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return None if os.path.isdir(name) else name


# --- evaluation ------------------------------------------------------------------------------------------------------


def keep_evaluation(folder: str | os.PathLike[str], report: Mapping[str, Any], drafter: str) -> Path:
    """Puts what an evaluation found out about a drafter into its folder, for its card.

    Args:
        folder: of the drafter.
        report: from `evaluate_drafters`.
        drafter: its name there.

    Returns:
        The file.

    Raises:
        ValueError: if the report has no such drafter.
    """
    if drafter not in report["drafters"]:
        raise ValueError(f"`drafter` is {drafter!r}; the report has {', '.join(report['drafters'])}.")
    dropped = ("accepted_length_of_questions",)
    kept = {name: report[name] for name in ("target", "tasks", "settings", "machine", "versions", "interval_level")}
    for part in ("rows", "averages", "confidence"):
        kept[part] = [
            {name: value for name, value in row.items() if name not in dropped}
            for row in report[part]
            if row["drafter"] == drafter
        ]
    path = Path(folder) / EVIDENCE["evaluation"]
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)
    return path


def _rows(evaluation: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """Lines of the card's table."""
    lines = []
    for row in evaluation["rows"] if evaluation else ():
        lines.append(
            {
                "task": row["task"],
                "temperature": f"{row['temperature']:g}",
                "batch_size": str(row["batch_size"]),
                "drafts": f"{row['num_draft_tokens']}"
                + (f", cut below {row['threshold']:g}" if row["threshold"] else "")
                + (f", {row['scheduler']}" if row["scheduler"] != "none" else ""),
                "accepted_length": _with_interval(row, "accepted_length"),
                "speedup": _with_interval(row, "speedup"),
                "answers": str(row["answers"]),
            }
        )
    return lines


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    if row[name] is None:
        return ""
    ends = row.get(f"{name}_interval")
    return f"{row[name]:.2f}" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


def _eval_results(evaluation: Mapping[str, Any] | None) -> list[EvalResult] | None:
    """The `model-index` of the Hub: accepted length and speed of whole drafts, one prompt at a time."""
    found = []
    for row in evaluation["rows"] if evaluation else ():
        if row["batch_size"] != 1 or row["threshold"] or row["accepted_length"] is None:
            continue
        source = _repository(evaluation["tasks"][row["task"]]["source"]) if evaluation else None
        setting = f"T = {row['temperature']:g}, drafts of {row['num_draft_tokens']}, scheduler {row['scheduler']}"
        for metric, what in (
            ("accepted_length", "accepted length, bonus token included"),
            ("speedup", "speed, times plain generate"),
        ):
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=source or row["task"],
                    dataset_name=row["task"],
                    metric_type=metric,
                    metric_name=f"{what} ({setting})",
                    metric_value=round(row[metric], 3),
                )
            )
    return found or None


__all__ = ["CARD_FILE", "EVIDENCE", "MARK", "RECIPE_FILE", "CardRecipe", "keep_evaluation", "write_card"]
