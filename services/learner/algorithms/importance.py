"""Importance weights from π_prox / π_inference: what each token's policy loss is multiplied by."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import ImportanceCorrection, ImportanceLevel
from services.learner.algorithms.ratios import bounded, sequence_mean, sequence_sum


def importance_weights(
    old_logprobs: torch.Tensor, inference_logprobs: torch.Tensor, algorithm: AlgorithmSpec,
    *, mask: torch.Tensor, sequence_ids: torch.Tensor, kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """For each token the weight, [R], without gradient; and the tokens that it masks, bool [R]. Masked values must be 0 already.

    Args:
        old_logprobs: [R], of π_prox.
        inference_logprobs: [R].
        algorithm: correction, level, floor and cap.
        mask: bool [R], the tokens that count; sequence levels are made of these alone.
        sequence_ids: int64 [R], as in `LossInputs`.
        kept: bool [R], the tokens that m2po keeps (`second_moment_mask`); needed by it alone.

    Raises:
        ValueError: m2po without `kept`.
    """
    log_ratio = level_log_ratio(old_logprobs - inference_logprobs, algorithm.importance_level, mask, sequence_ids)
    ratio = bounded(log_ratio).exp().detach()
    cap = math.inf if algorithm.importance_weight_cap is None else algorithm.importance_weight_cap
    none = torch.zeros_like(ratio, dtype=torch.bool)
    match algorithm.importance_correction:
        case ImportanceCorrection.NONE:
            return torch.ones_like(ratio), none
        case ImportanceCorrection.DECOUPLED:
            return ratio, none
        case ImportanceCorrection.TRUNCATED:
            return ratio.clamp_max(cap), none
        case ImportanceCorrection.MASKED:
            outside = (ratio < algorithm.importance_weight_floor) | (ratio > cap)
            return torch.where(outside, torch.zeros_like(ratio), ratio), outside
        case ImportanceCorrection.M2PO:
            if kept is None:
                raise ValueError("importance_correction m2po needs the tokens that it keeps: importance_kept")
            return torch.where(kept, ratio, torch.zeros_like(ratio)), ~kept


def level_log_ratio(
    log_ratio: torch.Tensor, level: ImportanceLevel, mask: torch.Tensor, sequence_ids: torch.Tensor
) -> torch.Tensor:
    """For each token [R] the log of w: its own log-ratio, or the sum or the mean over its sequence's unmasked tokens."""
    match level:
        case ImportanceLevel.TOKEN:
            return log_ratio
        case ImportanceLevel.SEQUENCE:
            return sequence_sum(log_ratio, sequence_ids)
        case ImportanceLevel.GEOMETRIC:
            return sequence_mean(log_ratio, mask, sequence_ids)


def second_moment_mask(log_ratios: npt.NDArray[np.float64], threshold: float) -> npt.NDArray[np.bool_]:
    """M2PO's tokens (arXiv 2510.01161): True for those kept, [N].

    The largest (log w)² are left out until the mean of the kept ones is at most the threshold; it may be that none is kept. Of equal
    ones the later are left out first. A log-ratio that is not finite is left out.

    Args:
        log_ratios: log π_prox − log π_inference of all unmasked tokens of the global batch, [N].
        threshold: `importance_m2_threshold`, above 0.
    """
    squares = np.square(np.asarray(log_ratios, np.float64))
    ascending = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[ascending]) / np.arange(1, len(squares) + 1)
    below = np.flatnonzero(means <= threshold)
    kept = np.zeros(len(squares), bool)
    if len(below):
        kept[ascending[: below[-1] + 1]] = True
    return kept
