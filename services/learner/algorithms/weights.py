"""What a token's loss is multiplied by before the trainer sums everything: its share of the mean, and the off-policy correction."""

from __future__ import annotations

import math

import torch

from services.common.spec import AlgorithmSpec, ImportanceCorrection
from services.learner.algorithms.ratios import bounded, sequence_sum
from services.learner.megatron.loss import LossInputs


def token_weights(inputs: LossInputs, algorithm: AlgorithmSpec) -> torch.Tensor:
    """For each token [R] its weight in Σ weight · loss / global_tokens, summed over all micro-batches and ranks; 0 where masked.

    - mean over tokens: 1. The tokens may be split anywhere.
    - mean of sequence means: global_tokens / (global_sequences · unmasked tokens of the sequence).
    - Dr. GRPO: global_tokens / (global_sequences · constant_length).

    The last two need no more than the batch's two totals and whole sequences: a micro-batch never cuts a sequence.
    """
    mask = inputs.loss_mask.to(inputs.trainer_logprobs.dtype)
    if algorithm.token_level_loss:
        return mask
    tokens_per_sequence = inputs.global_tokens / inputs.global_sequences
    if algorithm.constant_length is not None:
        return mask * (tokens_per_sequence / algorithm.constant_length)
    return mask * tokens_per_sequence / sequence_sum(mask, inputs.sequence_ids).clamp_min(1.0)


def importance_weights(
    old_logprobs: torch.Tensor, inference_logprobs: torch.Tensor, algorithm: AlgorithmSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token the weight made of π_prox / π_inference, [R], without gradient; and which tokens it leaves out, bool [R]."""
    ratio = bounded(old_logprobs - inference_logprobs).exp().detach()
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
