"""Estimates of a KL divergence from single tokens (J. Schulman, "Approximating KL Divergence", 2020)."""

from __future__ import annotations

import torch

from services.common.spec import KlEstimator


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
