"""Adapters of PEFT around a drafter: trained, saved, loaded, merged, used in `generate`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from dspark_hf import DSparkDrafter, custom_generate
from dspark_hf.training import train_drafter

from .conftest import VOCAB_SIZE
from .test_trainer import make_args, make_drafter


def adapt(drafter: DSparkDrafter, modules: Any = ("q_proj", "v_proj", "markov_w2")) -> PeftModel:
    config = LoraConfig(r=4, target_modules=modules if isinstance(modules, str) else list(modules))
    return get_peft_model(copy.deepcopy(drafter), config)


@torch.no_grad()
def logits(model: Any, target: PreTrainedModel) -> torch.Tensor:
    """Draft logits of a block, sequential head included."""
    model.bind_target(target)
    width = len(model.config.target_layer_ids) * model.config.hidden_size
    states = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0))
    block = model.block_input_ids(torch.tensor([[7]]))
    output = model(block, states, torch.arange(5 + block.shape[1])[None])
    return model.sequential_logits(output.logits, output.last_hidden_state, block)


def test_adapter_is_trained_saved_loaded_and_merged(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    drafter = make_drafter(target)
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight, std=0.1)
    adapted = adapt(drafter)
    options = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 4}
    trained: Any = train_drafter(target, dataset, adapted, make_args(tmp_path, **options))
    assert trained is adapted
    for name, weight in drafter.state_dict().items():
        stem, _, kind = name.rpartition(".")
        state = trained.get_base_model().state_dict()
        assert torch.equal(state.get(name, state.get(f"{stem}.base_layer.{kind}")), weight), f"{name} was trained"
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        assert (folder / "adapter_model.safetensors").stat().st_size < 20_000
        assert not (folder / "model.safetensors").exists()

    expected = logits(trained, target)
    assert not torch.allclose(expected, logits(copy.deepcopy(drafter), target), atol=1e-2)
    loaded = PeftModel.from_pretrained(copy.deepcopy(drafter), tmp_path)
    torch.testing.assert_close(logits(loaded, target), expected)
    merged = loaded.merge_and_unload()
    assert type(merged) is DSparkDrafter
    assert [name for name, _ in merged.named_parameters()] == [name for name, _ in drafter.named_parameters()]
    torch.testing.assert_close(logits(merged, target), expected, rtol=1e-4, atol=1e-4)

    resumed = train_drafter(
        target, dataset, adapt(drafter), make_args(tmp_path, **options), resume=str(tmp_path / "checkpoint-4")
    )
    torch.testing.assert_close(logits(resumed, target), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("modules", ["all-linear", ["fc", "proj"]])
def test_adapted_drafter_drafts(target: PreTrainedModel, modules: Any) -> None:
    adapted = adapt(make_drafter(target), modules)
    prompts = torch.randint(3, VOCAB_SIZE, (2, 5), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(prompts, **options)
    assert torch.equal(target.generate(prompts, assistant_model=adapted, **options), plain)
    assert adapted.last_stats.rounds
    assert torch.equal(target.generate(prompts, custom_generate=custom_generate(adapted), **options), plain)
