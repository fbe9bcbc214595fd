"""The base of drafters that draft token by token with a causal layer of their own (EAGLE-3, multi-token prediction).

At text position t such a drafter pairs a feature, made from the target's states at t, with the embedding of token
t + 1, attends to the pairs before, and predicts token t + 2. While drafting, features of its own take the place of the
target's, which are not known yet; afterwards what was cached with them is forgotten and computed again from the
target's states.

Shape symbols: `batch`, `n` positions given in this call, `keys` all positions attended to, `m` captured target layers,
`d` the hidden size, `vocab` the tokens that the drafter predicts (the draft vocabulary, by default all of the
target's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .backbone import RotaryEmbedding, RotaryTables, masks_by_layer_type
from .configuration_recurrent import RecurrentConfig
from .drafter_base import Drafter

Masks = Mapping[str, torch.Tensor]
"""Attention masks `(batch, 1, n, keys)` by layer type; a type that is left out sees every key."""


@dataclass
class RecurrentOutput(ModelOutput):
    """What a recurrent drafter gives for each position.

    Args:
        features: `(batch, n, d)`, what takes the place of the target's features in the next step.
        last_hidden_state: `(batch, n, d)`, after the final norm.
        logits: `(batch, n, vocab)`, of the token after the one given at each position, soft-capped.
    """

    features: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class RecurrentDrafter(Drafter):
    """Base of drafters that draft token by token.

    `forward` serves both ways of running them. In one pass over a text (the context while generating, a sequence in
    training) its features come from `fuse`. Step by step they are the `features` of the step before: for one token
    while drafting; for all positions of a sequence in training, with the ids one further, each step's keys and values
    kept in one `cache`, and an `attention_mask` that lets position t see the first step's keys up to t and, of every
    later step, its own.

    A subclass makes features of the target's states (`fuse`) and runs its layers (`run_layers`).
    """

    config_class = RecurrentConfig
    config: RecurrentConfig
    is_recurrent = True
    # Recomputing a layer would put its keys into the cache a second time.
    supports_gradient_checkpointing = False
    carries_normed_state = False
    """Whether the feature of the next step is the state after the final norm, not the one before it."""

    layers: nn.ModuleList

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.confidence_head = None
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """Features `(batch, n, d)` of captured target states `(batch, n, m * d)`."""
        raise NotImplementedError

    def run_layers(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        tables: RotaryTables,
        masks: list[torch.Tensor | None],
        cache: Cache | None,
    ) -> torch.Tensor:
        """The last layer's output `(batch, n, d)`.

        Args:
            embeddings: `(batch, n, d)`, of the token after each position.
            features: `(batch, n, d)`.
            tables: rotary embedding of the positions.
            masks: attention mask of each layer.
            cache: see `forward`.
        """
        raise NotImplementedError

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | Masks | None = None,
        cache: Cache | None = None,
        compute_logits: bool = True,
        target_states: torch.Tensor | None = None,
    ) -> RecurrentOutput:
        """Runs the drafter over `n` positions.

        Args:
            input_ids: `(batch, n)`, for each position the token *after* it.
            features: `(batch, n, d)`, `fuse` of the target's states at these positions, or `features` of the output
                one step before; `None` to make them of `target_states`.
            position_ids: `(batch, n)`, text positions.
            attention_mask: `(batch, 1, n, keys)`, boolean, true where attention is allowed, or one such mask per layer
                type. With `None` each position sees those before it and itself, and the cache must hold the `keys - n`
                positions right before the given ones.
            cache: keys and values of positions given before, from `make_cache`; extended by the given ones.
            compute_logits: whether to compute the logits.
            target_states: `(batch, n, m * d)`, in place of `features`; so `fuse`, too, runs inside the forward pass,
                which training in several processes needs.

        Returns:
            `RecurrentOutput` with `features`, `last_hidden_state` and, if asked for, `logits`.
        """
        if features is None:
            if target_states is None:
                raise ValueError("`features` and `target_states` are both None; give one of them.")
            features = self.fuse(target_states)
        embeddings = self.embed(input_ids)
        position_ids = position_ids.to(embeddings.device)
        if attention_mask is None:
            attention_mask = self._default_masks(position_ids, cache)
        elif isinstance(attention_mask, torch.Tensor):
            attention_mask = dict.fromkeys(("full_attention", "sliding_attention"), attention_mask)
        states = self.run_layers(
            embeddings,
            features.to(device=embeddings.device, dtype=embeddings.dtype),
            self.rotary_emb(position_ids, embeddings.dtype),
            [attention_mask.get(layer_type) for layer_type in self.config.layer_types],
            cache,
        )
        hidden = self.norm(states)
        return RecurrentOutput(
            features=hidden if self.carries_normed_state else states,
            last_hidden_state=hidden,
            logits=self.project(hidden) if compute_logits else None,
        )

    def advance(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | Masks | None,
        cache: Cache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, but gives the last position only: its logits `(batch, vocab)` and features `(batch, 1, d)`."""
        output = self(input_ids, features, position_ids, attention_mask, cache, compute_logits=False)
        return self.project(output.last_hidden_state[:, -1]), output.features[:, -1:]

    def _default_masks(self, position_ids: torch.Tensor, cache: Cache | None) -> Masks:
        """Causal masks over consecutive positions; none where there is one query that sees all."""
        length = position_ids.shape[1]
        if length == 1 and "sliding_attention" not in self.config.layer_types:
            return {}
        cached = cache.get_seq_length() if cache is not None else 0
        steps = torch.arange(-cached, length, device=position_ids.device)
        return self.causal_masks(position_ids[:, :1] + steps, position_ids)

    def causal_masks(self, key_positions: torch.Tensor, query_positions: torch.Tensor) -> Masks:
        """Masks by which each query sees the keys of text up to its own position.

        Args:
            key_positions: `(batch, keys)`, text positions of the keys in the cache and of the queries' own, which come
                last; negative for padding.
            query_positions: `(batch, n)`, negative for padding, which sees itself, so that it gives numbers.
        """
        queries, keys = query_positions[..., None], key_positions[:, None]
        length, total = query_positions.shape[1], key_positions.shape[1]
        own = torch.eye(length, total, dtype=torch.bool, device=keys.device).roll(total - length, dims=1)
        allowed = ((keys >= 0) & (keys <= queries)) | own
        return masks_by_layer_type(allowed, key_positions, query_positions, self.config.sliding_window)


__all__ = ["Masks", "RecurrentDrafter", "RecurrentOutput"]
