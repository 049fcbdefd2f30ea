"""Attention within each sequence of a row, with torch's scaled_dot_product_attention; `prompt_sharing` has that of shared prompts.

Rows are padded on the right, so a causal mask alone keeps padding out of every real position. Packed rows need a block-diagonal mask.
Positions count through a packed row without restarting: with rotary embeddings a score depends only on the difference of two positions,
which always belong to the same sequence.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from services.learner.megatron.context_attention import context_attention
from services.learner.training.prompt_sharing import shared_attention


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]  # Megatron comes without types
    """Megatron's core attention for grouped queries."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: object, softmax_scale: float | None = None, **__: object
    ) -> None:
        """Keeps the scale; Megatron's other arguments describe kinds of attention that the decoders here do not have."""
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        """Attention of this tensor-parallel rank's heads, [s, b, heads · head size].

        `query`: [s, b, heads, head size]; `key` and `value`: [s, b, key-value heads, head size]; `attention_mask`: bool [b, 1, s, s],
        True where a query may attend; None for plain causal; or int64 [segments, 2], of `encode_segments`, for a row of shared prompts.
        With context parallelism s is the rank's part of a row, and the segments are the whole row's.
        """
        if attention_mask is not None and attention_mask.dtype is torch.int64:
            query, key, value = (row[:, 0] for row in (query, key, value))
            attend = shared_attention if self.config.context_parallel_size == 1 else context_attention
            return attend(query, key, value, attention_mask, self.softmax_scale).flatten(1)[:, None]
        context = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).flatten(2)
