"""Norm of rows whose positions are split over the tensor-parallel ranks; Megatron's own without Transformer Engine refuses them.

Every rank holds the whole weight and has the gradient of its own positions: Megatron's `finalize_model_grads` sums those that are marked.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked for Megatron."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        """The norm over `hidden_size`; Megatron's other arguments repeat its config."""
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
