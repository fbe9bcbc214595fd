"""Puts the trained pair into the package: weights in bfloat16, loaded in float32, with a model card each.

python examples/embedded_pair/publish.py --work_dir build/embedded_pair
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file, save_file
from transformers import HfArgumentParser

from dspark_hf.embedded import DRAFTER, TARGET
from dspark_hf.hub import CardRecipe, write_card

CARDS = Path(__file__).resolve().parents[2] / "model_cards"
TARGET_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_summary.json",
)
DRAFTER_FILES = ("config.json", "training_summary.json")
# Where the drafter says that its target is; the folder that it was trained from would mean nothing to anyone else.
TARGET_NAME = "dspark-hf/embedded-target"
DRAFTER_NAME = "dspark-hf/embedded-drafter"


@dataclass
class PublishArguments:
    """Where the trained pair is."""

    work_dir: str = field(default="build/embedded_pair", metadata={"help": "Folder with the target and the drafter."})
    drafter: str = field(default="drafter", metadata={"help": "Folder of the drafter in `work_dir`."})


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def copy_model(source: Path, destination: Path, files: tuple[str, ...]) -> None:
    """Copies configuration and weights, the latter in bfloat16."""
    missing = [name for name in ("model.safetensors", *files) if not (source / name).is_file()]
    if missing:
        raise ValueError(f"{source} lacks {missing}; run the stages before this one first.")
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for name in files:
        shutil.copy(source / name, destination / name)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})


def name_target(config_path: Path) -> None:
    """Replaces the folder that the drafter was trained from by the target's name."""
    config = read_json(config_path)
    config["target_name_or_path"] = TARGET_NAME
    config["dtype"] = "float32"
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    (args,) = HfArgumentParser(PublishArguments).parse_args_into_dataclasses()
    work_dir = Path(args.work_dir)
    copy_model(work_dir / "target", TARGET, TARGET_FILES)
    copy_model(work_dir / args.drafter, DRAFTER, DRAFTER_FILES)
    name_target(DRAFTER / "config.json")
    summary = read_json(TARGET / "training_summary.json")
    tags = ["dspark-hf", "tiny"]
    data = ModelCardData(
        license="apache-2.0", library_name="transformers", language="en", pipeline_tag="text-generation", tags=tags
    )
    card = ModelCard.from_template(data, template_path=str(CARDS / "embedded_target.md"), summary=summary)
    card.save(TARGET / "README.md")
    write_card(DRAFTER, recipe=CardRecipe.load(CARDS / "embedded_drafter.yaml"), repo_id=DRAFTER_NAME)
    size = sum(path.stat().st_size for folder in (TARGET, DRAFTER) for path in folder.rglob("*") if path.is_file())
    print(f"The pair is in {TARGET.parent}: {size / 1e6:.1f} MB.")


if __name__ == "__main__":
    main()
