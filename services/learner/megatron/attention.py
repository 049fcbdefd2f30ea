"""Attention within each sequence of a row, on torch's own scaled_dot_product_attention.

Rows are padded on the right, so a causal mask alone keeps padding out of every real position. Packed rows need a block-diagonal mask.
Positions go on counting through a packed row: rotary embeddings make a score depend on the difference of two positions only, and both
always lie in the same sequence, so restarting them would change nothing.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]  # Megatron comes without types
    """Megatron's core attention for grouped queries; takes the mask of `block_diagonal_mask`, or None for plain causal rows."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: object, softmax_scale: float | None = None, **__: object
    ) -> None:
        """Keeps the scale; the rest of what Megatron passes describes attention kinds that decoders here do not have."""
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
        """Attends.

        Args:
            query: [s, b, heads, head size] of this tensor-parallel rank.
            key: [s, b, key-value heads, head size].
            value: like `key`.
            attention_mask: bool [b, 1, s, s], True where a query may look; None for plain causal.

        Returns:
            [s, b, heads · head size].
        """
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


def block_diagonal_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """The mask of packed rows: a position looks at itself and at earlier ones of its segment.

    Args:
        segment_ids: int64 [b, s].

    Returns:
        bool [b, 1, s, s], True where a query (third axis) may look at a key (fourth).
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same.tril()[:, None]
