"""Log-ratios of two policies for tokens and for sequences; values of masked tokens are 0, whatever they were."""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before exp: ratios stay within 2e-9 to 5e8, and their squares are finite in float32.
A token beyond the bound gets no gradient through its ratio; a clip would have kept it only for A < 0 with a ratio above 5e8."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """The log-ratio within ± LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def unmasked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The values with 0 at masked tokens, whatever they were (NaN too); no gradient flows to those."""
    return torch.where(mask, values, values.new_zeros(()))


def sequence_sum(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """For each token [R] the sum over its sequence; ids lie in 0..R−1."""
    return torch.zeros_like(values).index_add(0, sequence_ids, values)[sequence_ids]


def sequence_mean(values: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """For each token [R] the mean over its sequence's unmasked tokens; 0 where there is none. Masked values must be 0 already."""
    counts = sequence_sum(mask.to(values.dtype), sequence_ids).clamp_min(1.0)
    return sequence_sum(values, sequence_ids) / counts
