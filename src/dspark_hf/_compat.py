"""Every place where a Transformers version or a private part of Transformers matters.

The rest of the package uses public interfaces and what this module offers. Supported: Transformers 5.18.0 and newer
within major version 5.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput

MINIMUM_TRANSFORMERS = "5.18.0"
FIRST_UNSUPPORTED_TRANSFORMERS = "6.0.0"

# Methods of `GenerationMixin` that `generation/hook.py` wraps, with the parameters that its wrappers rely on.
WRAPPED_METHODS: dict[str, tuple[str, ...]] = {
    "_assisted_decoding": (
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "streamer",
        "assistant_model",
    ),
    "_validate_generation_mode": ("generation_mode", "generation_config", "generation_mode_kwargs"),
}


def check_transformers_version(version: str = transformers.__version__) -> None:
    """Raises `ImportError` where this Transformers version is not supported."""
    if not Version(MINIMUM_TRANSFORMERS) <= Version(version) < Version(FIRST_UNSUPPORTED_TRANSFORMERS):
        raise ImportError(
            f"dspark_hf supports transformers >= {MINIMUM_TRANSFORMERS}, < {FIRST_UNSUPPORTED_TRANSFORMERS}, and "
            f"{version} is installed. Run `pip install 'transformers>={MINIMUM_TRANSFORMERS},"
            f"<{FIRST_UNSUPPORTED_TRANSFORMERS}'`."
        )


def check_generation_methods(owner: type = GenerationMixin) -> None:
    """Raises `ImportError` naming each method or parameter that `generate` no longer has as we know it."""
    broken = []
    for name, parameters in WRAPPED_METHODS.items():
        method = getattr(owner, name, None)
        if method is None:
            broken.append(f"{name} is gone")
            continue
        signature = inspect.signature(method).parameters
        missing = [parameter for parameter in parameters if parameter not in signature]
        if missing:
            broken.append(f"{name} lost {missing}")
    if broken:
        raise ImportError(
            f"transformers {transformers.__version__} changed parts of `generate` that dspark_hf builds on: "
            f"{'; '.join(broken)}. Install a version that this release of dspark_hf was tested with (see README), or "
            "a newer dspark_hf."
        )


# --- wrapping `generate` -------------------------------------------------------------------------------------------


def wrap_generation_method(name: str, make_wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces `GenerationMixin.<name>` by `make_wrapper(original)`; does nothing if it is wrapped already."""
    original = getattr(GenerationMixin, name)
    if hasattr(original, "_dspark_original"):
        return
    wrapper = functools.wraps(original)(make_wrapper(original))
    wrapper._dspark_original = original  # type: ignore[attr-defined]
    setattr(GenerationMixin, name, wrapper)


def unwrap_generation_method(name: str) -> None:
    """Restores `GenerationMixin.<name>` if it is wrapped."""
    original = getattr(getattr(GenerationMixin, name), "_dspark_original", None)
    if original is not None:
        setattr(GenerationMixin, name, original)


def register_generation_options(names: tuple[str, ...]) -> None:
    """Lets `generate` and `GenerationConfig.update` take `names` as options, `None` by default."""
    for name in names:
        if not hasattr(GenerationConfig, name):
            setattr(GenerationConfig, name, None)


def unregister_generation_options(names: tuple[str, ...]) -> None:
    """Undoes `register_generation_options`."""
    for name in names:
        if name in vars(GenerationConfig):
            delattr(GenerationConfig, name)


def eos_token_ids(generation_config: GenerationConfig) -> list[int]:
    """End-of-sequence ids as `generate` prepared them; empty where generation has no such token."""
    ids = getattr(generation_config, "_eos_token_tensor", None)
    return [] if ids is None else ids.flatten().tolist()


def pad_token_id(generation_config: GenerationConfig) -> int:
    """The id that fills up rows that have ended, as `generate` prepared it; 0 where it never comes to that."""
    token = getattr(generation_config, "_pad_token_tensor", None)
    return 0 if token is None else int(token)


# --- caches --------------------------------------------------------------------------------------------------------

# Transformers 5.24 renamed the argument under which models take their cache.
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24.0.dev0") else "past_key_values"


