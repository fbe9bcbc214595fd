"""Inference mode is used where nobody can tell, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache
from transformers.cache_utils import DynamicLayer

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf._compat import CACHE_ARGUMENT
from dspark_hf.generation.inference import forward_mode

from ..tiny import tiny_prompt, tiny_target

NEW_TOKENS = 12


@pytest.fixture
def target():
    return tiny_target("qwen3")


@pytest.fixture
def drafter(target):
    return get_drafter(target, DSparkConfig(block_size=4, num_hidden_layers=1, markov_rank=8, mask_token_id=1))


def generate(target, drafter, **options):
    options = {"max_new_tokens": NEW_TOKENS, "assistant_model": drafter, **options}
    return target.generate(tiny_prompt(7), **options)


@pytest.fixture
def modes(monkeypatch):
    """Whether each update of a cache, of target or drafter, ran in inference mode."""
    seen = []
    update = DynamicLayer.update

    def watch(self, *args, **kwargs):
        seen.append(torch.is_inference_mode_enabled())
        return update(self, *args, **kwargs)

    monkeypatch.setattr(DynamicLayer, "update", watch)
    return seen


def test_target_and_drafter_run_in_inference_mode(target, drafter, modes):
    generate(target, drafter)
    assert set(modes) == {True}


class Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_target_that_keeps_something_runs_without(target, drafter, modes, monkeypatch):
    def run():
        modes.clear()
        generate(target, drafter)
        return set(modes)

    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert run() == {False}
    handle.remove()
    handle = target.lm_head.register_forward_pre_hook(lambda *_: None)
    assert run() == {False}, "the drafter uses the target's head"
    handle.remove()
    assert run() == {True}
    layer = target.model.layers[0]
    forward = type(layer.mlp).forward
    with monkeypatch.context() as patch:
        patch.setattr(type(layer.mlp), "forward", lambda self, states: forward(self, states))
        assert run() == {False, True}, "the drafter may still"
    inner, layer.mlp = layer.mlp, Wrapper(layer.mlp)
    assert run() == {False, True}
    layer.mlp = inner
    type_of_target = type(target)
    target.__class__ = type("Derived", (type_of_target,), {"__module__": __name__})
    assert run() == {False, True}
    target.__class__ = type_of_target


@pytest.mark.parametrize("hooked", ["target", "drafter"])
def test_hooks_of_the_user_get_ordinary_tensors(target, drafter, hooked):
    kept = []
    module = target.model.layers[1] if hooked == "target" else drafter.layers[0]
    module.register_forward_hook(lambda module, inputs, output: kept.append(output))
    generate(target, drafter)
    probe = torch.nn.Linear(kept[0].shape[-1], 1)
    probe(kept[0]).sum().backward()
    kept[0].add_(1)
    assert probe.weight.grad is not None


def test_what_is_returned_is_ordinary(target, drafter):
    target.set_attn_implementation("eager")
    output = generate(
        target,
        drafter,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    tensors = [output.sequences, *output.scores, *output.logits]
    tensors += [state for step in (*output.hidden_states, *output.attentions) for state in step]
    tensors += [layer.keys for layer in output.past_key_values.layers]
    assert not any(tensor.is_inference() for tensor in tensors)


@pytest.mark.parametrize("rows", [1, 2])
def test_cache_of_the_user_is_ordinary_afterwards(target, drafter, rows):
    cache = DynamicCache(config=target.config)
    prompts = tiny_prompt(7).expand(rows, -1)
    options = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, CACHE_ARGUMENT: cache}
    target.generate(prompts, assistant_model=drafter, **options)
    states = [states for layer in cache.layers for states in (layer.keys, layer.values) if states is not None]
    assert states and not any(state.is_inference() for state in states)
    cache.reset()
    hidden = target.model(tiny_prompt(3), **{CACHE_ARGUMENT: cache}).last_hidden_state
    hidden.sum().backward()


def test_cache_is_ordinary_after_an_error(target, drafter):
    def fail(module, inputs):
        raise RuntimeError("on purpose")

    cache = DynamicCache(config=target.config)
    drafter.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        generate(target, drafter, **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 7
    assert not any(layer.keys.is_inference() for layer in cache.layers)


class KeepsScores(LogitsProcessor):
    """Changes scores in place, and keeps them."""

    def __init__(self):
        self.kept = []

    def __call__(self, input_ids, scores):
        scores[:, 5] = -torch.inf
        self.kept.append(scores)
        return scores


@pytest.mark.parametrize("markov_rank", [0, 8])
def test_processors_of_the_user_get_ordinary_tensors(target, markov_rank):
    drafter = get_drafter(
        target, DSparkConfig(block_size=4, num_hidden_layers=1, markov_rank=markov_rank, mask_token_id=1)
    )
    processor = KeepsScores()
    output = generate(target, drafter, logits_processor=LogitsProcessorList([processor]))
    plain = generate(target, None, logits_processor=LogitsProcessorList([KeepsScores()]))
    assert torch.equal(output, plain)
    assert not any(scores.is_inference() for scores in processor.kept)


@pytest.mark.parametrize("markov_rank", [0, 8])
def test_temperature_in_place_of_greedy(target, markov_rank):
    """Processors of Transformers work on tensors of inference mode."""
    drafter = get_drafter(
        target, DSparkConfig(block_size=4, num_hidden_layers=1, markov_rank=markov_rank, mask_token_id=1)
    )
    generate(target, drafter, do_sample=True, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)


def test_other_models_and_caches_run_without(target):
    cache = DynamicCache(config=target.config)
    assert forward_mode(target, cache) is torch.inference_mode
    static = StaticCache(config=target.config, max_cache_len=32)
    assert forward_mode(target, static) is torch.no_grad
    handle = target.model.layers[0].register_forward_hook(lambda *_: None)
    assert forward_mode(target, cache) is torch.no_grad
    handle.remove()
    # As offloading does it, and `model.forward = torch.compile(model.forward)`.
    cache.update = cache.update
    assert forward_mode(target, cache) is torch.no_grad
    del cache.update
    target.forward = target.forward
    assert forward_mode(target, cache) is torch.no_grad
    del target.forward
    target.model.layers[0].compile()
    assert forward_mode(target, cache) is torch.no_grad


def test_subclassed_weights_run_without(target):
    """Quantised and distributed weights are tensors of other classes."""

    class Weight(torch.nn.Parameter):
        pass

    linear = target.model.layers[0].mlp.up_proj
    linear.weight = Weight(linear.weight.detach())
    assert forward_mode(target, DynamicCache(config=target.config)) is torch.no_grad
