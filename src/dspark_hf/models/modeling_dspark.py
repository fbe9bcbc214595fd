"""The DSpark drafter: parallel backbone, sequential head, confidence head.

Shape symbols: `batch`, `block` tokens being drafted, `width` tokens of a block given to the parallel stage (as many as
are drafted, or one more where the anchor's slot predicts nothing, see `config.sample_from_anchor`), `new` context
positions given in this call, `m` captured target layers, `d` the hidden size, `vocab` the tokens that the drafter
predicts (the draft vocabulary, by default all of the target's).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .backbone import BackboneLayer, RotaryEmbedding, masks_by_layer_type
from .configuration_dspark import DSparkConfig
from .drafter_base import Drafter
from .heads_dspark import ConfidenceHead, VanillaMarkovHead, build_sequential_head


@dataclass
class DSparkOutput(ModelOutput):
    """What the parallel stage gives.

    Args:
        last_hidden_state: `(batch, block, d)`, the hidden states `h_1..h_γ` after the final norm.
        logits: `(batch, block, vocab)`, the base logits `U_1..U_γ`, soft-capped, without the sequential head's bias.
    """

    last_hidden_state: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class DSparkDrafter(Drafter):
    """Drafter of the DSpark paper; without heads (`markov_rank=0`, no confidence head) it is DFlash.

    The block given to `forward` starts with the anchor, whose slot predicts the first drafted token unless
    `config.sample_from_anchor` is false, and continues with mask tokens. The heads are applied to its output:
    `sequential_logits` with the tokens known (training, scoring), `draft_step` one token at a time (generation).
    """

    config_class = DSparkConfig
    config: DSparkConfig
    confidence_head: ConfidenceHead | None
    _no_split_modules = ["BackboneLayer"]

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(BackboneLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.markov_head: VanillaMarkovHead | None = build_sequential_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.gradient_checkpointing = False
        self.post_init()

    supports_gradient_checkpointing = True

    # --- parallel stage --------------------------------------------------------------------------------------

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """`H_ctx` (equation 2): captured states `(batch, new, m * d)` to `(batch, new, d)`."""
        return self.hidden_norm(self.fc(target_states.to(device=self.device, dtype=self.dtype)))

    def block_input_ids(self, anchor_ids: torch.Tensor) -> torch.Tensor:
        """Anchors `(batch, 1)` to the tokens of their blocks `(batch, width)`: the anchor, then mask tokens."""
        masks = anchor_ids.new_full((anchor_ids.shape[0], self.config.block_width - 1), self.config.mask_token_id)
        return torch.cat([anchor_ids, masks], dim=1)

    def forward(
        self,
        input_ids: torch.Tensor,
        target_states: torch.Tensor | None,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        cache: Cache | None = None,
        compute_logits: bool = True,
    ) -> DSparkOutput:
        """Runs the parallel stage.

        Args:
            input_ids: `(batch, width)`, the anchor and mask tokens of each block; several blocks may follow each
                other (training), then `attention_mask` must keep them apart.
            target_states: `(batch, new, m * d)`, states of the target's captured layers, concatenated, for context
                positions that are not in `cache` yet; `None` where there are none.
            position_ids: `(batch, new + width)`, positions of the new context, then of the block.
            attention_mask: `(batch, 1, width, keys)`, boolean, true where attention is allowed, or one such mask per
                layer type; `None` lets the block see all the context and itself.
            cache: context keys and values, from `make_cache`; extended by the new context, not by the block.
            compute_logits: whether to compute the base logits.

        Returns:
            `DSparkOutput` with `last_hidden_state` and, if asked for, `logits`, of the slots that predict.
        """
        block = self.embed(input_ids)
        length = block.shape[1]
        context = self.fuse(target_states) if target_states is not None else None
        position_ids = position_ids.to(block.device)
        tables = self.rotary_emb(position_ids, block.dtype)
        block_tables = (tables[0][:, :, -length:], tables[1][:, :, -length:])
        masks = self._layer_masks(attention_mask, position_ids, length, cache)
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            block = layer(block, context, tables, block_tables, masks.get(layer_type), cache)
        if cache is not None:
            cache.crop(-length)
        hidden = self.norm(self._predicting(block))
        return DSparkOutput(last_hidden_state=hidden, logits=self.project(hidden) if compute_logits else None)

    def _predicting(self, states: torch.Tensor) -> torch.Tensor:
        """States of the slots that predict: `(batch, width, d)`, of one block or several, to `(batch, block, d)`."""
        if self.config.sample_from_anchor:
            return states
        return states.unflatten(1, (-1, self.config.block_width))[:, :, 1:].flatten(1, 2)

    def _layer_masks(
        self,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
        position_ids: torch.Tensor,
        length: int,
        cache: Cache | None,
    ) -> dict[str, torch.Tensor]:
        """One mask per layer type; a type that is left out sees everything."""
        if isinstance(attention_mask, dict):
            return attention_mask
        if attention_mask is not None:
            return dict.fromkeys(("full_attention", "sliding_attention"), attention_mask)
        if "sliding_attention" not in self.config.layer_types:
            return {}
        new = position_ids.shape[1] - length
        context = new + (cache.get_seq_length() if cache is not None else 0)
        # Context and block positions are consecutive.
        steps = torch.arange(-context, 0, device=position_ids.device)
        block = position_ids[:, -length:]
        masks = self.block_masks(block[:, :1] + steps, block)
        return {"sliding_attention": masks["sliding_attention"]}

    def block_masks(self, context_positions: torch.Tensor, block_positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Masks `(batch, 1, width, context + width)` by layer type, true where attention is allowed.

        Args:
            context_positions: `(batch, context)`, text positions of the keys in the cache and of the new ones behind
                them; negative for padding.
            block_positions: `(batch, width)`.
        """
        keys = torch.cat([context_positions, block_positions], dim=1)
        is_text = (keys >= 0)[:, None].expand(-1, block_positions.shape[1], -1)
        return masks_by_layer_type(is_text, keys, block_positions, self.config.sliding_window)

    # --- heads -----------------------------------------------------------------------------------------------

    def sequential_logits(
        self, base_logits: torch.Tensor, hidden: torch.Tensor, previous_ids: torch.Tensor
    ) -> torch.Tensor:
        """Draft logits `U + B` with the tokens known (equation 4).

        Args:
            base_logits: `(..., block, vocab)`.
            hidden: `(..., block, d)`.
            previous_ids: `(..., block)`, the anchor followed by the first `block - 1` drafted tokens.
        """
        return base_logits if self.markov_head is None else base_logits + self.markov_head(previous_ids, hidden)

    def embed_previous(self, previous_ids: torch.Tensor) -> torch.Tensor | None:
        """Markov embeddings `(..., r)` of `previous_ids (...)`, which both heads read; `None` without the first."""
        return None if self.markov_head is None else self.markov_head.embed(previous_ids)

    def confidence_logits(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor | None:
        """Confidence logits `(...)` for `hidden (..., d)` and `embed_previous`; `None` without the head."""
        if self.confidence_head is None:
            return None
        return self.confidence_head(hidden, embedding if self.confidence_head.with_markov else None)

    @property
    def is_calibrated(self) -> bool:
        return self.config.confidence_temperatures is not None

    def confidence_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Confidences `c_1..c_k` (equation 7), calibrated where `config.confidence_temperatures` is set.

        Args:
            logits: `(..., k)`, confidence logits of the first `k` drafted positions.

        Returns:
            `(..., k)` probabilities in float32, that each token survives given that all before it did.
        """
        logits = logits.float()
        if self.config.confidence_temperatures is not None:
            logits = logits / logits.new_tensor(self.config.confidence_temperatures[: logits.shape[-1]])
        return logits.sigmoid()

    def draft_step(
        self,
        base_logits: torch.Tensor,
        hidden: torch.Tensor,
        embedding: torch.Tensor | None,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft logits of one position while drafting.

        Args:
            base_logits: `(batch, vocab)` of this position.
            hidden: `(batch, d)` of this position.
            embedding: `(batch, r)`, `embed_previous` of the token before it.
            state: recurrent state from the position before, `None` at the first.

        Returns:
            Logits `(batch, vocab)` and the state for the next position.
        """
        if self.markov_head is None or embedding is None:
            return base_logits, None
        features, state = self.markov_head.step(embedding, hidden, state)
        return base_logits + self.markov_head.bias(features), state

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if self.markov_head is not None and module is self.markov_head.markov_w2:
            # The bias starts at zero, so that an untrained sequential head changes nothing. Asked of the layer itself:
            # Transformers skips modules that have no weights of their own, as the head is.
            nn.init.zeros_(module.weight)


__all__ = ["DSparkDrafter", "DSparkOutput"]
