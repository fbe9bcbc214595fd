"""Drafters written in the formats of others: what is read back, what is refused, what others would find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_hf import AutoDrafter, Drafter, DSparkConfig, Eagle3Config, MTPConfig, get_drafter
from dspark_hf.conversion import EXPORT_FORMATS, detect_format, export_drafter

from ..parity.fixtures import EAGLE3_CASE, FIXTURES
from ..tiny import VOCAB_SIZE, tiny_prompt, tiny_target

SHAPE: dict[str, Any] = {"markov_rank": 8, "block_size": 4, "num_hidden_layers": 2}
ZLAB: dict[str, Any] = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "sample_from_anchor": False,
    "block_size": 4,
}
FACTS: dict[str, Any] = {
    "generation_prompt_ids": [5, 6],
    "enable_thinking": False,
    "target_name_or_path": "org/target",
}
DRAFT_TOKENS = [*range(0, 200, 2), 250, 319]


def make(config: Any, family: str = "qwen3", draft_tokens: Any = None) -> tuple[Any, Any]:
    """A target, and a drafter for it whose every weight is random."""
    target = tiny_target(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = get_drafter(target, config, draft_tokens=draft_tokens)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return target, drafter


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def fields(drafter: Drafter, *but: str) -> dict[str, Any]:
    """Every field of the config that drafters add to those of all models."""
    return {name: getattr(drafter.config, name) for name in type(drafter.config).drafter_fields() if name not in but}


def same_weights(ours: Drafter, theirs: Drafter) -> bool:
    """Bit for bit, for all weights that both have."""
    mine, others = ours.state_dict(), theirs.state_dict()
    shared = mine.keys() & others.keys()
    assert not {name for name in mine.keys() ^ others.keys() if name.split(".")[0] not in ("embed_tokens", "lm_head")}
    return all(torch.equal(mine[name], others[name]) for name in shared)


DSPARK = [
    ("qwen3", DSparkConfig(**SHAPE, **FACTS, confidence_temperatures=[1.0, 1.5, 2.0, 0.5])),
    ("llama", DSparkConfig(**SHAPE, confidence_head_with_markov=False)),
    ("gemma4", DSparkConfig(**SHAPE)),
]
OTHER_HEADS = [
    ("qwen3", DSparkConfig(**SHAPE, markov_head_type="rnn")),
    ("qwen3", DSparkConfig(**SHAPE, markov_head_type="gated", enable_confidence_head=False)),
]
DFLASH = [("qwen3", DSparkConfig(**(ZLAB | {"sample_from_anchor": True})))]
CASES = [
    *(("deepspec", "deepspec", *case) for case in (*DSPARK, *OTHER_HEADS, *DFLASH)),
    ("deepspec", "deepspec", "qwen3", Eagle3Config(block_size=4)),
    ("deepspec", "deepspec", "gemma4", Eagle3Config(block_size=4)),
    *(("vllm", "deepspec", *case) for case in DSPARK),
    ("vllm", "eagle3", "llama", Eagle3Config(head_norms=False, block_size=4, **FACTS)),
    ("vllm", "dflash", "qwen3", DSparkConfig(**ZLAB)),
    *(("sglang", "deepspec", *case) for case in (*DSPARK[:2], *OTHER_HEADS)),
    ("sglang", "eagle3", "llama", Eagle3Config(head_norms=False)),
    ("sglang", "dflash", "qwen3", DSparkConfig(**ZLAB)),
    ("zlab", "dflash", "qwen3", DSparkConfig(**ZLAB, **FACTS)),
    *(("speculators", "speculators", *case) for case in (*DSPARK[:2], *OTHER_HEADS, *DFLASH)),
    ("speculators", "speculators", "qwen3", DSparkConfig(**ZLAB)),
    ("speculators", "speculators", "llama", Eagle3Config(head_norms=False, block_size=4)),
    ("speculators", "speculators", "qwen3", Eagle3Config(head_norms=True, block_size=4)),
]


@pytest.mark.parametrize(("to", "found", "family", "config"), CASES)
def test_what_is_written_is_read_again(to: str, found: str, family: str, config: Any, tmp_path: Path) -> None:
    target, drafter = make(config, family)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    export_drafter(drafter, tmp_path / "out", to, target)
    assert detect_format(written(tmp_path / "out")) == found
    again = AutoDrafter.from_pretrained(tmp_path / "out")
    assert type(again) is type(drafter)
    assert same_weights(drafter, again)
    # Copies of the target's weights are new facts of the drafter; the rest is what it was.
    kept = ["share_target_embeddings", "share_target_head", "layer_types"]
    kept += [] if getattr(config, "enable_confidence_head", True) else ["confidence_head_with_markov"]
    assert fields(again, *kept) == fields(drafter, *kept)
    assert again.config.dtype == drafter.dtype
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in before.items()), "it is not changed"
    options = {"max_new_tokens": 12, "do_sample": False}
    prompts = tiny_prompt(batch=2)
    expected = target.generate(prompts, assistant_model=drafter, **options)
    lengths = [entry.accepted for entry in drafter.last_stats.rounds]
    assert torch.equal(target.generate(prompts, assistant_model=again, **options), expected)
    assert [entry.accepted for entry in again.last_stats.rounds] == lengths, "it drafts the same"


@pytest.mark.parametrize("case", ["qwen3-dspark-vanilla", "qwen3-dspark-rnn", "qwen3-dflash", EAGLE3_CASE])
@pytest.mark.skipif(not FIXTURES.is_dir(), reason="no fixtures")
def test_deepspec_checkpoints_come_out_as_they_went_in(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "drafter"
    export_drafter(AutoDrafter.from_pretrained(source), tmp_path / "out", "deepspec")
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # What only training and Transformers itself look at may differ.
    silent = {"transformers_version", "use_cache", "use_sliding_window", "max_window_layers", "num_anchors"}
    silent |= {"sliding_window", "pad_token_id", "step_loss_decay", "target_model_name_or_path"}
    before, after = written(source), written(tmp_path / "out")
    assert {name: after.get(name) for name in before.keys() - silent} == {
        name: before[name] for name in before.keys() - silent
    }


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="no fixtures")
def test_deepspec_gemma4_checkpoints_come_out_as_they_went_in(tmp_path: Path) -> None:
    source = FIXTURES / "gemma4-dspark-vanilla" / "drafter"
    drafter = AutoDrafter.from_pretrained(source)
    export_drafter(drafter, tmp_path / "out", "deepspec")
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert fields(AutoDrafter.from_pretrained(tmp_path / "out")) == fields(drafter)
    before, after = written(source), written(tmp_path / "out")
    for name in ("architectures", "model_type", "global_head_dim", "attention_k_eq_v", "num_global_key_value_heads"):
        assert after[name] == before[name]
    assert after["rope_parameters"]["full_attention"] == before["rope_parameters"]["full_attention"]


@pytest.mark.parametrize(("to", "has_embeddings"), [("vllm", True), ("speculators", False)])
def test_a_reduced_vocabulary_brings_its_head(to: str, has_embeddings: bool, tmp_path: Path) -> None:
    config = DSparkConfig(**SHAPE, draft_vocab_size=len(DRAFT_TOKENS))
    target, drafter = make(config, draft_tokens=DRAFT_TOKENS)
    export_drafter(drafter, tmp_path / "out", to, target)
    native, tensors = written(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert native["draft_vocab_size"] == len(DRAFT_TOKENS)
    assert ("embed_tokens.weight" in tensors) is has_embeddings
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight[DRAFT_TOKENS])
    assert (tensors["d2t"] + torch.arange(len(DRAFT_TOKENS))).tolist() == DRAFT_TOKENS
    assert tensors["markov_head.markov_w1.weight"].shape == (VOCAB_SIZE, 8)
    assert tensors["markov_head.markov_w2.weight"].shape == (len(DRAFT_TOKENS), 8)
    again = AutoDrafter.from_pretrained(tmp_path / "out")
    assert same_weights(drafter, again) and again.config.draft_vocab_size == len(DRAFT_TOKENS)
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(tiny_prompt(), **options)
    assert torch.equal(target.generate(tiny_prompt(), assistant_model=again, **options), plain)


def test_layers_are_numbered_as_readers_count(tmp_path: Path) -> None:
    """From the output of the first layer in DeepSpec and z-lab, from the embedding output in vLLM's own formats."""
    _, drafter = make(DSparkConfig(**SHAPE, target_layer_ids=[0, 2]))
    export_drafter(drafter, tmp_path / "deepspec", "deepspec")
    export_drafter(drafter, tmp_path / "speculators", "speculators")
    assert written(tmp_path / "deepspec")["target_layer_ids"] == [0, 2]
    assert written(tmp_path / "speculators")["aux_hidden_state_layer_ids"] == [1, 3]
    _, recurrent = make(Eagle3Config(head_norms=False, target_layer_ids=[0, 2]))
    export_drafter(recurrent, tmp_path / "eagle3", "vllm")
    native = written(tmp_path / "eagle3")
    assert native["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert native["eagle_aux_hidden_state_layer_ids"] == [1, 3]


def test_blocks_are_counted_as_readers_count(tmp_path: Path) -> None:
    """z-lab and speculators count the anchor where it is not predicted from."""
    _, drafter = make(DSparkConfig(**ZLAB))
    for to in ("zlab", "speculators"):
        export_drafter(drafter, tmp_path / to, to)
        assert written(tmp_path / to)["block_size"] == 5
    tokens = written(tmp_path / "speculators")["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert tokens == 4
    _, drafter = make(DSparkConfig(**SHAPE))
    for to in ("deepspec", "vllm", "sglang", "speculators"):
        export_drafter(drafter, tmp_path / f"{to}-dspark", to)
        assert written(tmp_path / f"{to}-dspark")["block_size"] == 4


def test_what_is_lost_is_said(tmp_path: Path) -> None:
    config = DSparkConfig(**SHAPE, confidence_temperatures=[1.0] * 4, enable_thinking=True)
    target, drafter = make(config)
    notes = export_drafter(drafter, tmp_path / "vllm", "vllm", target)
    assert len(notes) == 2 and "`confidence_temperatures`" in notes[0] and "thinking mode" in notes[1]
    notes = export_drafter(drafter, tmp_path / "speculators", "speculators")
    assert any("`verifier.name_or_path`" in note for note in notes)
    assert any("`verifier.architectures`" in note for note in notes)
    target.config.name_or_path = "org/target"
    target.config.architectures = ["Qwen3ForCausalLM"]
    export_drafter(drafter, tmp_path / "named", "speculators", target)
    verifier = written(tmp_path / "named")["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize(
    ("to", "family", "config", "message"),
    [
        ("vllm", "qwen3", DSparkConfig(**SHAPE, markov_head_type="rnn"), "'rnn', and vLLM builds the vanilla head"),
        ("vllm", "qwen3", DSparkConfig(**(SHAPE | {"markov_rank": 0})), "`markov_rank` = 0, and vLLM serves"),
        ("sglang", "qwen3", DSparkConfig(**(SHAPE | {"markov_rank": 0})), "`markov_rank` = 0, and SGLang serves"),
        ("sglang", "gemma4", DSparkConfig(**SHAPE), "Gemma 4's layers, which SGLang does not build"),
        ("vllm", "qwen3", Eagle3Config(), "`head_norms` = True, and a `LlamaForCausalLMEagle3` has no norms"),
        ("deepspec", "qwen3", Eagle3Config(head_norms=False), "`head_norms` = False, Llama's layers"),
        ("deepspec", "qwen3", DSparkConfig(**ZLAB), "`sample_from_anchor` = False, z-lab's convention"),
        (
            "deepspec",
            "gemma3",
            DSparkConfig(**SHAPE),
            "DeepSpec's format, whose readers build Qwen3's.*sandwich_norms",
        ),
        ("speculators", "gemma4", DSparkConfig(**SHAPE), "speculators' format, .*`use_value_norm` = True"),
        ("zlab", "qwen3", DSparkConfig(**SHAPE), "The drafter has heads \\(`markov_rank` = 8"),
        ("zlab", "qwen3", DSparkConfig(**(ZLAB | {"sample_from_anchor": True})), "DeepSpec's convention"),
        ("zlab", "qwen3", Eagle3Config(), "z-lab's format is one for DFlash"),
        ("speculators", "qwen3", MTPConfig(), "a MTPDrafter, a kind that no other project reads"),
        ("gguf", "qwen3", DSparkConfig(**SHAPE), "`to` is 'gguf'; choose one of deepspec, speculators, vllm"),
        (
            "vllm",
            "qwen3",
            DSparkConfig(**SHAPE, layer_types=["full_attention", "sliding_attention"], sliding_window=4),
            "in vLLM a sliding layer is causal inside the block",
        ),
        ("speculators", "qwen3", Eagle3Config(num_hidden_layers=2), "`num_hidden_layers` = 2, and speculators'"),
        ("vllm", "qwen3", Eagle3Config(num_hidden_layers=2, head_norms=False), "`num_hidden_layers` = 2; a `Llama"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(to: str, family: str, config: Any, message: str, tmp_path: Path) -> None:
    target, drafter = make(config, family)
    with pytest.raises(ValueError, match=message):
        export_drafter(drafter, tmp_path / "out", to, target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["deepspec", "sglang", "zlab"])
def test_a_reduced_vocabulary_is_refused_where_there_is_none(to: str, tmp_path: Path) -> None:
    config = DSparkConfig(**(ZLAB if to == "zlab" else SHAPE), draft_vocab_size=len(DRAFT_TOKENS))
    target, drafter = make(config, draft_tokens=DRAFT_TOKENS)
    with pytest.raises(ValueError, match=f"`draft_vocab_size` = {len(DRAFT_TOKENS)}"):
        export_drafter(drafter, tmp_path / "out", to, target)


def test_weights_of_the_target_are_asked_for(tmp_path: Path) -> None:
    _, drafter = make(DSparkConfig(**SHAPE))
    drafter.save_pretrained(tmp_path / "own")
    loaded = AutoDrafter.from_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="`target` is unset, and DeepSpec's format needs weights that this drafter"):
        export_drafter(loaded, tmp_path / "out", "deepspec")
    export_drafter(loaded, tmp_path / "out", "deepspec", tiny_target())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tiny_target().lm_head.weight)
    with pytest.raises(ValueError, match="not empty; give a new folder"):
        export_drafter(loaded, tmp_path / "out", "deepspec", tiny_target())
    with pytest.raises(ValueError, match="`hidden_size` is 64 but the target"):
        export_drafter(loaded, tmp_path / "wrong", "deepspec", tiny_target(hidden_size=32))
    with pytest.raises(TypeError, match="`drafter` is of type Qwen3ForCausalLM; give a drafter"):
        export_drafter(tiny_target(), tmp_path / "wrong", "vllm")  # type: ignore[arg-type]


def test_adapters_are_merged_first(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    target, drafter = make(DSparkConfig(**SHAPE))
    adapted: Any = get_peft_model(drafter, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match="merge the adapter first"):
        export_drafter(adapted, tmp_path / "out", "vllm", target)
    export_drafter(adapted.merge_and_unload(), tmp_path / "out", "vllm", target)


def test_large_drafters_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_hf.conversion.export.MAX_SHARD_SIZE", "40KB")
    target, drafter = make(DSparkConfig(**SHAPE))
    for to in ("deepspec", "sglang", "speculators"):
        export_drafter(drafter, tmp_path / to, to, target)
        assert len(list((tmp_path / to).glob("*.safetensors"))) > 1
        assert same_weights(drafter, AutoDrafter.from_pretrained(tmp_path / to))


def test_own_facts_must_be_a_mapping(tmp_path: Path) -> None:
    target, drafter = make(DSparkConfig(**SHAPE))
    for to in ("deepspec", "speculators"):
        export_drafter(drafter, tmp_path / to, to, target)
        native = written(tmp_path / to) | {"dspark_hf": [1]}
        (tmp_path / to / "config.json").write_text(json.dumps(native), encoding="utf-8")
        with pytest.raises(TypeError, match="`dspark_hf` is \\[1\\]; it must be a mapping"):
            AutoDrafter.from_pretrained(tmp_path / to)


def test_every_format_is_offered_by_the_command() -> None:
    from dspark_hf.cli.convert import Format

    assert {entry.value for entry in Format} == {"dspark", *EXPORT_FORMATS}
