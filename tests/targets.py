"""A tiny random target of every family in `TARGET_FAMILIES`, and of families that have to be refused.

Each row is a `model_type` and what its config has beyond `COMMON`; `None` takes a field of `COMMON` away.
`make_target(name)` builds the model. Sliding windows are 8 tokens wide, heads are untied where a tied one would only
repeat the last token.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from .tiny import COMMON, SLIDING_WINDOW, VOCAB_SIZE, build

Fields = dict[str, Any]

LAYERS: Fields = {"num_hidden_layers": 4}
UNTIED: Fields = LAYERS | {"tie_word_embeddings": False}
WINDOW: Fields = LAYERS | {"sliding_window": SLIDING_WINDOW}
MIXED: Fields = WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS: Fields = LAYERS | {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Multi-head latent attention, and the same with an indexer that chooses what it sees.
LATENT: Fields = EXPERTS | {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
INDEXED: Fields = LATENT | {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 8}
GEMMA: Fields = MIXED | {"query_pre_attn_scalar": 16}
# Layers that share keys, and embeddings of their own for each layer.
GEMMA_SHARED: Fields = GEMMA | {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
GEMMA4: Fields = GEMMA_SHARED | {
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
}
CONVOLUTIONS: Fields = {"layer_types": ["conv", "full_attention"] * 2}

VISION: Fields = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Vision towers whose output is as wide as the text model.
MERGED_VISION: Fields = VISION | {"embed_dim": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
CLIP: Fields = VISION | {"model_type": "clip_vision_model"}
SIGLIP: Fields = VISION | {"model_type": "siglip_vision_model"}


def mrope(*section: int) -> Fields:
    """Rotary positions in three dimensions."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}}


def multimodal(text: Fields, vision: Fields = VISION, text_type: str | None = None, **fields: Any) -> Fields:
    """The config of a multimodal model around a text model."""
    tied = text.get("tie_word_embeddings", False)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": tied}
    text = COMMON | text | ({"model_type": text_type} if text_type else {})
    return {"text_config": text, "vision_config": vision} | special | fields


