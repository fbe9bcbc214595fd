from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

from dspark_hf import AutoDrafter, DSparkConfig, DSparkDrafter, Eagle3Config, MTPConfig, get_drafter
from dspark_hf.data import generation_prompt
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments, choose_draft_tokens, train_drafter

from ..tiny import tiny_target
from .conftest import VOCAB_SIZE

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "dspark": (DSparkConfig, {"markov_rank": 8}),
    "rnn": (DSparkConfig, {"markov_rank": 8, "markov_head_type": "rnn"}),
    "dflash": (DSparkConfig, {"markov_rank": 0, "enable_confidence_head": False}),
    "zlab": (DSparkConfig, {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}),
    "zlab-heads": (DSparkConfig, {"markov_rank": 8, "sample_from_anchor": False}),
    "eagle3": (Eagle3Config, {}),
    "mtp": (MTPConfig, {}),
}


def make_drafter(
    target: PreTrainedModel, draft_tokens: list[int] | None = None, kind: str = "dspark", **options: Any
) -> Any:
    torch.manual_seed(0)
    config_class, shape = KINDS[kind]
    config = config_class(**{"num_hidden_layers": 1, "block_size": 4, **shape, **options})
    return get_drafter(target, config, draft_tokens=draft_tokens)


def make_args(folder: Path, **options: Any) -> DSparkTrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "num_anchors": 6,
        "logging_steps": 2,
        "learning_rate": 3e-3,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return DSparkTrainingArguments(output_dir=str(folder), **{**defaults, **options})


def weights(drafter: DSparkDrafter) -> torch.Tensor:
    parameters = sorted(drafter.named_parameters())
    return torch.cat([parameter.detach().flatten() for _, parameter in parameters])


def accepted_length(target: PreTrainedModel, drafter: Any, dataset: Dataset) -> float:
    """Of the greedy text of which the dataset is made, which must not change."""
    prompts = torch.tensor([row["input_ids"][:2] for row in dataset])
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    output = target.generate(prompts, assistant_model=drafter, **options)
    assert torch.equal(output, target.generate(prompts, **options))
    return drafter.last_stats.mean_accepted_length


@pytest.mark.parametrize("kind", KINDS)
def test_training_helps(target: PreTrainedModel, dataset: Dataset, tmp_path: Path, kind: str) -> None:
    loss: dict[str, Any] = {"ce_weight": 1.0, "tv_weight": 0.0} if kind in ("dflash", "zlab") else {}
    drafter = make_drafter(target, kind=kind)
    before = [parameter.clone() for parameter in target.parameters()]
    trainer = DSparkTrainer(drafter, target, make_args(tmp_path, **loss), dataset, dataset)
    untrained = accepted_length(target, drafter, dataset)
    first = trainer.evaluate()
    trainer.args.max_steps = 40
    trainer.train()
    last = trainer.evaluate()
    assert last["eval_loss"] < 0.97 * first["eval_loss"]
    assert last["eval_tau"] > first["eval_tau"] >= 1
    assert all(0 <= last[f"eval_accept_rate@{slot}"] <= 1 for slot in range(4))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == list(range(2, 41, 2))
    assert {"ce_loss", "tau", "accept_rate@0", "learning_rate"} <= set(logs[-1])
    assert ("confidence_loss" in logs[-1]) == (drafter.confidence_head is not None)
    if drafter.confidence_head is not None:
        parts = 0.1 * logs[-1]["ce_loss"] + 0.9 * logs[-1]["l1_loss"] + logs[-1]["confidence_loss"]
        assert logs[-1]["loss"] == pytest.approx(parts, rel=0.05)  # means over slots and over steps
    assert all(torch.equal(old, new) for old, new in zip(before, target.parameters()))
    assert all(parameter.grad is None for parameter in target.parameters())
    assert accepted_length(target, drafter.eval(), dataset) > untrained


