"""Estimates of a KL divergence from single tokens (J. Schulman, "Approximating KL Divergence", 2020)."""

from __future__ import annotations

from enum import StrEnum

import torch


class KlEstimator(StrEnum):
    """With x = log p − log q of a token sampled from q; all have the mean KL(q ‖ p), k2 to second order."""

    K1 = "k1"
    """−x: unbiased, of either sign."""
    K2 = "k2"
    """x² / 2: biased, never negative."""
    K3 = "k3"
    """e^x − x − 1: unbiased, never negative."""


def kl_estimate(estimator: KlEstimator, log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimates of KL(q ‖ p) from log p − log q of tokens sampled from q, each [R]; differentiable.

    k3 is computed with expm1: as written, float32 rounds it to noise below a difference of 1e-3.
    """
    match estimator:
        case KlEstimator.K1:
            return -log_ratio
        case KlEstimator.K2:
            return 0.5 * log_ratio.square()
        case KlEstimator.K3:
            return torch.expm1(log_ratio) - log_ratio
