"""Layers of all drafters.

One implementation serves every target family. In the parallel backbone (equation 3 of the DSpark paper) each layer
attends from the block to the keys and values of `[H_ctx ; block]`: those of the context come from the fused target
states through the layer's own projections, without its input norm, and are kept in a cache; those of the block live
for one round. Inside the block attention is bidirectional. Without a context, under a causal mask, the same layer is
an ordinary decoder layer, of which recurrent drafters are made.

Shape symbols: `batch`, `block` tokens being drafted (several blocks in a row in training), `new` context positions
given in this call, `keys` all positions attended to, `d` the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_base import DrafterConfig

RotaryTables = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary position embeddings, of any type whose frequencies do not change with length."""

    SUPPORTED_TYPES = ("default", "linear", "yarn", "llama3", "proportional")

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        rope_type = (config.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in self.SUPPORTED_TYPES:
            raise ValueError(
                f"`rope_parameters` has rope_type {rope_type!r}; a drafter supports {self.SUPPORTED_TYPES}."
            )
        self.rope_type = rope_type
        # Not buffers: weights are loaded onto modules made without storage, which would leave them uninitialised.
        self._frequencies: torch.Tensor | None = None
        self._signs = torch.empty(0)
        self._scaling = 1.0

    def _inverse_frequencies(self, device: torch.device) -> torch.Tensor:
        """Frequencies of all rotary channels `(rotary dims,)`, those of the first half twice."""
        if self._frequencies is None or self._frequencies.device != device:
            if self.rope_type == "default":
                dim = int(self.config.head_dim * self.config.rope_parameters.get("partial_rotary_factor", 1.0))
                exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
                half = 1.0 / self.config.rope_parameters["rope_theta"] ** exponents
            else:
                half, self._scaling = ROPE_INIT_FUNCTIONS[self.rope_type](self.config, device)
            self._frequencies = torch.cat([half, half])
            self._signs = torch.cat([-torch.ones_like(half), torch.ones_like(half)]) * self._scaling
        return self._frequencies

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> RotaryTables:
        """`position_ids (batch, n)` to cosines and sines `(batch, 1, n, rotary dims)`, made for `rotate`."""
        angles = position_ids[:, None, :, None] * self._inverse_frequencies(position_ids.device)
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._signs).to(dtype)


def rotate(states: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Applies rotary tables `(batch, 1, n, dims)` to the first `dims` channels of `(batch, heads, n, head_dim)`.

    Channel i turns with channel i + dims / 2; the sines of the first half have their sign already.
    """
    cos, sin = tables
    dims = cos.shape[-1]
    rotary, rest = (states, None) if dims == states.shape[-1] else (states[..., :dims], states[..., dims:])
    rotated = torch.addcmul(rotary * cos, rotary.roll(dims // 2, dims=-1), sin)
    return rotated if rest is None else torch.cat([rotated, rest], dim=-1)


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention in the calling convention of Transformers: `(batch, block, heads, head_dim)` and weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class BackboneAttention(nn.Module):
    """Attention from the block to the context and the block.

    Args:
        config: the drafter's configuration.
        layer_idx: number of the layer, under which its keys and values are cached.
        input_size: width of what is projected to queries, keys and values; `d` if unset.
        head_norms: whether each head's queries and keys are normalised.
    """

    def __init__(
        self, config: DrafterConfig, layer_idx: int, input_size: int | None = None, head_norms: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = config.attention_scale if config.attention_scale is not None else self.head_dim**-0.5
        self.is_causal = False
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        query_width = config.num_attention_heads * self.head_dim
        key_width = config.num_key_value_heads * self.head_dim
        width = input_size or config.hidden_size
        self.q_proj = nn.Linear(width, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, key_width, bias=config.attention_bias)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(width, key_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if head_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if head_norms else nn.Identity()
        self.v_norm = (
            nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps, elementwise_affine=False)
            if config.use_value_norm
            else nn.Identity()
        )

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """`(batch, n, heads * head_dim)` to `(batch, heads, n, head_dim)`."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_and_values(self, states: torch.Tensor, tables: RotaryTables) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `(batch, kv_heads, n, head_dim)` of `states (batch, n, d)` at the positions of `tables`."""
        keys = self._split_heads(self.k_proj(states))
        values = keys if self.v_proj is None else self._split_heads(self.v_proj(states))
        return rotate(self.k_norm(keys), tables), self.v_norm(values)

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor | None,
        tables: RotaryTables,
        block_tables: RotaryTables,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """`block (batch, block, d)` and new fused `context (batch, new, d)` to `(batch, block, d)`.

        `tables` are those of the new context and the block. The block's keys and values go to the cache too, whence
        the drafter takes them when all layers have run: one copy of the cache, not two.
        """
        queries = rotate(self.q_norm(self._split_heads(self.q_proj(block))), block_tables)
        states = block if context is None else torch.cat([context, block], dim=1)
        keys, values = self.keys_and_values(states, tables)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        output, _ = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            is_causal=False,
        )
        return self.o_proj(output.flatten(2))


def masks_by_layer_type(
    allowed: torch.Tensor, key_positions: torch.Tensor, query_positions: torch.Tensor, window: int | None
) -> dict[str, torch.Tensor]:
    """Attention masks `(batch, 1, queries, keys)` by layer type, true where attention is allowed.

    Args:
        allowed: `(batch, queries, keys)`, where full attention looks.
        key_positions: `(batch, keys)`.
        query_positions: `(batch, queries)`.
        window: positions that a sliding layer sees, the query's own included; `None` for all.
    """
    near = allowed
    if window is not None:
        # Compared without their differences, whole numbers as many as the mask has entries.
        near = allowed & (key_positions[:, None] > query_positions[..., None] - window)
    return {"full_attention": allowed.unsqueeze(1), "sliding_attention": near.unsqueeze(1)}


class BackboneMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`(batch, block, d)` to the same shape."""
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class BackboneLayer(GradientCheckpointingLayer):
    """One drafter layer, with norms before its parts (Qwen3) or on both sides of them (Gemma).

    Arguments as for `BackboneAttention`.
    """

    def __init__(
        self, config: DrafterConfig, layer_idx: int, input_size: int | None = None, head_norms: bool = True
    ) -> None:
        super().__init__()
        self.self_attn = BackboneAttention(config, layer_idx, input_size, head_norms)
        self.mlp = BackboneMLP(config)
        self.sandwich_norms = config.sandwich_norms
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            setattr(self, name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.layer_scalar: torch.Tensor | None
        self.register_buffer("layer_scalar", torch.ones(1) if config.use_layer_scalar else None)

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor | None,
        tables: RotaryTables,
        block_tables: RotaryTables,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """As `BackboneAttention.forward`."""
        attended = self.self_attn(self.input_layernorm(block), context, tables, block_tables, attention_mask, cache)
        return self.finish(block, attended)

    def finish(self, block: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output: `block (batch, block, d)` and what attention made of it, same shape, then the MLP."""
        if self.sandwich_norms:
            block = block + self.post_attention_layernorm(attended)
            block = block + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(block)))
        else:
            block = block + attended
            block = block + self.mlp(self.post_attention_layernorm(block))
        return block if self.layer_scalar is None else block * self.layer_scalar


__all__ = [
    "BackboneAttention",
    "BackboneLayer",
    "BackboneMLP",
    "RotaryEmbedding",
    "RotaryTables",
    "eager_attention",
    "masks_by_layer_type",
    "rotate",
]
