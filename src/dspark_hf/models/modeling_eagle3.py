"""The EAGLE-3 drafter (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models").

Shape symbols as in `recurrent.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .backbone import BackboneLayer, RotaryTables
from .configuration_eagle3 import Eagle3Config, eagle3_target_layers
from .recurrent import RecurrentDrafter


class Eagle3Layer(BackboneLayer):
    """A layer whose queries, keys and values come from `[norm(embedding) ; norm(feature)]`, `2d` wide.

    The residual goes around the feature alone.
    """

    def __init__(self, config: Eagle3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx, input_size=2 * config.hidden_size, head_norms=config.head_norms)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(  # type: ignore[override]
        self,
        features: torch.Tensor,
        embeddings: torch.Tensor,
        tables: RotaryTables,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """`features` and `embeddings (batch, n, d)` to `(batch, n, d)`."""
        pairs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)
        return self.finish(features, self.self_attn(pairs, None, tables, tables, attention_mask, cache))


class Eagle3Drafter(RecurrentDrafter):
    """Drafter of EAGLE-3: captured target states go through `fc`, and the last layer's output takes their place.

    With several layers each of them reads the embeddings again, as in DeepSpec.
    """

    config_class = Eagle3Config
    config: Eagle3Config
    _no_split_modules = ["Eagle3Layer"]

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        if self.lm_head is None and not config.share_target_head:
            self._make_own_head()
        self.fc = nn.Linear(config.num_captured_layers * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()

    def check_target(self, target: PreTrainedModel) -> None:
        """As `Drafter.check_target`; where the config leaves `target_layer_ids` unset it sets EAGLE-3's."""
        if self.config.target_layer_ids is not None:
            super().check_target(target)
            return
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        layers = eagle3_target_layers(num_layers)
        if len(layers) != self.config.num_captured_layers:
            raise ValueError(
                f"The drafter reads {self.config.num_captured_layers} layers of its target and does not say which; "
                f"this target has {num_layers} layers, too few. Load the drafter that belongs to this target."
            )
        self.config.target_layer_ids = layers
        try:
            super().check_target(target)
        except ValueError:
            self.config.target_layer_ids = None
            raise

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """Features `(batch, n, d)` of captured target states `(batch, n, m * d)`."""
        return self.fc(target_states.to(device=self.device, dtype=self.dtype))

    def run_layers(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        tables: RotaryTables,
        masks: list[torch.Tensor | None],
        cache: Cache | None,
    ) -> torch.Tensor:
        """See the base class."""
        for layer, mask in zip(self.layers, masks, strict=True):
            features = layer(features, embeddings, tables, mask, cache)
        return features


__all__ = ["Eagle3Drafter", "Eagle3Layer"]
