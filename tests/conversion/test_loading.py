"""What is said of a name that leads to no model, or to one of the wrong kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.conversion.loading import check_location, check_output, load_language_model

from ..parity.fixtures import FIXTURES
from ..tiny import tiny_target


@pytest.mark.parametrize("path", ["./nope", "../nope", "/nope/nope", "~/nope", "a/b/c", "my model", ""])
def test_a_path_that_leads_nowhere_is_no_matter_for_the_hub(path: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"There is no folder '{path}'; `target` takes a folder or"):
        check_location(path, "`target`")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    for path in (file, str(file)):
        with pytest.raises(OSError, match="model.safetensors' is a file; `target` takes a folder"):
            check_location(path, "`target`")


def test_output_that_cannot_be_written_is_said_before(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for name in (".", "new", "new/folder", str(tmp_path / "new")):
        check_output(name, "`output_dir`")
    assert not Path("new").exists()
    for name, message in {"file": "which is a file", "file/new/folder": "and '.*file' is a file", "": "empty"}.items():
        with pytest.raises(ValueError, match=f"`output_dir` is .*{message}; give a folder"):
            check_output(name, "`output_dir`")
    # Root may write everywhere, whatever a folder's mode says.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(PermissionError, match=f"`output_dir` is 'new', and '{tmp_path}' cannot be written to"):
        check_output("new", "`output_dir`")


@pytest.mark.parametrize("name", ["gpt2", "org/name", "Qwen/Qwen3-0.6B", "deepseek-ai/dspark_qwen3_8b_block7"])
def test_names_of_repositories_are_left_to_the_hub(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    check_location(name, "`target`")
    with pytest.raises(OSError, match=f"There is no folder '{name}', and it cannot be read from the Hub: We couldn't"):
        load_language_model(name)


def test_drafters_and_other_models_are_no_targets(tmp_path: Path) -> None:
    drafter = get_drafter(tiny_target(), DSparkConfig(markov_rank=4, target_name_or_path="org/the-target"))
    drafter.save_pretrained(tmp_path / "drafter")
    ViTConfig().save_pretrained(tmp_path / "vit")
    for path, message in {
        tmp_path / "drafter": "is a drafter, not a target; `target` takes the language model .* \\(org/the-target\\)",
        FIXTURES / "qwen3-dspark-vanilla" / "drafter": "is a drafter, not a target",
        FIXTURES / "qwen3-eagle3" / "drafter": "is a drafter, not a target",
        tmp_path / "vit": "is a vit model, not a causal language model; `target` takes",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_language_model(path)


def test_damaged_targets_are_named(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(OSError, match="The weights of .* cannot be read"):
        load_language_model(tmp_path)
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"n_embd": "8"}), encoding="utf-8")
    with pytest.raises(ValueError, match="config.json of .* is not as its model type needs it.*n_embd"):
        load_language_model(tmp_path)
