"""Architectures without a bridge to Megatron that FSDP2 is tried with."""

from __future__ import annotations

from typing import Any

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 8},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
}  # fmt: skip
"""model_type → what differs: norms, biases, parallel layers, partial rotary embeddings, scales, soft caps, sliding windows."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layer_types has 'conv': backend fsdp2 trains full_attention and sliding_"),
    "qwen3_moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "mixtures of experts are not trained by"),
    "mamba": ({}, "model_type 'mamba' does not take another attention"),
}  # fmt: skip
"""model_type → what differs, and why FSDP2 does not train it."""
