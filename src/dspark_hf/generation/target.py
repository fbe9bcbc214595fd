"""The target's side of a `generate` call: prefill, verification, rolling its cache back.

Shape symbols: `batch`, `length` tokens of the sequence so far, `k` drafted tokens, `m` captured layers, `d` the hidden
size, `vocab`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .. import _compat


@dataclass
class TargetOutput:
    """What one forward pass of the target gives.

    Attributes:
        logits: `(batch, n, vocab)`, float32, for the last `n` input positions (1 in the prefill, k + 1 after).
        states: `(batch, inputs, m * d)`, captured states of every input position.
        hidden_states: all hidden states, where the user asked for them.
        attentions: attention weights, where the user asked for them.
    """

    logits: torch.Tensor
    states: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None
    attentions: tuple[torch.Tensor, ...] | None


class TargetSession:
    """Runs the target over one growing sequence.

    Args:
        target: the target.
        target_layer_ids: layers whose states the drafter needs.
        model_kwargs: what `generate` prepared for the target's forward.

    Raises:
        ValueError: without a cache, or with one that cannot be rolled back.
    """

    def __init__(self, target: PreTrainedModel, target_layer_ids: list[int], model_kwargs: dict[str, Any]) -> None:
        self.target = target
        self.target_layer_ids = target_layer_ids
        self.model_kwargs = model_kwargs
        cache = model_kwargs.get(_compat.CACHE_ARGUMENT)
        _compat.check_rollback(cache, target)
        if not model_kwargs.get("use_cache", True) or not isinstance(cache, Cache):
            raise ValueError("A drafter needs the target's cache, and `use_cache` is false; leave it at true.")
        self.cache = cache
        self.wants_hidden_states = bool(model_kwargs.get("output_hidden_states"))
        self.wants_attentions = bool(model_kwargs.get("output_attentions"))
        self.length = 0

    @torch.no_grad()
    def prefill(self, input_ids: torch.Tensor) -> TargetOutput:
        """Runs the prompt `(batch, length)`, or what of it is not in the cache yet."""
        output = self._forward(
            input_ids, self.model_kwargs, self._uncached(input_ids.shape[1]), is_first_iteration=True
        )
        _compat.prepare_cache_for_rollback(self.cache, self.target)
        # A static cache returns the tensor that it counts in.
        self.length = int(self.cache.get_seq_length())
        return output

    def _uncached(self, length: int) -> int | None:
        """How many of the last `length` prompt tokens to run, `None` for all of them.

        A cache that the user passes back comes with the whole text, or with its new tokens only and a mask of the
        whole text.
        """
        cached = int(self.cache.get_seq_length())
        if not cached:
            return None
        if (embeddings := self.model_kwargs.get("inputs_embeds")) is not None:
            return embeddings.shape[1] - cached
        mask, position_ids = self.model_kwargs.get("attention_mask"), self.model_kwargs.get("position_ids")
        # `generate` drops a mask of ones, but made positions of the same length from it.
        whole = next((known.shape[-1] for known in (mask, position_ids) if known is not None), length)
        return length - cached if whole == length else None

    @torch.no_grad()
    def verify(self, sequence_ids: torch.Tensor, draft_ids: torch.Tensor) -> TargetOutput:
        """Runs the anchor, which ends `sequence_ids (batch, length)`, and the drafted tokens `(batch, k)`."""
        drafted = draft_ids.shape[1]
        candidates = torch.cat([sequence_ids, draft_ids], dim=1) if drafted else sequence_ids
        with _compat.decode_context(self.target):
            return self._forward(candidates, extend(self.model_kwargs, drafted), drafted + 1)

    def commit(self, emitted: int, verified: int = 0) -> None:
        """Makes `emitted` new tokens part of the sequence and drops the rejected ones of `verified` from the cache."""
        self.model_kwargs = extend(self.model_kwargs, emitted)
        self.length += emitted
        _compat.crop_cache(self.cache, verified - (emitted - 1))

    def _forward(
        self, ids: torch.Tensor, model_kwargs: dict[str, Any], inputs: int | None, is_first_iteration: bool = False
    ) -> TargetOutput:
        prepared = self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=inputs, is_first_iteration=is_first_iteration, **model_kwargs
        )
        scored = 1 if is_first_iteration else inputs or 1
        if "logits_to_keep" in prepared:
            prepared["logits_to_keep"] = scored
        if not self.wants_hidden_states:
            prepared |= _compat.capture_kwargs(self.target_layer_ids)
        outputs = self.target(**prepared, return_dict=True)
        return TargetOutput(
            logits=outputs.logits[:, -scored:].to(torch.float32, copy=True),
            states=_compat.captured_states(outputs.hidden_states, self.target_layer_ids),
            hidden_states=outputs.hidden_states if self.wants_hidden_states else None,
            attentions=outputs.attentions if self.wants_attentions else None,
        )

    def without_padding(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States `(1, n, m * d)` of the prompt's last positions and their text positions `(1, n)`, less padding."""
        inputs = states.shape[1]
        positions = self.positions(inputs)
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return states, positions
        is_text = mask[0, -inputs:].bool()
        return states[:, is_text.to(states.device)], positions[:, is_text.to(positions.device)]

    def positions(self, inputs: int) -> torch.Tensor:
        """Text positions `(batch, inputs)` of the last `inputs` tokens of the committed sequence."""
        position_ids = self.model_kwargs.get("position_ids")
        if position_ids is not None and position_ids.dim() == 2:
            return position_ids[:, -inputs:]
        return torch.arange(self.length - inputs, self.length, device=self.target.device)[None]


def extend(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` for `count` further text tokens: positions go on, masks are ones, token types are text."""
    if count == 0:
        return model_kwargs
    model_kwargs = dict(model_kwargs)
    if (positions := model_kwargs.get("position_ids")) is not None:
        steps = torch.arange(1, count + 1, dtype=positions.dtype, device=positions.device)
        model_kwargs["position_ids"] = torch.cat([positions, positions[..., -1:] + steps], dim=-1)
    if (mask := model_kwargs.get("attention_mask")) is not None:
        model_kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], count)], dim=1)
    for name, value in (("token_type_ids", None), ("mm_token_type_ids", 0)):
        if (types := model_kwargs.get(name)) is not None:
            last = types[:, -1:].expand(-1, count) if value is None else types.new_full((types.shape[0], count), value)
            model_kwargs[name] = torch.cat([types, last], dim=1)
    return model_kwargs
