"""A drafter that predicts some of the target's tokens: its tables, its reduced LM head, saving and loading."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dspark_hf import DSparkConfig, DSparkDrafter, get_drafter

from ..tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_target
from .test_drafter import build, rewrite_weights, run

TOKENS = [2, 3, 5, 40, 41, 200, VOCAB_SIZE - 1]
HIDDEN = torch.randn(2, 3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))


def reduced(target: Any, **fields: Any) -> DSparkDrafter:
    return build(target, draft_tokens=TOKENS, draft_vocab_size=len(TOKENS), **fields)


def test_tables_are_those_of_other_formats() -> None:
    drafter = reduced(tiny_target())
    assert drafter.d2t.tolist() == [2, 2, 3, 37, 37, 195, VOCAB_SIZE - 7], "offsets: target id minus draft index"
    assert drafter.t2d.dtype == torch.bool and drafter.t2d.nonzero().flatten().tolist() == TOKENS
    assert drafter.draft_ids.tolist() == TOKENS
    drafter.set_draft_tokens([9, 7, 8, 1, 2, 3, 300])
    assert drafter.draft_ids.tolist() == [1, 2, 3, 7, 8, 9, 300], "in rising order, whatever theirs"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS[1:], "are 6 different ones but `draft_vocab_size` is 7"),
        ([*TOKENS[1:], 3], "are 6 different ones"),
        ([*TOKENS[:-1], VOCAB_SIZE], f"go from 2 to {VOCAB_SIZE}; the target's tokens are 0 to {VOCAB_SIZE - 1}"),
        ([*TOKENS[1:], -1], "go from -1 to"),
        (None, "`draft_vocab_size` is 7 and `draft_tokens` is unset; give both, the tokens from `dspark_hf.training"),
    ],
)
def test_wrong_tokens_are_refused(tokens: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_drafter(tiny_target(), DSparkConfig(draft_vocab_size=len(TOKENS)), draft_tokens=tokens)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=f"`draft_vocab_size` is {VOCAB_SIZE + 1}, more than the vocabulary"):
        get_drafter(tiny_target(), DSparkConfig(draft_vocab_size=VOCAB_SIZE + 1), draft_tokens=range(VOCAB_SIZE + 1))
    with pytest.raises(ValueError, match="`draft_vocab_size` is None and `draft_tokens` is given"):
        get_drafter(tiny_target(), draft_tokens=TOKENS)


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_logits_are_those_of_the_whole_head(family: str) -> None:
    target = tiny_target(family)
    drafter, whole = reduced(target), get_drafter(target, DSparkConfig(markov_rank=8))
    assert drafter.markov_head.markov_w2.weight.shape == (len(TOKENS), 8)
    assert drafter.markov_head.markov_w1.weight.shape == (VOCAB_SIZE, 8), "any token may come before"
    expected = whole.project(HIDDEN)
    torch.testing.assert_close(drafter.project(HIDDEN), expected[..., TOKENS])
    torch.testing.assert_close(drafter.target_logits(HIDDEN), expected)
    everywhere = drafter.over_vocabulary(drafter.project(HIDDEN))
    torch.testing.assert_close(everywhere[..., TOKENS], expected[..., TOKENS])
    assert everywhere[..., ~drafter.t2d].isneginf().all()
    assert torch.equal(whole.over_vocabulary(expected), expected)


def test_rows_are_gathered_once_and_again_after_a_change() -> None:
    target, drafter = tiny_target(), reduced(tiny_target(seed=1))
    drafter.bind_target(target)
    before = drafter.project(HIDDEN)
    rows = drafter._head_rows.of(target.lm_head, drafter.d2t)
    assert rows is drafter._head_rows.of(target.lm_head, drafter.d2t)
    with torch.no_grad():
        target.lm_head.weight.mul_(2.0)
    torch.testing.assert_close(drafter.project(HIDDEN), 2 * before)
    target.lm_head.weight.data = target.lm_head.weight.data / 2
    torch.testing.assert_close(drafter.project(HIDDEN), before)
    other = tiny_target(seed=2)
    drafter.bind_target(other)
    torch.testing.assert_close(drafter.project(HIDDEN), other.lm_head(HIDDEN)[..., TOKENS])
    drafter.set_draft_tokens(range(len(TOKENS)))
    torch.testing.assert_close(drafter.project(HIDDEN), other.lm_head(HIDDEN)[..., : len(TOKENS)])
    copied = copy.deepcopy(drafter)
    copied.bind_target(target)
    torch.testing.assert_close(copied.project(HIDDEN), target.lm_head(HIDDEN)[..., : len(TOKENS)])


def test_rows_keep_no_target_alive() -> None:
    target = tiny_target()
    drafter = reduced(target)
    drafter.project(HIDDEN)
    alive = weakref.ref(target.lm_head.weight)
    del target
    gc.collect()
    assert alive() is None


def test_head_with_a_bias_and_head_of_another_kind() -> None:
    class Scaled(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(hidden)

    target = tiny_target()
    drafter = reduced(target)
    for kind in (nn.Linear, Scaled):
        target.lm_head = kind(HIDDEN_SIZE, VOCAB_SIZE)
        drafter.bind_target(target)
        torch.testing.assert_close(drafter.project(HIDDEN), target.lm_head(HIDDEN)[..., TOKENS])


def test_rows_of_inference_mode_can_be_trained_through() -> None:
    target = tiny_target()
    drafter = reduced(target)
    with torch.inference_mode():
        drafter.project(HIDDEN)
    hidden = HIDDEN.clone().requires_grad_()
    drafter.project(hidden).sum().backward()
    torch.testing.assert_close(hidden.grad[0, 0], target.lm_head.weight[TOKENS].sum(dim=0))
    assert target.lm_head.weight.grad is None


@pytest.mark.parametrize("is_own", [False, True])
def test_reload_is_exact(tmp_path: Path, is_own: bool) -> None:
    target = tiny_target()
    drafter = reduced(target, markov_head_type="rnn")
    before = run(drafter)
    if is_own:
        drafter.copy_target_embeddings()
        assert drafter.lm_head.weight.shape == (len(TOKENS), HIDDEN_SIZE)
        torch.testing.assert_close(drafter.target_logits(HIDDEN), target.lm_head(HIDDEN))
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {"d2t", "t2d"} <= tensors.keys() and ("lm_head.weight" in tensors) is is_own
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    if not is_own:
        loaded.bind_target(target)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    torch.testing.assert_close(run(loaded), before)  # memory mapped by the loader is aligned in another way
    assert DSparkDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16).d2t.tolist() == drafter.d2t.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("t2d"), "among them \\['t2d'\\]"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"][1:].clone()), "of another shape, among them .*d2t"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"] + 1), "name different tokens"),
        (lambda tensors: tensors.update(d2t=torch.tensor(TOKENS)), "must hold offsets"),
        (lambda tensors: tensors.update(t2d=~tensors["t2d"]), "name different tokens"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    reduced(tiny_target()).save_pretrained(tmp_path)
    rewrite_weights(tmp_path, change)
    with pytest.raises(OSError, match=message):
        DSparkDrafter.from_pretrained(tmp_path)
