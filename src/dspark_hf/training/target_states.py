"""What training needs of the frozen target, computed by running it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .._compat import capture_kwargs, captured_states
from ..models.drafter_base import head_logits
from .normaliser import LogitsOf, Normaliser


@dataclass
class TargetStates:
    """States of the target over a batch of sequences.

    Args:
        context: `(batch, seq, m * d)`, the m captured layers, concatenated.
        last: `(batch, seq, d)`, the final states after the final norm, which the LM head sees.
        normaliser: `(batch, seq)`, for drafters with a reduced vocabulary; `None` where nobody has computed it.
    """

    context: torch.Tensor
    last: torch.Tensor
    normaliser: Normaliser | None = None


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
    config = target.config.get_text_config(decoder=True)
    # LongCat counts two layers where it returns the states of one.
    num_layers = min(config.num_hidden_layers, getattr(config, "num_layers", config.num_hidden_layers))
    outputs = target(
        input_ids=input_ids.to(target.device),
        attention_mask=attention_mask.to(target.device),
        use_cache=False,
        return_dict=True,
        **capture_kwargs(target_layer_ids, num_layers=num_layers, last=True),
        **extra,
    )
    context = captured_states(outputs.hidden_states, target_layer_ids)
    return TargetStates(context=context.to(device), last=outputs.hidden_states[-1].to(device))


def place_target(target: PreTrainedModel, device: torch.device) -> None:
    """Moves the target to `device`, unless whoever loaded it has spread or quantised it there."""
    if getattr(target, "hf_device_map", None) is None and not getattr(target, "is_quantized", False):
        target.to(device)


def target_head(target: PreTrainedModel) -> LogitsOf:
    """What turns the last states of `target` into its logits, soft caps included."""
    cap = getattr(target.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return lambda hidden: head_logits(target.get_output_embeddings(), hidden, cap)


@torch.no_grad()
def check_last_state(target: PreTrainedModel, target_layer_ids: list[int], logits_of: LogitsOf) -> None:
    """Raises `ValueError` for a target whose last state is not what its LM head turns into logits.

    Some families put further layers between the two; a drafter would be trained on logits that are not the target's.

    Args:
        target: the target.
        target_layer_ids: layers that it captures.
        logits_of: what is taken for its LM head.
    """
    ids = torch.tensor([[0, 1]], device=target.device)
    states = compute_target_states(target, target_layer_ids, ids, torch.ones_like(ids))
    logits = target(input_ids=ids, use_cache=False, return_dict=True).logits[:, -1].float()
    if states.last.dim() == 3:
        ours = logits_of(states.last[:, -1]).float().to(logits.device)
        tolerance = 1e-3 if target.dtype == torch.float32 else 5e-2
        if (ours - logits).abs().max() <= tolerance * max(1.0, logits.abs().max().item()):
            return
    raise ValueError(
        f"The target {type(target).__name__} does not make its logits from its last hidden state by its LM head "
        "alone, which training relies on. Drafters for it can be used, but not trained here."
    )


__all__ = ["TargetStates", "check_last_state", "compute_target_states", "place_target", "target_head"]
