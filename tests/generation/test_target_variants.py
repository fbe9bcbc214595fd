"""Targets in other dtypes, quantised, padded, compiled, on other devices: still the target's own text."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, StaticCache

from dspark_hf import DSparkConfig, get_drafter

from ..tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_target
from .noisy import Batch, make_noisy_copy

NEW_TOKENS = 16
BATCH = Batch((20, 13, 17, 9), VOCAB_SIZE)
ONE = Batch((20,), VOCAB_SIZE)
LOW_PRECISION = (torch.bfloat16, torch.float16)


def prepare(target):
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target.eval()


def plain(target, batch: Batch, **options) -> torch.Tensor:
    # Where the embeddings are offloaded, the target's own `device` is `meta`.
    device = "cpu" if target.device.type == "meta" else target.device
    inputs = {name: value.to(device) for name, value in batch.inputs.items()}
    return target.generate(**inputs, **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options)


def drafted(target, drafter, batch: Batch, **options) -> torch.Tensor:
    return plain(target, batch, assistant_model=drafter, **options)


def real_drafter(target):
    torch.manual_seed(0)
    return get_drafter(target, DSparkConfig(block_size=4, num_hidden_layers=1, markov_rank=8))


def assert_lossless(target, drafter_dtype: torch.dtype | None = None) -> None:
    """One row and four, with a drafter that is partly right and with an untrained one with every head."""
    for batch in (ONE, BATCH):
        expected = plain(target, batch)
        noisy = make_noisy_copy(target).follow(batch.without_padding(expected))
        for drafter in (noisy, real_drafter(target)):
            drafter.to(drafter_dtype or drafter.dtype)
            assert drafted(target, drafter, batch).tolist() == expected.tolist()
        assert 1 < noisy.last_stats.mean_accepted_length < 4


# --- dtypes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4"])
@pytest.mark.parametrize("low", LOW_PRECISION, ids=str)
def test_low_precision_drafter(family, low):
    assert_lossless(prepare(tiny_target(family)), drafter_dtype=low)


@pytest.mark.parametrize("drafter_dtype", [torch.float32, *LOW_PRECISION], ids=str)
@pytest.mark.parametrize(("family", "low"), [("qwen3", LOW_PRECISION[0]), ("gemma3", LOW_PRECISION[1])], ids=str)
@torch.no_grad()
def test_low_precision_target(family, low, drafter_dtype):
    """Each token is the target's choice, up to what passes over one and over several tokens differ by."""
    target = prepare(tiny_target(family).to(low))
    for batch in (ONE, BATCH):
        noisy = make_noisy_copy(target).follow(batch.without_padding(plain(target, batch)))
        for drafter in (noisy, real_drafter(target)):
            output = drafted(target, drafter.to(drafter_dtype), batch)
            assert lost_by(target, output, batch) < 0.02
        assert noisy.last_stats.mean_accepted_length > 1.5
        assert drafted(target, drafter, batch, do_sample=True).shape == output.shape


def lost_by(target, output: torch.Tensor, batch: Batch) -> float:
    """How far the chosen tokens' logits are from the best ones', relative to the largest logit."""
    mask = torch.nn.functional.pad(batch.attention_mask, (0, NEW_TOKENS), value=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = target(output, attention_mask=mask, position_ids=positions).logits.float()[:, batch.width - 1 : -1]
    chosen = logits.gather(-1, output[:, batch.width :, None])[..., 0]
    return ((logits.amax(dim=-1) - chosen).max() / logits.abs().max()).item()


# --- quantised targets -------------------------------------------------------------------------------------------


def loaded(folder, **options):
    tiny_target("qwen3", intermediate_size=64).save_pretrained(folder)
    return prepare(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options))


def assert_not_quantised(drafter) -> None:
    assert getattr(drafter.config, "quantization_config", None) is None
    assert "quantization_config" not in drafter.config.to_dict()
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    assert {type(parameter) for parameter in drafter.parameters()} == {torch.nn.Parameter}


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(
    "quantization",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        # Without a threshold, above which a column of the batch is kept exact: text would depend on its neighbours.
        {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    ],
    ids=["4-bit", "8-bit"],
)
def test_bitsandbytes(tmp_path, quantization):
    config = BitsAndBytesConfig(**quantization)
    target = loaded(tmp_path, quantization_config=config, device_map={"": "cpu"})
    assert target.model.layers[0].mlp.up_proj.weight.dtype in (torch.uint8, torch.int8)
    assert_lossless(target)
    assert_not_quantised(real_drafter(target))
    assert target.config.quantization_config is not None


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    target = loaded(tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), device_map={"": "cpu"})
    assert "Int8" in type(target.model.layers[0].mlp.up_proj.weight).__name__
    assert_lossless(target)
    assert_not_quantised(real_drafter(target))


