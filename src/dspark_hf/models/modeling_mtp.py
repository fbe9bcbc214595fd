"""A drafter with one module of multi-token prediction (DeepSeek-V3 technical report, 2024, section 2.2).

It was the drafter of DeepSeek's services before DSpark, with one drafted token per round. Shape symbols as in
`recurrent.py`; the feature is the target's last state, after the target's final norm, so `m` is 1.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.cache_utils import Cache

from .backbone import BackboneLayer, RotaryTables
from .configuration_mtp import MTPConfig
from .recurrent import RecurrentDrafter


class MTPDrafter(RecurrentDrafter):
    """Drafter of multi-token prediction: `h' = layer(W [norm(embedding) ; norm(state)])`, then the shared LM head.

    To draft more than one token it reads its own state in place of the target's: after its final norm, like the
    target's, so that both are what the LM head sees.
    """

    config_class = MTPConfig
    config: MTPConfig
    carries_normed_state = True
    _no_split_modules = ["BackboneLayer"]

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config)
        self.embedding_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            BackboneLayer(config, index, head_norms=config.head_norms) for index in range(config.num_hidden_layers)
        )
        self.post_init()

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """The target's last states `(batch, n, d)` as they are, on the drafter's device and in its dtype."""
        return target_states.to(device=self.device, dtype=self.dtype)

    def run_layers(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        tables: RotaryTables,
        masks: list[torch.Tensor | None],
        cache: Cache | None,
    ) -> torch.Tensor:
        """See the base class."""
        states = self.fc(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(features)], dim=-1))
        for layer, mask in zip(self.layers, masks, strict=True):
            states = layer(states, None, tables, tables, mask, cache)
        return states


__all__ = ["MTPDrafter"]
