"""How far the learner and the engine disagree about the tokens that the engine sampled: health figures, without gradients."""

from __future__ import annotations

import torch


def mismatch_metrics(trainer_logprobs: torch.Tensor, inference_logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-token values, [R]; with r = π_trainer / π_inference and tokens sampled from π_inference.

    `mismatch_kl` is r − log r − 1 and `mismatch_k1` is −log r: both mean to KL(π_inference ‖ π_trainer). `ratio` and `ratio_squared` make
    the effective sample size.
    """
    log_ratio = (trainer_logprobs - inference_logprobs).double()  # whose exp overflows far later
    ratio = log_ratio.exp()
    return {
        "mismatch_kl": ratio - log_ratio - 1.0,
        "mismatch_k1": -log_ratio,
        "mean_abs_logprob_difference": log_ratio.abs(),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
    }


def effective_sample_share(ratio_mean: float, ratio_squared_mean: float) -> float:
    """(Σ r)² / (n · Σ r²), from the two means: 1 where engine and learner agree, 1/n where one token carries all the weight."""
    return ratio_mean**2 / ratio_squared_mean if ratio_squared_mean > 0.0 else 0.0
