"""Model cards: what they are filled from, what the Hub reads of them, and whose text stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from dspark_hf.embedded import DRAFTER
from dspark_hf.hub import CardRecipe, keep_evaluation, write_card
from dspark_hf.hub.card import EVIDENCE, MARK, RECIPE_FILE

CARDS = Path(__file__).resolve().parents[2] / "model_cards"

ROW = {
    "task": "gsm8k",
    "temperature": 1.0,
    "batch_size": 1,
    "drafter": "ours",
    "num_draft_tokens": 8,
    "threshold": 0.0,
    "scheduler": "none",
    "answers": 40,
    "accepted_length": 3.456,
    "accepted_length_interval": [3.2, 3.7],
    "speedup": 1.789,
    "speedup_interval": None,
    "accepted_length_of_questions": [{"id": "a", "accepted_length": 3.0, "rounds": 9}],
}
REPORT = {
    "target": "org/target",
    "drafters": {"ours": {}, "theirs": {}},
    "tasks": {"gsm8k": {"source": "openai/gsm8k", "questions": 40, "turns": 40}},
    "settings": {"max_new_tokens": 128},
    "machine": {"device_name": "A processor", "threads": 2, "dtype": "float32", "quantization": None},
    "versions": {},
    "interval_level": 0.95,
    "rows": [
        ROW,
        {**ROW, "temperature": 0.0, "accepted_length": 4.5},
        {**ROW, "batch_size": 8, "scheduler": "hardware"},
        {**ROW, "drafter": "theirs", "accepted_length": 9.0},
    ],
    "averages": [{"drafter": "ours", "accepted_length": 4.0}, {"drafter": "theirs", "accepted_length": 9.0}],
    "confidence": [],
}


@pytest.fixture
def folder(tmp_path):
    """A trained drafter without a card."""
    copy = tmp_path / "drafter"
    shutil.copytree(
        DRAFTER, copy, ignore=shutil.ignore_patterns("*.md", "card.yaml", "evaluation.json", "calibration.json")
    )
    return copy


def text(folder) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_card_of_training_alone(folder):
    card = write_card(folder)
    assert card.data.base_model == "dspark-hf/embedded-target"
    assert card.data.base_model_relation == "adapter"
    assert {"speculative-decoding", "dspark"} <= set(card.data.tags)
    assert card.data.license is None and "no licence" in text(folder)
    assert "| `num_anchors` | 64 |" in text(folder)
    assert "**the bonus token included**" in text(folder)
    assert "Not measured." in text(folder)
    assert "None" not in text(folder) and "{{" not in text(folder) and "\n\n\n\n" not in text(folder)


def test_card_with_figures(folder):
    keep_evaluation(folder, REPORT, "ours")
    kept = json.loads((folder / EVIDENCE["evaluation"]).read_text(encoding="utf-8"))
    assert [row["drafter"] for row in kept["rows"]] == ["ours"] * 3
    assert "accepted_length_of_questions" not in kept["rows"][0]
    write_card(folder, repo_id="org/drafter")
    assert "| gsm8k | 1 | 1 | 8 | 3.46 (3.20 to 3.70) | 1.79 | 40 |" in text(folder)
    assert "| gsm8k | 1 | 8 | 8, hardware | 3.46 (3.20 to 3.70) | 1.79 | 40 |" in text(folder)
    assert "9.00" not in text(folder)
    assert "A processor (2 threads), float32" in text(folder)
    assert 'AutoModel.from_pretrained("org/drafter")' in text(folder)
    assert "custom_generate" not in text(folder)  # the code is not there


def test_the_hub_reads_the_figures(folder):
    keep_evaluation(folder, REPORT, "ours")
    write_card(folder, repo_id="org/drafter")
    results = ModelCard.load(folder / "README.md").data.eval_results
    assert {(entry.dataset_type, entry.metric_type, entry.metric_value) for entry in results} == {
        ("openai/gsm8k", "accepted_length", 3.456),
        ("openai/gsm8k", "accepted_length", 4.5),
        ("openai/gsm8k", "speedup", 1.789),
    }


def test_calibration_capacity_and_chats(folder):
    ece = {"prefix": {"before": 0.08, "after": 0.015, "chance": 0.01}}
    calibration = {"fitted_rounds": 8260, "heldout_rounds": 8159, "fitted_prompts": 60, "heldout_prompts": 60}
    (folder / "calibration.json").write_text(json.dumps({**calibration, "mean_ece": ece}), encoding="utf-8")
    capacity = {"measured_on": {"device_name": "A card", "torch": "2.13.0"}}
    (folder / "capacity.json").write_text(json.dumps(capacity), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"enable_thinking": False, "generation_prompt_ids": [1, 2]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_card(folder)
    assert "8.0% before, 1.5% after" in text(folder)
    assert "![" not in text(folder)  # there is no picture
    assert "on A card, torch 2.13.0" in text(folder)
    assert 'return_tensors="pt", enable_thinking=False\n)' in text(folder)
    assert "with thinking off" in text(folder) and "`enable_thinking=False`" in text(folder)


def test_recipe_is_kept(folder):
    recipe = CardRecipe(license="mit", language=["en", "de"], datasets=["org/data"], limits="Not for poems.")
    write_card(folder, recipe=recipe)
    card = write_card(folder)  # as an evaluation does later
    assert (card.data.license, card.data.language, card.data.datasets) == ("mit", ["en", "de"], ["org/data"])
    assert "Not for poems." in text(folder)
    assert CardRecipe.load(folder / RECIPE_FILE) == recipe


def test_own_text_stays(folder):
    (folder / "README.md").write_text("# Mine\n", encoding="utf-8")
    write_card(folder)
    assert text(folder) == "# Mine\n"
    (folder / "README.md").unlink()
    write_card(folder)
    edited = text(folder).replace(MARK, "") + "More.\n"
    (folder / "README.md").write_text(edited, encoding="utf-8")
    write_card(folder)
    assert text(folder) == edited


def test_targets_in_folders_are_not_named_as_repositories(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "target_name_or_path": "/home/me/t"}), encoding="utf-8")
    card = write_card(folder)
    assert card.data.base_model is None
    assert "huggingface.co//" not in text(folder)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("- a\n", ValueError, "no mapping"),
        ("licence: mit\n", ValueError, "has 'licence'; a card takes base_model, license"),
        ("license: 3\n", TypeError, "`license` is 3; give a string"),
        ("tags: {a: b}\n", TypeError, "`tags` is .*; give strings"),
        ("a: [\n", ValueError, "no YAML file"),
    ],
)
def test_bad_recipes(tmp_path, content, error, message):
    path = tmp_path / "card.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(error, match=message):
        CardRecipe.load(path)


@pytest.mark.parametrize("path", sorted(CARDS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_of_the_repository(path, folder):
    recipe = CardRecipe.load(path)
    assert recipe.training_data and recipe.authors
    write_card(folder, recipe=recipe)
    assert recipe.training_data in text(folder)


def test_one_tag_may_stand_alone(tmp_path):
    path = tmp_path / "card.yaml"
    path.write_text("tags: code\n", encoding="utf-8")
    assert CardRecipe.load(path).tags == ["code"]


def test_unknown_drafter_of_a_report(folder):
    with pytest.raises(ValueError, match="`drafter` is 'other'; the report has ours, theirs"):
        keep_evaluation(folder, REPORT, "other")


def test_folder_of_a_target(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(ValueError, match="no drafter in this package's format"):
        write_card(tmp_path)