# --- vocabularies ------------------------------------------------------------------------------------------------


def test_padded_vocabulary():
    """Ids that no text has get no probability from the target, so they are never sampled, even if drafted."""
    size = 300
    target = prepare(tiny_target("qwen3"))
    padding = torch.arange(size, VOCAB_SIZE)
    target.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, padding, -torch.inf))
    prompts = [prompt.tolist() for prompt in BATCH.prompts]
    nothing_but_padding = make_noisy_copy(target).follow([prompt + [size + 5] * 99 for prompt in prompts])
    for drafter in (real_drafter(target), nothing_but_padding):
        for batch in (ONE, BATCH):
            assert drafted(target, drafter, batch).tolist() == plain(target, batch).tolist()
            torch.manual_seed(0)
            sampled = drafted(target, drafter, batch, do_sample=True, temperature=3.0, max_new_tokens=64)
            assert sampled.max() < size
            assert sampled.shape[1] == batch.width + 64


def test_resized_vocabulary_is_refused():
    target = prepare(tiny_target("qwen3"))
    drafter = real_drafter(target)
    target.resize_token_embeddings(VOCAB_SIZE + 16)
    with pytest.raises(ValueError, match=f"`vocab_size` is {VOCAB_SIZE} but the target .* {VOCAB_SIZE + 16}"):
        drafted(target, drafter, ONE)


# --- caches, compilation -----------------------------------------------------------------------------------------


def test_static_cache():
    """One row as in plain decoding, where Transformers can roll such a cache back; several are refused."""
    target = prepare(tiny_target("qwen3"))
    options = {"cache_implementation": "static", "disable_compile": True}
    drafter = real_drafter(target)
    message = "several prompts cannot be drafted at once. Leave `cache_implementation`"
    if StaticCache(config=target.config, max_cache_len=64).is_croppable:
        assert drafted(target, drafter, ONE, **options).tolist() == plain(target, ONE).tolist()
    else:
        message = "cannot be rolled back"
    with pytest.raises(ValueError, match=message):
        drafted(target, drafter, BATCH, **options)


@pytest.mark.slow
def test_compiled_target():
    target = prepare(tiny_target("qwen3", num_hidden_layers=2))
    expected = plain(target, BATCH)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    target.model.forward = torch.compile(target.model.forward, backend=backend, dynamic=True)
    drafter = make_noisy_copy(target).follow(BATCH.without_padding(expected))
    assert drafted(target, drafter, BATCH).tolist() == expected.tolist()
    assert graphs


# --- devices -----------------------------------------------------------------------------------------------------


def test_device_map(tmp_path):
    target = loaded(tmp_path, device_map={"": "cpu"})
    assert real_drafter(target).device == torch.device("cpu")
    assert_lossless(target)


@pytest.mark.parametrize(
    "offloaded",
    [["model.layers.1"], ["model.layers.0", "lm_head"], ["model.embed_tokens"]],
    ids=str,
)
def test_offloaded_target(tmp_path, offloaded):
    """Weights on disk come in for their module's call only."""
    modules = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]
    modules += [f"model.layers.{index}" for index in range(4)]
    places = {name: "disk" if name in offloaded else "cpu" for name in modules}
    target = loaded(tmp_path / "target", device_map=places, offload_folder=tmp_path / "weights")
    assert any(parameter.is_meta for parameter in target.parameters())
    assert real_drafter(target).device == torch.device("cpu")
    assert_lossless(target)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no second device")


@needs_cuda
@pytest.mark.parametrize(("target_device", "drafter_device"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_drafter_on_another_device(target_device, drafter_device):
    target = prepare(tiny_target("qwen3").to(target_device))
    for batch in (ONE, BATCH):
        expected = plain(target, batch)
        noisy = make_noisy_copy(target).follow(batch.without_padding(expected))
        for drafter in (noisy, real_drafter(target)):
            drafter.to(drafter_device)
            output = drafted(target, drafter, batch)
            assert output.device.type == target_device
            assert output.tolist() == expected.tolist()
            assert drafted(target, drafter, batch, do_sample=True).shape == expected.shape


@needs_cuda
def test_target_on_two_devices(tmp_path):
    """The first layers on the CPU, the others on the GPU; captured states come from both."""
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu"}
    places |= {"model.layers.2": 0, "model.layers.3": 0, "model.norm": 0, "lm_head": 0}
    target = loaded(tmp_path, device_map=places)
    assert real_drafter(target).device.type == "cuda"
    assert real_drafter(target).config.hidden_size == HIDDEN_SIZE
    assert_lossless(target)
