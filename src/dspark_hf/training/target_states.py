"""What training needs of the frozen target, computed online: nothing is stored."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .._compat import capture_kwargs, captured_states


@dataclass
class TargetStates:
    """States of the target over a batch of sequences.

    Args:
        context: `(batch, seq, m * d)`, the m captured layers, concatenated.
        last: `(batch, seq, d)`, the final states after the final norm, which the LM head sees.
    """

    context: torch.Tensor
    last: torch.Tensor


@torch.no_grad()
def compute_target_states(
    target: PreTrainedModel, target_layer_ids: list[int], input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> TargetStates:
    """Runs `target` on `input_ids (batch, seq)`, padded on the right as `attention_mask (batch, seq)` says."""
    extra = {}
    if "logits_to_keep" in inspect.signature(target.forward).parameters:
        # Logits are computed from `last`, only where a block needs them.
        extra["logits_to_keep"] = 1
    device = input_ids.device
    outputs = target(
        input_ids=input_ids.to(target.device),
        attention_mask=attention_mask.to(target.device),
        use_cache=False,
        return_dict=True,
        **capture_kwargs(
            target_layer_ids, num_layers=target.config.get_text_config(decoder=True).num_hidden_layers, last=True
        ),
        **extra,
    )
    context = captured_states(outputs.hidden_states, target_layer_ids)
    return TargetStates(context=context.to(device), last=outputs.hidden_states[-1].to(device))


__all__ = ["TargetStates", "compute_target_states"]
