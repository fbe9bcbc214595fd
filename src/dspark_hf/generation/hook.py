"""How a drafter comes into `generate`.

`install()`, which `import dspark_hf` calls, makes `target.generate(**inputs, assistant_model=drafter)` work by
wrapping two methods of `GenerationMixin`; every other assistant goes on to the original. `custom_generate(drafter)`
needs no wrapping: `target.generate(**inputs, custom_generate=custom_generate(drafter))`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from .. import _compat
from ..models import Drafter, without_adapters
from .decoding import check_beams, speculative_decode
from .schedulers import Scheduler
from .settings import GENERATION_OPTIONS


def install() -> None:
    """Makes `generate` accept a drafter as `assistant_model` and the `dspark_*` options; safe to call again.

    Raises:
        ImportError: if this Transformers version is not supported.
    """
    _compat.check_transformers_version()
    _compat.check_generation_methods()
    _compat.register_generation_options(GENERATION_OPTIONS)
    _compat.wrap_generation_method("_assisted_decoding", _wrap_assisted_decoding)
    _compat.wrap_generation_method("_validate_generation_mode", _wrap_validation)


def uninstall() -> None:
    """Undoes `install`; safe to call again."""
    for name in _compat.WRAPPED_METHODS:
        _compat.unwrap_generation_method(name)
    _compat.unregister_generation_options(GENERATION_OPTIONS)


# Options that `generate` would leave to the drafter, which does not know them.
_UNKNOWN_TO_DRAFTERS = ("dola_layers", "constraints", "force_words_ids", "token_healing")


def check_options(generation_config: GenerationConfig) -> None:
    """Raises `ValueError` for an option that drafting would pass over in silence."""
    is_contrastive = generation_config.get_generation_mode() == "contrastive_search"
    for name in (*_UNKNOWN_TO_DRAFTERS, *(["penalty_alpha"] if is_contrastive else [])):
        value = getattr(generation_config, name, None)
        if value is not None and value is not False:
            raise ValueError(
                f"`{name}` is {value!r:.60}, which is not supported with a drafter. Leave it out, or call `generate` "
                "without a drafter."
            )


def _check_assistant(assistant: Any) -> None:
    """Raises `TypeError` for an assistant that is no loaded model."""
    if isinstance(assistant, (str, os.PathLike)):
        raise TypeError(
            f"`assistant_model` is {os.fspath(assistant)!r}; give a loaded model, such as "
            f"`dspark_hf.AutoDrafter.from_pretrained({os.fspath(assistant)!r})`."
        )
    # Models have a config, also those in a wrapper (`torch.compile`, PEFT); what is more is for Transformers to say.
    if assistant is not None and not hasattr(assistant, "config"):
        given = " ".join(repr(assistant).split())
        raise TypeError(
            f"`assistant_model` is {given:.60}, of type {type(assistant).__name__}; give a loaded model, such as a "
            "drafter from `dspark_hf.AutoDrafter.from_pretrained`."
        )


def _our_drafter(assistant: Any, generation_config: GenerationConfig) -> Drafter | None:
    """The assistant, if it is a drafter and the user asked for no other kind of assistance; else `None`."""
    other = (
        getattr(generation_config, "assistant_early_exit", None) is not None
        or getattr(generation_config, "prompt_lookup_num_tokens", None) is not None
        or bool(getattr(generation_config, "use_mtp", False))
    )
    drafter = without_adapters(assistant)
    return drafter if isinstance(drafter, Drafter) and not other else None


def _wrap_assisted_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    def assisted_decoding(
        self: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        drafter = _our_drafter(kwargs.get("assistant_model"), generation_config)
        if drafter is None:
            return original(
                self, input_ids, logits_processor, stopping_criteria, generation_config=generation_config, **kwargs
            )
        if kwargs.pop("synced_gpus", False):
            raise ValueError("`synced_gpus` (FSDP or ZeRO-3 generation) is not supported with a drafter.")
        for name in ("assistant_model", "inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(name, None)
        return speculative_decode(
            self, input_ids, logits_processor, stopping_criteria, generation_config, drafter=drafter, **kwargs
        )

    return assisted_decoding


def _wrap_validation(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate_generation_mode(
        self: PreTrainedModel,
        generation_mode: Any,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        assistant = generation_mode_kwargs.get("assistant_model")
        _check_assistant(assistant)
        drafter = _our_drafter(assistant, generation_config)
        if drafter is not None:
            # Before the original, which takes a drafter of another target for one with another tokenizer. With beams
            # `generate` would go on without the drafter.
            drafter.check_target(self)
            check_beams(generation_config)
            check_options(generation_config)
            # The original allows one sequence only.
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
        original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate_generation_mode


def custom_generate(drafter: Drafter) -> Callable[..., torch.Tensor | GenerateDecoderOnlyOutput]:
    """A decoding method bound to `drafter`, for `target.generate(**inputs, custom_generate=...)`.

    It takes the `dspark_*` options like `generate(assistant_model=drafter)`. Transformers does not hand a streamer to
    such a function: give it as `dspark_streamer`.

    Raises:
        TypeError: if `drafter` is not a drafter.
    """
    drafter = without_adapters(drafter)
    if not isinstance(drafter, Drafter):
        raise TypeError(f"`drafter` is a {type(drafter).__name__}; give a drafter, such as a `DSparkDrafter`.")

    def decode(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        dspark_num_draft_tokens: int | None = None,
        dspark_confidence_threshold: float | None = None,
        dspark_verify_budget: int | None = None,
        dspark_scheduler: str | Scheduler | None = None,
        dspark_streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        check_options(generation_config)
        return speculative_decode(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            drafter=drafter,
            streamer=dspark_streamer,
            options={
                "dspark_num_draft_tokens": dspark_num_draft_tokens,
                "dspark_confidence_threshold": dspark_confidence_threshold,
                "dspark_verify_budget": dspark_verify_budget,
                "dspark_scheduler": dspark_scheduler,
            },
            **model_kwargs,
        )

    return decode
