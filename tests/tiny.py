"""Tiny random targets, one per family: float32, seeded, small enough to run anywhere.

`tiny_target(family)` makes a new model each time; `FAMILIES` lists the names. Weights are larger than usual, so that
the next token depends visibly on the text and greedy choices are not all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320
HIDDEN_SIZE = 64
SLIDING_WINDOW = 8

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_SLIDING_THEN_FULL = [
    "sliding_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "full_attention",
]

FAMILIES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"num_hidden_layers": 4, "layer_types": _SLIDING_THEN_FULL[:4], "sliding_window": SLIDING_WINDOW},
    ),
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            "num_hidden_layers": 5,
            "layer_types": _SLIDING_THEN_FULL,
            "sliding_window": SLIDING_WINDOW,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
}


def tiny_target(family: str = "qwen3", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A new tiny target in evaluation mode; `overrides` are fields of its config."""
    model_class, config_class, fields = FAMILIES[family]
    config = config_class(**{**COMMON, **fields, **overrides})
    config._attn_implementation = "sdpa"
    return build(model_class, config, seed)


def build(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights in float32, in evaluation mode. The global RNG is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = model_class(config).to(torch.float32)
        # Away from one, so that a norm that is skipped or applied twice shows.
        for name, parameter in target.named_parameters():
            if "norm" in name or "ln_" in name:
                if name.endswith("bias"):
                    parameter.data.normal_(0.0, 0.1)
                else:
                    parameter.data.uniform_(0.7, 1.3)
    return target.eval()


def tiny_prompt(length: int = 12, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random ids `(batch, length)` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE - 8, (batch, length), generator=generator)
