"""Drafters in speculators' format: config keys, what is refused, and what the library itself makes of our files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_hf import AutoDrafter, DSparkConfig, Eagle3Config
from dspark_hf._compat import captured_states
from dspark_hf.conversion import config_from_speculators, export_drafter

from ..tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_prompt
from .test_export import DRAFT_TOKENS, SHAPE, ZLAB, make

LAYER: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
NATIVE: dict[str, Any] = {
    "speculators_model_type": "dspark",
    "speculators_config": {"verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]}},
    "transformer_layer_config": LAYER,
    "draft_vocab_size": VOCAB_SIZE,
    "block_size": 4,
    "mask_token_id": 319,
    "aux_hidden_state_layer_ids": [1, 3],
    "markov_rank": 8,
    "markov_head_type": "vanilla",
}


def changed(**changes: Any) -> dict[str, Any]:
    layer = LAYER | changes.pop("layer", {})
    return NATIVE | {"transformer_layer_config": layer} | changes


def test_config() -> None:
    config: Any = config_from_speculators(NATIVE)
    assert type(config) is DSparkConfig
    assert (config.block_size, config.sample_from_anchor, config.target_layer_ids) == (4, True, [0, 2])
    assert (config.markov_rank, config.enable_confidence_head, config.draft_vocab_size) == (8, True, None)
    assert config.target_name_or_path == "org/target" and config.share_target_embeddings
    dflash: Any = config_from_speculators(changed(speculators_model_type="dflash"))
    assert (dflash.block_size, dflash.sample_from_anchor, dflash.markov_rank) == (3, False, 0)
    assert not dflash.enable_confidence_head
    filled: Any = config_from_speculators(changed(sample_from_anchor=False, draft_vocab_size=100))
    assert (filled.block_size, filled.draft_vocab_size, filled.markov_rank) == (3, 100, 8)
    recurrent: Any = config_from_speculators(
        changed(
            speculators_model_type="eagle3",
            eagle_aux_hidden_state_layer_ids=[2, 4, 6],
            layer={"num_hidden_layers": 1, "model_type": "llama"},
        )
    )
    assert type(recurrent) is Eagle3Config and not recurrent.head_norms and not recurrent.share_target_head
    assert recurrent.target_layer_ids == [1, 3, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer_layer_config": None}, "lacks \\['transformer_layer_config'\\]"),
        ({"speculators_model_type": "peagle"}, "`speculators_model_type` = 'peagle'; supported are"),
        ({"layer": {"vocab_size": None}}, "lacks \\['vocab_size'\\]"),
        ({"mask_token_id": None}, "lacks \\['mask_token_id'\\]"),
        ({"target_hidden_size": 32}, "64 wide and its target 32"),
        ({"layer": {"layer_types": ["full_attention", "sliding_attention"]}}, "`sliding_attention`"),
        (
            {"speculators_model_type": "eagle3", "layer": {"num_hidden_layers": 1}, "norm_output": True},
            "`norm_output`",
        ),
        ({"speculators_model_type": "eagle3"}, "has 2 layers of type 'qwen3'; supported is one layer"),
        ({"speculators_model_type": "eagle3", "layer": {"model_type": "gpt_oss"}}, "of type 'gpt_oss'"),
        ({"aux_hidden_state_layer_ids": [3, 1]}, "strictly rising order"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_speculators(changed(**changes))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"transformer_layer_config": [1]}, "transformer_layer_config"),
        ({"block_size": "4"}, "block_size"),
        ({"aux_hidden_state_layer_ids": "1,3"}, "target_layer_ids"),
        ({"sample_from_anchor": "yes"}, "sample_from_anchor"),
    ],
)
def test_wrong_types_are_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` is"):
        config_from_speculators(NATIVE | changes)


def test_tensors_must_be_all_of_them(tmp_path: Path) -> None:
    target, drafter = make(DSparkConfig(**SHAPE))
    export_drafter(drafter, tmp_path, "speculators", target)
    tensors = load_file(tmp_path / "model.safetensors")
    for extra in ("embed_tokens.weight", "verifier_lm_head.weight", "lm_head.weight", "d2t"):
        tensors[extra] = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert AutoDrafter.from_pretrained(tmp_path).config.share_target_embeddings, "what is the target's is left out"
    save_file(tensors | {"more": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match="does not account for, among them \\['more'\\]"):
        AutoDrafter.from_pretrained(tmp_path)
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match="fc.weight"):
        AutoDrafter.from_pretrained(tmp_path)


# --- the library itself ------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("speculators", reason="speculators is not installed")


def load_theirs(library: Any, folder: Path, target: Any, drafter: Any) -> Any:
    """Our export, loaded by the library, whose own attention on a CPU needs a compiler."""
    target.save_pretrained(folder / "target")
    target.config.name_or_path = str(folder / "target")
    target.config.architectures = [type(target).__name__]
    export_drafter(drafter, folder / "out", "speculators", target)
    config = library.SpeculatorModelConfig.from_pretrained(str(folder / "out"))
    config.transformer_layer_config._attn_implementation = "sdpa"
    theirs = library.SpeculatorModel.from_pretrained(str(folder / "out"), config=config)
    theirs.load_verifier_weights()
    return theirs.float().eval()


BLOCKS = [
    DSparkConfig(**SHAPE),
    DSparkConfig(**SHAPE, markov_head_type="gated"),
    DSparkConfig(**SHAPE, markov_head_type="rnn", confidence_head_with_markov=False),
    DSparkConfig(**SHAPE, draft_vocab_size=len(DRAFT_TOKENS)),
    DSparkConfig(**ZLAB),
]


@torch.no_grad()
@pytest.mark.parametrize("config", BLOCKS, ids=["vanilla", "gated", "rnn", "reduced", "dflash"])
def test_the_library_computes_the_same(library: Any, config: Any, tmp_path: Path) -> None:
    reduced = None if config.draft_vocab_size is None else DRAFT_TOKENS
    target, drafter = make(config, draft_tokens=reduced)
    theirs = load_theirs(library, tmp_path, target, drafter)
    ids = tiny_prompt(length=24)
    outputs = target(ids, output_hidden_states=True).hidden_states
    states, last = captured_states(outputs, drafter.config.target_layer_ids), outputs[-1]
    torch.manual_seed(0)
    hidden, logits, _, _, positions = theirs._backbone_forward(
        states, ids, torch.ones_like(ids), last, torch.zeros_like(ids), max_anchors=6
    )
    width = drafter.config.block_width
    anchors = positions.view(-1, width)[:, 0].tolist()
    assert len(set(anchors)) == 6
    skipped = width - drafter.config.block_size
    for index, anchor in enumerate(anchors):
        block = drafter.block_input_ids(ids[:, anchor : anchor + 1])
        output = drafter(block, states[:, :anchor], torch.arange(anchor + width)[None])
        own = slice(index * width + skipped, (index + 1) * width)
        torch.testing.assert_close(output.last_hidden_state, hidden[:, own], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.logits, logits[:, own], atol=1e-4, rtol=1e-4)
        if config.markov_rank:
            previous = ids[:, anchor : anchor + width]
            theirs_bias = theirs.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden[:, own])
            ours = drafter.markov_head(previous, output.last_hidden_state)
            torch.testing.assert_close(ours, theirs_bias, atol=1e-5, rtol=1e-5)
            assert torch.equal(drafter.confidence_head.proj.weight, theirs.confidence_head.proj.weight)


@torch.no_grad()
@pytest.mark.parametrize("head_norms", [True, False], ids=["qwen3", "llama"])
def test_the_library_drafts_the_same_with_eagle3(library: Any, head_norms: bool, tmp_path: Path) -> None:
    target, drafter = make(Eagle3Config(head_norms=head_norms))
    theirs = load_theirs(library, tmp_path, target, drafter)
    ids = tiny_prompt(length=16)
    states = captured_states(target(ids, output_hidden_states=True).hidden_states, drafter.config.target_layer_ids)
    drafts = theirs(states[:, :-1], ids[:, 1:], torch.zeros_like(ids[:, 1:]), ttt_steps=1)
    output = drafter(ids[:, 1:], drafter.fuse(states[:, :-1]), torch.arange(15)[None])
    assert torch.equal(output.logits.argmax(-1), drafts[0])


def test_the_library_accepts_the_config(library: Any, tmp_path: Path) -> None:
    for number, config in enumerate([*BLOCKS, Eagle3Config(head_norms=False)]):
        reduced = None if config.draft_vocab_size is None else DRAFT_TOKENS
        target, drafter = make(config, draft_tokens=reduced)
        folder = tmp_path / str(number)
        export_drafter(drafter, folder, "speculators", target)
        read = library.SpeculatorModelConfig.from_pretrained(str(folder))
        native = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert read.speculators_config.algorithm == native["speculators_model_type"]
        assert read.draft_vocab_size == drafter.config.predicted_vocab_size
        method = read.speculators_config.proposal_methods[0]
        assert method.speculative_tokens == drafter.config.block_size
