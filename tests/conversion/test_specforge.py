"""Drafters as SpecForge stores them: keys in two places, variants that are refused, weights that are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_hf import AutoDrafter, DSparkConfig
from dspark_hf.conversion import config_from_specforge, detect_format, export_drafter

from .test_export import SHAPE, make

HEADS = ("markov_rank", "markov_head_type", "confidence_head_with_markov", "enable_confidence_head")
LAYERS = ("target_layer_ids", "mask_token_id")


def write_specforge(folder: Path, nested: bool = True, **changes: Any) -> tuple[dict[str, Any], Any, Any]:
    """A drafter's checkpoint in SpecForge's layout: its config, its target, and the drafter."""
    target, drafter = make(DSparkConfig(**SHAPE))
    export_drafter(drafter, folder, "sglang", target)
    native = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    native["architectures"] = ["DSparkDraftModel"]
    inner = {name: native.pop(name) for name in LAYERS}
    if nested:
        inner |= {name: native.pop(name) for name in HEADS if name in native}
    native["dflash_config"] = inner | {"projector_type": "dspark"} | changes
    (folder / "config.json").write_text(json.dumps(native), encoding="utf-8")
    return native, target, drafter


@torch.no_grad()
@pytest.mark.parametrize("nested", [True, False])
def test_read_and_used(nested: bool, tmp_path: Path) -> None:
    native, target, drafter = write_specforge(tmp_path, nested)
    assert detect_format(native) == "specforge"
    loaded: Any = AutoDrafter.from_pretrained(tmp_path)
    for name in (*HEADS, *LAYERS, "block_size", "sample_from_anchor", "num_hidden_layers"):
        assert getattr(loaded.config, name) == getattr(drafter.config, name), name
    ours = drafter.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in loaded.state_dict().items())
    ids = torch.arange(3, 15)[None]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=loaded, **options), plain)


def test_heads_where_nothing_is_said(tmp_path: Path) -> None:
    native, _, _ = write_specforge(tmp_path)
    inner = native["dflash_config"]
    for name in HEADS:
        inner.pop(name, None)
    config = config_from_specforge(native)
    assert (config.markov_rank, config.enable_confidence_head, config.confidence_head_with_markov) == (0, True, False)
    assert not config_from_specforge(native | {"use_confidence_head": False}).enable_confidence_head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": True}, "`causal` = True, a variant that is not supported here; only False is"),
        ({"projector_type": "dflash"}, "`projector_type` = 'dflash'"),
        ({"sample_from_anchor": False}, "`sample_from_anchor` = False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "`sliding_attention`"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_specforge(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(tmp_path)


def test_wrong_types_are_named(tmp_path: Path) -> None:
    native, _, _ = write_specforge(tmp_path)
    with pytest.raises(TypeError, match="`dflash_config` is 'x'"):
        config_from_specforge(native | {"dflash_config": "x"})


def test_tensors_must_be_all_of_them(tmp_path: Path) -> None:
    write_specforge(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    tensors = load_file(weights)
    save_file(tensors | {"more": torch.zeros(1)}, weights, metadata={"format": "pt"})
    with pytest.raises(OSError, match="more"):
        AutoDrafter.from_pretrained(tmp_path)
    del tensors["fc.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(OSError, match="fc.weight"):
        AutoDrafter.from_pretrained(tmp_path)