def can_roll_back(target: PreTrainedModel) -> bool:
    """Whether the cache that `generate` makes for `target` can forget its last positions."""
    config = target.config.get_text_config(decoder=True)
    # Layers that attend to an image hold as many keys as it has patches, of which rejected tokens have none (Mllama).
    has_image_layers = bool(getattr(config, "cross_attention_layers", None))
    if has_image_layers or getattr(target, "_is_stateful", False):
        return False
    return bool(getattr(DynamicCache(config=config), "is_croppable", True))


def check_rollback(cache: Cache | None, target: PreTrainedModel) -> Cache:
    """`cache`, if the target has one that can be rolled back; otherwise raises `ValueError`."""
    if not isinstance(cache, Cache) or not getattr(cache, "is_croppable", True) or not can_roll_back(target):
        raise ValueError(
            f"The target {type(target).__name__} has recurrent layers or a cache whose state cannot be rolled back to "
            "before a rejected token, so it cannot verify drafts. Call `generate` without `assistant_model`."
        )
    return cache


def prepare_cache_for_rollback(cache: Cache, target: PreTrainedModel) -> None:
    """Makes `cache` keep what `crop` needs, to be called after the prefill.

    Raises:
        ValueError: for a target whose cache cannot be rolled back.
    """
    check_rollback(cache, target)
    cache.activate_past_recording()


def crop_cache(cache: Cache, rejected: int) -> None:
    """Drops the last `rejected` positions; to be called after every verification, also with 0.

    Sliding-window layers keep more than their window until they are cropped.
    """
    cache.crop(-rejected)


# Layers whose columns can be moved; a dummy stands for a layer that reads another one's keys.
_MOVABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))


def is_plain_cache(cache: Cache) -> bool:
    """Whether `cache` replaces its tensors in every step, and so keeps none from one call to the next."""
    if type(cache) is not DynamicCache or "update" in vars(cache):
        return False
    return all(type(layer) in _MOVABLE_LAYERS for layer in cache.layers)


def is_own_hook(hook: Any) -> bool:
    """Whether a forward hook is Transformers' own, which captures hidden states for the output only."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def make_ordinary(cache: Cache) -> None:
    """Copies what `cache` holds of inference mode to ordinary tensors, with which anyone may go on."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            states = getattr(layer, name, None)
            if isinstance(states, torch.Tensor) and states.is_inference():
                setattr(layer, name, states.clone())


def check_realignment(cache: Cache, target: PreTrainedModel) -> None:
    """Raises `ValueError` where the rows of `cache` cannot be moved apart, as a batch needs."""
    kinds = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in _MOVABLE_LAYERS})
    if kinds:
        raise ValueError(
            f"The cache has layers of type {kinds}, whose rows cannot go on at different lengths, so several prompts "
            "cannot be drafted at once. Leave `cache_implementation` and the cache unset, or call `generate` once "
            "per prompt."
        )
    if "chunked_attention" in (getattr(target.config.get_text_config(decoder=True), "layer_types", None) or []):
        raise ValueError(
            f"{type(target).__name__} has chunked attention, under which rows cannot go on at different lengths. Call "
            "`generate` once per prompt, or leave out `assistant_model`."
        )


def check_positions(prepared: dict[str, Any], target: PreTrainedModel) -> None:
    """Raises `ValueError` where `prepared` inputs leave it to the target to count positions along its cache."""
    if prepared.get("position_ids", ()) is None:
        raise ValueError(
            f"{type(target).__name__} takes positions from the columns of its cache, under which rows cannot go on at "
            "different lengths. Call `generate` once per prompt, or leave out `assistant_model`."
        )


