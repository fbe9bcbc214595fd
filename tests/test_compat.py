"""What this package needs of Transformers is there, and what is not there is said by name."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput

from dspark_hf import _compat

from .tiny import tiny_prompt, tiny_target


@pytest.mark.parametrize("version", [transformers.__version__, "5.18.0", "5.18.1", "5.24.0", "5.99.0"])
def test_supported_versions(version):
    _compat.check_transformers_version(version)


@pytest.mark.parametrize("version", ["4.57.0", "5.17.0", "5.17.9", "5.18.0.dev0", "6.0.0", "7.1.0"])
def test_unsupported_versions(version):
    with pytest.raises(ImportError) as caught:
        _compat.check_transformers_version(version)
    assert caught.match(f"and {version} is installed")
    assert caught.match("pip install 'transformers>=5.18.0,<6.0.0'")


class WithoutValidation:
    def _assisted_decoding(
        self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, assistant_model
    ):
        """As we know it."""


class WithoutParameters:
    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, config, **kwargs):
        """Knows neither `generation_config`, `streamer` nor `assistant_model`."""

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        """As we know it."""


@pytest.mark.parametrize(
    ("owner", "says", "silent_about"),
    [
        (WithoutValidation, "_validate_generation_mode is gone", "_assisted_decoding"),
        (
            WithoutParameters,
            r"_assisted_decoding lost \['generation_config', 'streamer', 'assistant_model'\]",
            "_validate_generation_mode",
        ),
        (object, "_assisted_decoding is gone; _validate_generation_mode is gone", "lost"),
    ],
)
def test_changed_generate_is_named(owner, says, silent_about):
    with pytest.raises(ImportError) as caught:
        _compat.check_generation_methods(owner)
    assert caught.match(says)
    assert caught.match(f"transformers {transformers.__version__}")
    assert silent_about not in str(caught.value)


# --- names that this package relies on -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", _compat.WRAPPED_METHODS)
def test_wrapped_method(name):
    method = getattr(GenerationMixin, name, None)
    assert method is not None, f"GenerationMixin.{name} is gone: the hook cannot be installed"
    original = getattr(method, "_dspark_original", method)
    missing = set(_compat.WRAPPED_METHODS[name]) - set(inspect.signature(original).parameters)
    assert not missing, f"GenerationMixin.{name} lost {missing}: see generation/hook.py"


@pytest.mark.parametrize("name", ["next_sequence_length", "is_first_iteration", _compat.CACHE_ARGUMENT])
@pytest.mark.parametrize("family", [None, "qwen3", "gemma3", "gemma4"])
def test_prepare_inputs_for_generation(family, name):
    owner = GenerationMixin if family is None else type(tiny_target(family))
    parameters = inspect.signature(owner.prepare_inputs_for_generation).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    assert name in parameters or (owner is not GenerationMixin and takes_any), (
        f"{owner.__name__}.prepare_inputs_for_generation lost `{name}`: see generation/target.py"
    )


@pytest.mark.parametrize("name", ["crop", "activate_past_recording", "is_croppable", "get_seq_length"])
def test_cache(name):
    assert hasattr(Cache, name), f"Cache.{name} is gone: caches can no longer be rolled back, see _compat.py"


@pytest.mark.parametrize("window", [None, 4])
def test_cache_realigns(window):
    """Rows move to the right, rows leave, and what `crop` and `get_mask_sizes` rely on moves with them."""
    layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)
    cache = Cache(layers=[layer])
    cache.activate_past_recording()
    for start in (0, 5):
        if start:
            _compat.crop_cache(cache, 0)
        states = torch.arange(start, start + 5.0) + 10 * torch.arange(3.0)[:, None]
        cache.update(states[:, None, :, None], states[:, None, :, None], 0)
    # Row 0 keeps 9 columns, row 2 keeps 7 and is moved by 2; column 0 is dropped.
    columns = torch.arange(1, 9) - torch.tensor([[0], [2]])
    _compat.realign_cache(cache, torch.tensor([0, 2]), columns, 10)
    assert cache.get_seq_length() == 8
    rows = [[1, 2, 3, 4, 5, 6, 7, 8], [20, 20, 21, 22, 23, 24, 25, 26]]
    held = 8 if window is None else window - 1
    for tensor in (layer.keys, layer.values):
        assert tensor[:, 0, :, 0].tolist() == [row[-held:] for row in rows]
    assert cache.get_mask_sizes(2, 0) == ((10, 0) if window is None else (window + 1, 8 - window + 1))


def test_cache_crop_drops_from_the_end():
    cache = DynamicCache()
    cache.update(torch.arange(5.0).reshape(1, 1, 5, 1), torch.zeros(1, 1, 5, 1), 0)
    _compat.crop_cache(cache, 0)
    assert cache.get_seq_length() == 5, "Cache.crop(0) drops positions"
    _compat.crop_cache(cache, 2)
    assert cache.layers[0].keys.flatten().tolist() == [0, 1, 2], "Cache.crop(-2) does not drop the last two positions"


@pytest.mark.parametrize(("given", "expected"), [(7, [7]), ([5, 7], [5, 7]), (None, [])])
def test_prepared_eos_ids(given, expected):
    model = tiny_target("qwen3", num_hidden_layers=1)
    model.generation_config.eos_token_id = None
    seen = []

    def look(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen.append(generation_config)
        return input_ids

    model.generate(tiny_prompt(4), custom_generate=look, max_new_tokens=2, eos_token_id=given, pad_token_id=0)
    assert hasattr(seen[0], "_eos_token_tensor"), "generate no longer prepares GenerationConfig._eos_token_tensor"
    assert hasattr(seen[0], "_pad_token_tensor"), "generate no longer prepares GenerationConfig._pad_token_tensor"
    assert _compat.eos_token_ids(seen[0]) == expected
    assert _compat.pad_token_id(seen[0]) == 0


def test_eos_ids_of_an_unprepared_config():
    assert _compat.eos_token_ids(GenerationConfig(eos_token_id=3)) == []
    assert _compat.pad_token_id(GenerationConfig(pad_token_id=3)) == 0


def test_output_field():
    fields = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
    assert _compat.CACHE_ARGUMENT in fields, f"GenerateDecoderOnlyOutput lost `{_compat.CACHE_ARGUMENT}`"
    assert {"sequences", "scores", "logits", "attentions", "hidden_states"} <= fields


def test_decode_context():
    model = tiny_target("qwen3", num_hidden_layers=1)
    assert hasattr(model, "_optimize_model_for_decode"), "decoding steps have lost their context, see _compat.py"
    with _compat.decode_context(model):
        assert model(tiny_prompt(3)).logits.shape[1] == 3
    with _compat.decode_context(torch.nn.Linear(1, 1)):  # nothing to do
        pass


# --- options -------------------------------------------------------------------------------------------------------


def test_options_are_registered_once_and_removed():
    before = set(vars(GenerationConfig))
    _compat.register_generation_options(("dspark_test_option", "max_new_tokens"))
    try:
        config = GenerationConfig()
        assert config.dspark_test_option is None
        assert config.update(dspark_test_option=3, unknown=4) == {"unknown": 4}
        assert config.dspark_test_option == 3
        assert GenerationConfig.from_dict(config.to_dict()).dspark_test_option == 3
    finally:
        _compat.unregister_generation_options(("dspark_test_option",))
    assert set(vars(GenerationConfig)) - {"max_new_tokens"} == before - {"max_new_tokens"}
    _compat.unregister_generation_options(("dspark_test_option", "max_new_tokens"))


# --- hidden states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("layers", [[-1, 0], [0, 2], [2, 1, 0]])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4"])
def test_captured_states(family, layers, last):
    model = tiny_target(family)
    ids = tiny_prompt(11)
    num_layers = model.config.get_text_config().num_hidden_layers
    with torch.no_grad():
        every = model(ids, output_hidden_states=True).hidden_states
        some = model(ids, **_compat.capture_kwargs(layers, num_layers, last=last)).hidden_states
    assert len(every) == num_layers + 1
    expected = torch.cat([every[layer + 1] for layer in layers], dim=-1)
    states = _compat.captured_states(some, layers)
    assert states.shape == (1, 11, len(layers) * model.config.get_text_config().hidden_size)
    assert torch.equal(states, expected)
    if last:
        assert torch.equal(some[num_layers], every[num_layers])
        head = model.get_output_embeddings()
        with torch.no_grad():
            assert torch.allclose(head(every[-1]).argmax(-1), model(ids).logits.argmax(-1))
    if _compat.SELECTS_HIDDEN_STATES:
        kept = [index for index, state in enumerate(some) if state is not None]
        assert kept == sorted({*(layer + 1 for layer in layers), *([num_layers] if last else [])})


def test_last_state_needs_the_number_of_layers():
    if not _compat.SELECTS_HIDDEN_STATES:
        assert _compat.capture_kwargs([0], last=True) == {"output_hidden_states": True}
        return
    with pytest.raises(ValueError, match="`num_layers` is needed"):
        _compat.capture_kwargs([0], last=True)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4"])
def test_attention_windows(family):
    model = tiny_target(family)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    windows = _compat.attention_windows(DynamicCache(config=model.config), model)
    assert windows == [8 if kind == "sliding_attention" else None for kind in kinds]
    assert _compat.attention_windows(DynamicCache(), model) == [None] * len(kinds)
