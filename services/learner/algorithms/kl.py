"""KL divergences: estimates from single tokens, the one to the reference policy, and its adaptive coefficient."""

from __future__ import annotations

import math

import torch

from services.common.spec.choices import KlEstimator
from services.learner.algorithms.ratios import LOG_RATIO_BOUND

MAX_RELATIVE_ERROR = 0.2
"""Beyond it, the distance of a KL from its target changes the coefficient no faster."""


def kl_estimate(estimator: KlEstimator, log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimates of KL(q ‖ p) from log p − log q of tokens sampled from q, each [R]; differentiable.

    k3 is computed with expm1: below a difference of 1e-3, the textbook form in float32 is rounding noise.
    """
    match estimator:
        case KlEstimator.K1:
            return -log_ratio
        case KlEstimator.K2:
            return 0.5 * log_ratio.square()
        case KlEstimator.K3:
            return torch.expm1(log_ratio) - log_ratio


def reference_kl(
    estimator: KlEstimator, trainer_logprobs: torch.Tensor, reference_logprobs: torch.Tensor
) -> torch.Tensor:
    """Estimates of KL(π_trainer ‖ π_ref) from log π_ref − log π_trainer, each [R]; differentiable in the trainer's.

    The log-ratio is bounded above only, where its exp would overflow: a token that the reference finds all but impossible
    keeps the gradient that pulls the policy back.
    """
    return kl_estimate(estimator, (reference_logprobs - trainer_logprobs).clamp_max(LOG_RATIO_BOUND))


def adapted_coefficient(coefficient: float, kl: float, responses: int, *, target: float, horizon: int) -> float:
    """β of the next step: β · (1 + clip(kl / target − 1, ± 0.2) · responses / horizon) (arXiv 1909.08593, section 2.2), never below 0.

    A KL that is not a number leaves it as it is.

    Args:
        coefficient: β of this step.
        kl: mean KL to the reference in this step, nats; of the unit of `target`.
        responses: responses of this step.
        target: above 0 (`kl_target`).
        horizon: responses over which β changes by its whole relative error (`kl_horizon`).
    """
    if math.isnan(kl):
        return coefficient
    error = min(max(kl / target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coefficient * max(1.0 + error * responses / horizon, 0.0)