def realign_cache(cache: Cache, rows: torch.Tensor, columns: torch.Tensor, total: int) -> None:
    """Replaces what `cache` holds: column j of new row i is column `columns[i, j]` of the old row `rows[i]`.

    Args:
        cache: a cache that passed `check_realignment`, after a forward pass and before `crop`.
        rows: `(new rows,)`.
        columns: `(new rows, new columns)`; negative where the new row has padding, which may hold anything.
        total: columns that the cache has seen.
    """
    width = columns.shape[1]
    # Layers of one shape share the index, which takes longer to make than a small cache to copy.
    lines: dict[tuple[Any, ...], torch.Tensor] = {}
    for layer in cache.layers:
        if not layer.is_initialized or layer.keys is None:
            continue
        kept = width
        if isinstance(layer, DynamicSlidingWindowLayer):
            kept = min(width, layer.sliding_window - 1)
            layer.cumulative_length = width
        _, heads, held, _ = layer.keys.shape
        key = (heads, held, kept, layer.keys.device)
        if key not in lines:
            sources = (columns[:, width - kept :] - (total - held)).clamp(min=0)
            lines[key] = _lines(rows, sources, heads, held).to(layer.keys.device)
        layer.keys = _take_lines(layer.keys, lines[key])
        layer.values = _take_lines(layer.values, lines[key])


def _lines(rows: torch.Tensor, columns: torch.Tensor, heads: int, held: int) -> torch.Tensor:
    """Where columns of rows lie in `(batch, heads, held)`, flattened: `(new rows, heads, new columns)`."""
    first = (rows[:, None] * heads + torch.arange(heads, device=rows.device)) * held
    return first[:, :, None] + columns[:, None]


def _take_lines(states: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
    """`states (batch, heads, held, dim)` to `(new rows, heads, new columns, dim)`."""
    dim = states.shape[-1]
    return states.reshape(-1, dim).index_select(0, lines.flatten()).view(*lines.shape, dim)


CacheRow = list["tuple[torch.Tensor, torch.Tensor] | None"]
"""Keys and values `(heads, n, dim)` of one row, by layer; `None` for a layer without any."""


def cache_row(cache: Cache, row: int, start: int, end: int, total: int) -> CacheRow:
    """What the layers still hold of a row's columns from `start` to before `end`, of `total` that were seen."""
    layers: CacheRow = []
    for layer in cache.layers:
        if not layer.is_initialized or layer.keys is None:
            layers.append(None)
            continue
        seen_before = total - layer.keys.shape[-2]
        kept = slice(max(0, start - seen_before), max(0, end - seen_before))
        layers.append((layer.keys[row, :, kept].clone(), layer.values[row, :, kept].clone()))
    return layers


def fill_cache(cache: Cache, rows: list[CacheRow], width: int) -> None:
    """Makes `cache` hold `rows`, all ending in the last of `width` columns, with zeros before them."""
    for index, layer in enumerate(cache.layers):
        held = width
        if isinstance(layer, DynamicSlidingWindowLayer):
            held = min(width, layer.sliding_window - 1)
            layer.cumulative_length = width
        pairs = [pair for row in rows if (pair := row[index]) is not None]
        if pairs:
            layer.keys = torch.stack([_at_the_end(keys, held) for keys, _ in pairs])
            layer.values = torch.stack([_at_the_end(values, held) for _, values in pairs])


def join_caches(cache: Cache, others: Sequence[Cache], width: int) -> None:
    """Adds the rows of `others`, caches of the same target, after those of `cache`: all end in the last of `width`
    columns, with zeros before them.
    """
    for index, layer in enumerate(cache.layers):
        held = width
        if isinstance(layer, DynamicSlidingWindowLayer):
            held = min(width, layer.sliding_window - 1)
            layer.cumulative_length = width
        if layer.is_initialized and layer.keys is not None:
            layers = [layer, *(other.layers[index] for other in others)]
            layer.keys = _join_at_the_end([each.keys for each in layers], held)
            layer.values = _join_at_the_end([each.values for each in layers], held)


def _join_at_the_end(parts: list[torch.Tensor], width: int) -> torch.Tensor:
    """`parts (batch, heads, n, dim)`, of different `batch` and `n`, to `(all rows, heads, width, dim)`."""
    _, heads, _, dim = parts[0].shape
    joined = parts[0].new_zeros(sum(len(part) for part in parts), heads, width, dim)
    for rows, part in zip(joined.split([len(part) for part in parts]), parts, strict=True):
        kept = min(width, part.shape[2])
        rows[:, :, width - kept :] = part[:, :, part.shape[2] - kept :]
    return joined


def add_cache_rows(cache: Cache, count: int) -> None:
    """Adds `count` rows of zeros after those that `cache` holds."""
    for layer in cache.layers:
        if layer.is_initialized and layer.keys is not None:
            layer.keys = torch.nn.functional.pad(layer.keys, (0, 0, 0, 0, 0, 0, 0, count))
            layer.values = torch.nn.functional.pad(layer.values, (0, 0, 0, 0, 0, 0, 0, count))


def _at_the_end(states: torch.Tensor, width: int) -> torch.Tensor:
    """`states (heads, n, dim)` to `(heads, width, dim)`."""
    states = states[:, max(0, states.shape[1] - width) :]
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[1], 0))