FAMILIES: dict[str, Fields] = {
    "afmoe": EXPERTS | MIXED | {"num_dense_layers": 1},
    "apertus": LAYERS,
    "apertus1p5_text": LAYERS,
    "arcee": LAYERS,
    "aria_text": EXPERTS,
    "axk1": LATENT,
    "axk2": INDEXED,
    "aya_vision": multimodal(MIXED | {"logit_scale": 1.0}, SIGLIP, "cohere2"),
    "biogpt": UNTIED,
    "bitnet": LAYERS,
    "bloom": UNTIED,
    "codegen": LAYERS | {"rotary_dim": 8, "n_ctx": 512},
    "cohere": LAYERS | {"logit_scale": 1.0},
    "cohere2": MIXED | {"logit_scale": 1.0},
    "cohere2_moe": EXPERTS | MIXED | {"logit_scale": 1.0},
    "cohere2_vision": multimodal(MIXED | {"logit_scale": 1.0}, SIGLIP, "cohere2"),
    "ctrl": UNTIED | {"dff": 96},
    "cwm": MIXED,
    "dbrx": UNTIED
    | {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "d_model": 64,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        "max_seq_len": 512,
        "n_heads": 4,
        "n_layers": 4,
        **dict.fromkeys(
            ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim")
        ),
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": INDEXED,
    "deepseek_vl": multimodal(LAYERS, SIGLIP, "llama"),
    "diffllama": LAYERS,
    "doge": LAYERS,
    "dots1": EXPERTS,
    "ernie4_5": LAYERS,
    "ernie4_5_moe": EXPERTS,
    "ernie4_5_vl_moe": multimodal(EXPERTS | {"moe_intermediate_size": [32, 32]} | mrope(3, 3, 2)),
    "exaone4": MIXED,
    "exaone4_5": multimodal(MIXED, MERGED_VISION, "exaone4"),
    "exaone_moe": EXPERTS | MIXED,
    "falcon": LAYERS | {"head_dim": None},
    "flex_olmo": EXPERTS,
    "fuyu": LAYERS,
    "gemma": LAYERS,
    "gemma2": GEMMA,
    "gemma3": multimodal(GEMMA | {"tie_word_embeddings": False}),
    "gemma3_text": GEMMA,
    "gemma3n_text": GEMMA_SHARED
    | {"intermediate_size": [96] * 4, "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4": multimodal(GEMMA4, audio_config=None),
    "gemma4_text": GEMMA4,
    "gemma4_unified": multimodal(GEMMA4, VISION | {"model_patch_size": 42, "mm_embed_dim": 32, "mm_posemb_size": 8}),
    "gemma4_unified_text": GEMMA4,
    "glm": LAYERS,
    "glm4": LAYERS,
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": LATENT,
    "glm4v": multimodal(LAYERS | mrope(2, 3, 3), MERGED_VISION),
    "glm4v_moe": multimodal(EXPERTS | mrope(1, 1, 2), MERGED_VISION),
    "glm_moe_dsa": INDEXED,
    "got_ocr2": multimodal(LAYERS, VISION | {"output_channels": 16, "mlp_dim": 32}, "qwen2"),
    "gpt2": LAYERS,
    "gpt_bigcode": LAYERS,
    "gpt_neo": LAYERS | {"attention_types": [[["global", "local"], 2]], "window_size": SLIDING_WINDOW},
    "gpt_neox": LAYERS,
    "gpt_neox_japanese": LAYERS,
    "gpt_oss": EXPERTS | MIXED,
    "gptj": LAYERS | {"rotary_dim": 8},
    "granite": LAYERS | {"embedding_multiplier": 3.0, "logits_scaling": 1.0},
    "granite_swa": MIXED | {"logits_scaling": 1.0},
    "granitemoe": EXPERTS | {"logits_scaling": 1.0},
    "granitemoe_swa": EXPERTS | MIXED | {"logits_scaling": 1.0},
    "granitemoeshared": EXPERTS | {"logits_scaling": 1.0},
    "helium": LAYERS,
    "hunyuan_v1_dense": LAYERS,
    "hunyuan_v1_moe": EXPERTS,
    "hy_v3": EXPERTS,
    "hyperclovax": LAYERS,
    "idefics3": multimodal(LAYERS, VISION, "llama", image_token_id=3),
    "internvl": multimodal(LAYERS, VISION, "qwen2", image_token_id=3),
    "jais2": LAYERS,
    "jetmoe": EXPERTS | {"kv_channels": 16},
    "kimi_k25": multimodal(LATENT),
    "kolibri1": EXPERTS | MIXED,
    "laguna": EXPERTS,
    "llama": LAYERS,
    "llama4_text": EXPERTS | {"attention_chunk_size": 16},
    "llava": multimodal(LAYERS, CLIP, "llama", image_token_index=3),
    "llava_next": multimodal(LAYERS, CLIP, "llama", image_token_index=3),
    "llava_onevision": multimodal(LAYERS, SIGLIP, "qwen2", image_token_index=3),
    "longcat_flash": LATENT | {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 1},
    "mellum": EXPERTS | MIXED,
    "mimo_v2_flash": EXPERTS | MIXED,
    "minimax_m2": EXPERTS,
    "minimax_m3_vl_text": EXPERTS,
    "ministral": MIXED,
    "ministral3": LAYERS,
    "mistral": WINDOW,
    "mistral3": multimodal(WINDOW, VISION | {"model_type": "pixtral", "head_dim": 16}, "mistral", image_token_index=3),
    "mixtral": EXPERTS | WINDOW,
    "moshi": LAYERS | {"ffn_dim": 96},
    "mpt": LAYERS | {"use_cache": True},
    "nanochat": LAYERS,
    "nemotron": LAYERS,
    "olmo": LAYERS,
    "olmo2": LAYERS,
    "olmo3": MIXED,
    "olmoe": EXPERTS,
    "opt": LAYERS | {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "paligemma": multimodal(LAYERS, SIGLIP, "gemma", image_token_index=3),
    "persimmon": LAYERS,
    "phi": LAYERS,
    "phi3": WINDOW,
    "phimoe": EXPERTS,
    "qwen2": LAYERS,
    "qwen2_5_vl": multimodal(LAYERS | mrope(2, 3, 3), MERGED_VISION | {"fullatt_block_indexes": [0]}),
    "qwen2_moe": EXPERTS,
    "qwen2_vl": multimodal(LAYERS | mrope(2, 3, 3), MERGED_VISION | {"hidden_size": 64}),
    "qwen3": UNTIED,
    "qwen3_moe": EXPERTS,
    "qwen3_vl": multimodal(LAYERS, MERGED_VISION),
    "qwen3_vl_moe": multimodal(EXPERTS, MERGED_VISION),
    "seed_oss": LAYERS,
    "smollm3": LAYERS | {"no_rope_layer_interval": 2},
    "smolvlm": multimodal(LAYERS, VISION, "llama", image_token_id=3),
    "solar_open": EXPERTS,
    "stablelm": LAYERS,
    "starcoder2": WINDOW,
    "vaultgemma": GEMMA,
    "xglm": UNTIED | {"ffn_dim": 96},
    "youtu": LATENT,
}

# Families whose rows cannot go on at different lengths, with what the error says.
ONE_ROW = {
    "axk2": "DynamicIndexedLayer",
    "deepseek_v32": "DynamicIndexedLayer",
    "exaone4_5": "positions from the columns of its cache",
    "glm_moe_dsa": "DynamicIndexedLayer",
    "llama4_text": "chunked attention",
}

# Recurrent layers and convolutions.
RECURRENT: dict[str, Fields] = {
    "bailing_hybrid": LATENT,
    "bamba": LAYERS,
    "deepseek_v4": EXPERTS,
    "falcon_h1": LAYERS,
    "falcon_mamba": LAYERS,
    "granitemoehybrid": EXPERTS,
    "inkling_text": EXPERTS,
    "jamba": EXPERTS,
    "kimi_linear": LATENT,
    "lfm2": LAYERS | CONVOLUTIONS,
    "lfm2_moe": EXPERTS | CONVOLUTIONS,
    "lfm3": LAYERS,
    "mamba": LAYERS,
    "mamba2": LAYERS | {"num_heads": 8, "head_dim": 16},
    "minimax": EXPERTS,
    "nemotron_h": LAYERS,
    "olmo_hybrid": LAYERS,
    "qwen3_5_text": LAYERS,
    "qwen3_next": EXPERTS,
    "recurrent_gemma": LAYERS,
    "rwkv": LAYERS,
    "xlstm": LAYERS,
}
# Keys of images beside those of the text.
CROSS_ATTENTION: dict[str, Fields] = {
    "mllama": multimodal(
        LAYERS | {"cross_attention_layers": [1]},
        VISION
        | {"num_global_layers": 1, "vision_output_dim": 64, "attention_heads": 2, "intermediate_layers_indices": [0]},
    )
}
# Families that keep no cache, or one that has other entries than the text's tokens.
WITHOUT_CACHE: dict[str, Fields] = {
    "cpmant": LAYERS,
    "openai-gpt": LAYERS,
    "xlm": LAYERS,
    "xlnet": LAYERS | {"d_inner": 96, "d_head": 16, "max_position_embeddings": None},
}
SCALED_LOGITS: dict[str, Fields] = {
    "cohere": LAYERS,
    "granite": LAYERS | {"logits_scaling": 4.0},
    "minicpm3": LATENT,
}

# Not in every supported version of Transformers; the newest that the tests run with has them all.
RECENT = ("apertus1p5_text", "bailing_hybrid", "kolibri1", "lfm3")


def is_missing(name: str) -> bool:
    """Whether the installed Transformers is too old for a family."""
    return name in RECENT and name not in CONFIG_MAPPING


def make_config(name: str, fields: Fields) -> PreTrainedConfig:
    """The config of model type `name`."""
    if "text_config" not in fields:
        fields = COMMON | fields
    return CONFIG_MAPPING[name](**{field: value for field, value in fields.items() if value is not None})


def make_target(name: str, fields: Fields | None = None, seed: int = 0) -> PreTrainedModel:
    """A new tiny target of model type `name`, by default that of `FAMILIES`, in evaluation mode."""
    fields = FAMILIES[name] if fields is None else fields
    config = make_config(name, fields)
    is_multimodal = "text_config" in fields
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_multimodal else MODEL_FOR_CAUSAL_LM_MAPPING
    return build(mapping[type(config)], config, seed)