def test_draft_vocabulary_is_learned(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    """Tokens that the drafter cannot predict count as rejected: no drafter of so few could do better."""
    args = make_args(tmp_path, max_steps=40)
    tokens = choose_draft_tokens(target, dataset, 12, args)
    drafter = make_drafter(target, tokens, draft_vocab_size=len(tokens))
    trainer = DSparkTrainer(drafter, target, args, dataset, dataset)
    first = trainer.evaluate()
    trainer.train()
    last = trainer.evaluate()
    assert last["eval_l1_loss"] < 0.97 * first["eval_l1_loss"]
    assert last["eval_ce_loss"] < first["eval_ce_loss"] < float("inf")
    with torch.no_grad():
        logits = target(torch.tensor(dataset[0]["input_ids"])[None]).logits[0, 2:]
    covered = logits.softmax(dim=-1)[:, tokens].sum(dim=-1).mean()
    assert last["eval_accept_rate@0"] < covered + 0.1


class Stop(TrainerCallback):
    """Breaks a run off after some steps, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = control.should_save = state.global_step == self.step
        return control


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_resumed_run_equals_an_unbroken_one(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, kind: str
) -> None:
    unbroken = train_drafter(target, dataset, make_drafter(target, kind=kind), make_args(tmp_path / "a"))
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100}
    args = make_args(tmp_path / "b", **options)
    # Step 3 of 4 in the first epoch: the rest of it must come in the same order.
    broken = train_drafter(target, dataset, make_drafter(target, kind=kind), args, callbacks=[Stop(3)])
    assert not torch.equal(weights(broken), weights(unbroken))
    checkpoint = tmp_path / "b" / "checkpoint-3"
    assert torch.equal(weights(AutoDrafter.from_pretrained(checkpoint)), weights(broken))
    with pytest.raises(ValueError, match="up to checkpoint-3: set `resume` .* or give a fresh folder as `output_dir`"):
        train_drafter(target, dataset, make_drafter(target), args)
    args = make_args(tmp_path / "b", **options)
    resumed = train_drafter(target, dataset, make_drafter(target, kind=kind), args, resume=True)
    torch.testing.assert_close(weights(resumed), weights(unbroken), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["dspark", "zlab", "eagle3", "mtp"])
def test_accumulated_batches_equal_one_large_batch(
    target: PreTrainedModel, dataset: Dataset, tmp_path: Path, kind: str
) -> None:
    results = []
    for size, accumulation in ((8, 1), (2, 4)):
        args = make_args(
            tmp_path, max_steps=2, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation
        )
        trainer = DSparkTrainer(make_drafter(target, kind=kind), target, args, dataset)
        trainer.train()
        results.append((weights(trainer.model), trainer.state.log_history[0]["loss"]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-5, rtol=0)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)


def test_saved_drafter_and_summary(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    drafter = make_drafter(target)
    drafter.copy_target_embeddings()
    embeddings = drafter.embed_tokens.weight.clone()
    args = make_args(tmp_path, max_steps=3, loss_memory=0.015)
    train_drafter(target, dataset, drafter, args, eval_data=dataset.select(range(4)))
    assert torch.equal(drafter.embed_tokens.weight, embeddings), "the drafter's own embeddings stay frozen"
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    assert torch.equal(weights(loaded), weights(drafter))
    summary = json.loads((tmp_path / "training_summary.json").read_text())
    assert summary["steps"] == 3 and summary["data"]["examples"] == 16
    assert summary["metrics"]["eval_tau"] >= 1 and summary["arguments"]["num_anchors"] == 6
    loaded.config.confidence_temperatures = [2.0] * loaded.config.block_size
    loaded.save_pretrained(tmp_path / "calibrated")
    warm = train_drafter(target, dataset, tmp_path / "calibrated", make_args(tmp_path / "warm", max_steps=1))
    assert warm.config.num_hidden_layers == 1
    assert warm.config.confidence_temperatures is None, "other weights, other temperatures"


def test_user_errors(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        train_drafter(target, dataset, drafter, make_args(tmp_path), resume=True)
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB_SIZE}"):
        train_drafter(target, Dataset.from_list([{"input_ids": [5, 500]}]), drafter, make_args(tmp_path))
    for names in ({"target": "./nope"}, {"drafter": "./nope"}, {"target": Path("./nope/nope/nope")}):
        options = {"target": target, "drafter": drafter, **names}
        with pytest.raises(OSError, match=f"There is no folder .*nope'; `{next(iter(names))}` takes"):
            train_drafter(train_data=dataset, training_args=make_args(tmp_path), **options)
    drafter.config.vocab_size = 7
    with pytest.raises(ValueError, match="made for another target"):
        DSparkTrainer(drafter, target, make_args(tmp_path), dataset)


@pytest.mark.parametrize("thinking", [None, False])
def test_chat_template_is_recorded(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, thinking: bool | None
) -> None:
    """The drafter knows how its chats ended before an answer; text alone leaves this unset."""
    messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "how are you"}]
    for rows, expected in (
        ([{"messages": messages}] * 4, generation_prompt(tokenizer, thinking)),
        ([{"text": "hello there how are you"}] * 4, None),
    ):
        args = make_args(tmp_path / str(expected is None), max_steps=1, enable_thinking=thinking)
        train_drafter(target, Dataset.from_list(rows), make_drafter(target), args, tokenizer=tokenizer)
        loaded = DSparkDrafter.from_pretrained(args.output_dir).config
        assert loaded.generation_prompt_ids == expected
        assert loaded.enable_thinking == (thinking if expected else None)


def test_target_whose_head_sees_something_else(target: PreTrainedModel, dataset: Dataset, tmp_path: Path) -> None:
    """Families may have layers between the last state and the head; here the state that is returned is halved."""
    model = tiny_target("qwen3")
    drafter = make_drafter(model)
    forward = model.forward

    def altered(**inputs: Any) -> Any:
        output = forward(**inputs)
        if output.hidden_states is not None:
            output.hidden_states = (*output.hidden_states[:-1], output.hidden_states[-1] / 2)
        return output

    model.forward = altered
    with pytest.raises(ValueError, match="does not make its logits from its last hidden state"):
        DSparkTrainer(drafter, model, make_args(tmp_path), train_dataset=dataset)