def attention_windows(cache: Cache, target: PreTrainedModel) -> list[int | None]:
    """The sliding window of each layer of `target`; `None` for a layer whose keys `cache` keeps in full."""
    config = target.config.get_text_config(decoder=True)
    window = next((layer.sliding_window for layer in cache.layers if getattr(layer, "is_sliding", False)), None)
    # A layer that shares another one's keys has none in the cache, so its kind is read off the config.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def decode_context(target: PreTrainedModel) -> contextlib.AbstractContextManager[Any]:
    """The context in which Transformers runs decoding steps (it picks kernels for few tokens where it has any)."""
    enter = getattr(target, "_optimize_model_for_decode", None)
    return enter() if enter is not None else contextlib.nullcontext()


def attention_implementation(target: PreTrainedModel) -> str | None:
    """What computes the attention of `target`, such as `sdpa` or `eager`."""
    implementation: str | None = target.config.get_text_config(decoder=True)._attn_implementation
    return implementation


# --- hidden states -------------------------------------------------------------------------------------------------

# From 5.23 on, a list given as `output_hidden_states` selects entries of the usual tuple (0 is the embedding output).
# Before, a list counted layers and left out the embedding output, so all are captured there.
SELECTS_HIDDEN_STATES = Version(transformers.__version__) >= Version("5.23.0.dev0")


def capture_kwargs(target_layer_ids: list[int], num_layers: int | None = None, last: bool = False) -> dict[str, Any]:
    """Arguments that make a target's forward return the hidden states of the captured layers.

    Args:
        target_layer_ids: layers to capture, -1 for the embedding output.
        num_layers: number of target layers; needed with `last`.
        last: whether to capture the last entry too, which is after the final norm.
    """
    if not SELECTS_HIDDEN_STATES:
        return {"output_hidden_states": True}
    entries = [layer + 1 for layer in target_layer_ids]
    if last:
        if num_layers is None:
            raise ValueError("`num_layers` is needed to capture the last hidden state.")
        entries = sorted({*entries, num_layers})
    return {"output_hidden_states": entries}


def captured_states(hidden_states: tuple[torch.Tensor, ...], target_layer_ids: list[int]) -> torch.Tensor:
    """States of the captured layers, concatenated: `(batch, seq, m * d)`.

    Layer i is entry i + 1 of the tuple that a target returns; entry 0, layer -1, is the embedding output.

    Raises:
        ValueError: if the target returns fewer.
    """
    if max(target_layer_ids) + 1 >= len(hidden_states):
        raise ValueError(
            f"The drafter's `target_layer_ids` {target_layer_ids} go past the {len(hidden_states) - 1} layers whose "
            "hidden states the target returns. Build a drafter that captures others: "
            "`get_drafter(target, DSparkConfig(target_layer_ids=...))`."
        )
    states = [_main_stream(hidden_states[layer + 1]) for layer in target_layer_ids]
    return torch.cat([state.to(states[0].device) for state in states], dim=-1)


def _main_stream(state: torch.Tensor) -> torch.Tensor:
    """Of the streams `(4, batch, seq, d)` that run beside each other in Gemma 3n, the one its layers read."""
    return state[0] if state.dim() == 4 else state


def decoder_only_output(cache: Cache | None, **fields: Any) -> GenerateDecoderOnlyOutput:
    """What `generate(return_dict_in_generate=True)` returns."""
    return GenerateDecoderOnlyOutput(**fields, **{CACHE_ARGUMENT: cache})
