"""What a user may choose for one `generate` call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from ..models import Drafter

logger = logging.get_logger(__name__)

GENERATION_OPTIONS = (
    "dspark_num_draft_tokens",
    "dspark_confidence_threshold",
    "dspark_verify_budget",
    "dspark_scheduler",
)


@dataclass(frozen=True)
class DecodingSettings:
    """Checked settings of one `generate` call.

    Attributes:
        num_draft_tokens: most tokens drafted in a round, 1 to γ.
        confidence_threshold: a proposal is cut at its first token whose confidence is below this; 0 never cuts.
        verify_budget: most drafted tokens verified in a round, over all rows; `None` for no limit.
        scheduler: name of a scheduler, or one; `None` is "auto". See `schedulers.resolve_scheduler`.
        do_sample: whether tokens are sampled; greedy otherwise.
    """

    num_draft_tokens: int
    confidence_threshold: float
    verify_budget: int | None
    scheduler: Any
    do_sample: bool

    @property
    def is_limited(self) -> bool:
        """Whether the call says itself how much to verify."""
        return self.confidence_threshold > 0 or self.verify_budget is not None


def resolve_settings(
    drafter: Drafter, generation_config: GenerationConfig, options: Mapping[str, Any] | None = None
) -> DecodingSettings:
    """Settings from a call's own `options`, else from `generation_config`, else the drafter's defaults.

    Args:
        drafter: the drafter of the call.
        generation_config: the call's generation config.
        options: values by the names of `GENERATION_OPTIONS`; `None` counts as not given.

    Raises:
        ValueError: for a value out of range.
        TypeError: for a value of another type.
    """

    def value(name: str) -> Any:
        given = (options or {}).get(name)
        return getattr(generation_config, name, None) if given is None else given

    return DecodingSettings(
        num_draft_tokens=_draft_tokens(
            drafter, value("dspark_num_draft_tokens"), generation_config.num_assistant_tokens
        ),
        confidence_threshold=_threshold(drafter, value("dspark_confidence_threshold")),
        verify_budget=_budget(value("dspark_verify_budget")),
        scheduler=value("dspark_scheduler"),
        do_sample=bool(generation_config.do_sample),
    )


def _draft_tokens(drafter: Drafter, explicit: int | None, cap: int | None) -> int:
    gamma = drafter.config.block_size
    if explicit is not None:
        if isinstance(explicit, bool) or not isinstance(explicit, int):
            raise TypeError(f"`dspark_num_draft_tokens` is {explicit!r}; give a whole number from 1 to {gamma}.")
        if not 1 <= explicit <= gamma:
            raise ValueError(
                f"`dspark_num_draft_tokens` is {explicit}; this drafter's block size allows 1 to {gamma}."
            )
        return explicit
    if cap is None:
        return gamma
    if isinstance(cap, bool) or not isinstance(cap, int):
        raise TypeError(f"`num_assistant_tokens` is {cap!r}; give a whole number.")
    if cap < 1:
        raise ValueError(
            f"`num_assistant_tokens` is {cap}; a drafter needs at least 1. To generate without drafting, leave out "
            "`assistant_model`."
        )
    return min(cap, gamma)


def _budget(budget: int | None) -> int | None:
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"`dspark_verify_budget` is {budget!r}; give a whole number of tokens, at least 1.")
    if budget < 1:
        raise ValueError(
            f"`dspark_verify_budget` is {budget}; it must be at least 1. To generate without drafting, leave out "
            "`assistant_model`."
        )
    return budget


def _threshold(drafter: Drafter, threshold: float | None) -> float:
    if threshold is None:
        return 0.0
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(f"`dspark_confidence_threshold` is {threshold!r}; give a probability, from 0 to 1.")
    if threshold == 0:
        return 0.0
    if not 0 <= threshold <= 1:
        raise ValueError(f"`dspark_confidence_threshold` is {threshold}; it is a probability, from 0 to 1.")
    if drafter.confidence_head is None:
        logger.warning_once(
            f"`dspark_confidence_threshold` is {threshold}, but this drafter has no confidence head: every drafted "
            "token is verified."
        )
        return 0.0
    return float(threshold)
