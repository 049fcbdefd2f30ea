"""Mismatch between the learner's and the engine's log-probs of the sampled tokens: health metrics, without gradients."""

from __future__ import annotations

import torch

from services.common.spec.algorithm import KlEstimator
from services.learner.algorithms.losses import bounded, kl_estimate


def mismatch_metrics(trainer_logprobs: torch.Tensor, inference_logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-token values [R], to be averaged over the unmasked tokens of the global batch; r = π_trainer / π_inference.

    The means of `mismatch_kl_k1` and `mismatch_kl_k3` estimate KL(π_inference ‖ π_trainer); those of `ratio` and `ratio_squared` give the
    effective sample share. Log-ratios are bounded (`LOG_RATIO_BOUND`), except in the difference itself.
    """
    difference = (trainer_logprobs - inference_logprobs).detach()
    log_ratio = bounded(difference)
    ratio = log_ratio.exp()
    return {
        "mismatch_kl_k1": kl_estimate(KlEstimator.K1, log_ratio),
        "mismatch_kl_k3": kl_estimate(KlEstimator.K3, log_ratio),
        "mean_abs_logprob_difference": difference.abs(),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
    }


def effective_sample_share(ratio_mean: float, ratio_squared_mean: float) -> float:
    """(Σ r)² / (n · Σ r²) from the two means: 1 where learner and engine agree, 1/n where one token has all the weight."""
    return ratio_mean**2 / ratio_squared_mean if ratio_squared_mean > 0.0 else 0.0
