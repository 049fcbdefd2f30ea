"""Token losses: DAPO (PPO with clip-higher), GSPO, CISPO, each with an optional off-policy correction and KL penalty.

    log-probs ─► ratio π_trainer / π_prox ─► policy loss ─► + KL penalty ─► · importance weight ─► · token weight ─► token_loss [R]

Nothing is reduced here. The trainer sums Σ token_loss over the unmasked tokens of all ranks and micro-batches and divides by the global
token count, so that the result does not depend on the split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.common.spec.algorithm import FIRST_REVISION, AlgorithmSpec
from services.common.spec.choices import ImportanceCorrection, KlEstimator, LossName

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The response tokens of one micro-batch, R in all; those of each sequence are contiguous.

    A loss is a sum over tokens, divided by `global_tokens` afterwards. A loss that averages over sequences weights its tokens
    accordingly: `global_tokens / (global_sequences · tokens of the sequence)`.
    """

    trainer_logprobs: torch.Tensor
    """float32 [R], of the weights being trained; the only input with a gradient."""
    old_logprobs: torch.Tensor
    """float32 [R], of the proximal policy: the engine's, or the trainer's own at the start of the step."""
    inference_logprobs: torch.Tensor
    """float32 [R], of the sampling policy."""
    advantages: torch.Tensor
    """float32 [R]."""
    loss_mask: torch.Tensor
    """bool [R]; the loss of a masked token is ignored."""
    sequence_ids: torch.Tensor
    """int64 [R], 0 to sequences − 1 within this micro-batch, never decreasing."""
    global_tokens: int
    """Unmasked tokens of the whole global batch, at least 1."""
    global_sequences: int
    """Sequences of the whole global batch with at least one unmasked token."""


LossFunction = Callable[[LossInputs], tuple[torch.Tensor, Metrics]]
"""A token loss, pure: returns each token's loss [R], and named metrics [R] whose means over the global batch are reported.
It is also called for empty micro-batches, with one masked token."""


def make_loss(algorithm: AlgorithmSpec) -> LossFunction:
    """The loss function of section `algorithm` of a job spec.

    Its token losses [R] have a gradient in `trainer_logprobs` only, and are 0 where masked, whatever the inputs are there. Its metrics [R]
    are detached and 0 where masked; their means over the unmasked tokens of the global batch are:

    - `clip_fraction_high`, `clip_fraction_low`: the clip acts, where A > 0 and where A < 0 (CISPO: only high, for either sign);
    - `clip_fraction_dual`: the dual clip acts (only if set);
    - `importance_weight`: of the correction (only if there is one);
    - `mask_fraction_positive`, `mask_fraction_negative`: the correction masks the token, by the sign of A (likewise);
    - `proximal_kl`: estimate of KL(π_prox ‖ π_trainer), before the coefficient (only if there is one).
    """

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        mask = inputs.loss_mask
        trainer = unmasked(inputs.trainer_logprobs, mask)
        old, inference, advantages = (
            unmasked(values.detach(), mask)
            for values in (inputs.old_logprobs, inputs.inference_logprobs, inputs.advantages)
        )
        token_loss, metrics = policy_loss(trainer, old, advantages, mask, inputs.sequence_ids, algorithm)
        if algorithm.proximal_kl_coefficient > 0.0:
            penalty = kl_estimate(algorithm.proximal_kl_estimator, bounded(trainer - old))
            token_loss = token_loss + algorithm.proximal_kl_coefficient * penalty
            metrics["proximal_kl"] = penalty
        if algorithm.importance_correction is not ImportanceCorrection.NONE:
            weight, left_out = importance_weights(old, inference, algorithm)
            token_loss = token_loss * weight
            metrics |= {
                "importance_weight": weight,
                "mask_fraction_positive": left_out & (advantages > 0),
                "mask_fraction_negative": left_out & (advantages < 0),
            }
        reported = {name: unmasked(value.detach().to(trainer.dtype), mask) for name, value in metrics.items()}
        return token_loss * token_weights(inputs, algorithm), reported

    return loss


def policy_loss(
    trainer: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor,
    algorithm: AlgorithmSpec,
) -> tuple[torch.Tensor, Metrics]:  # fmt: skip
    """The policy's loss of each token [R], unweighted, and where a clip acts. Masked values must be 0 already."""
    log_ratio = trainer - old
    match algorithm.loss:
        case LossName.DAPO:
            return clipped_surrogate(bounded(log_ratio).exp(), advantages, algorithm)
        case LossName.GSPO:
            mean = sequence_mean(log_ratio, mask, sequence_ids)
            if algorithm.revision > FIRST_REVISION:
                mean = own_gradient(mean, trainer)
            return clipped_surrogate(bounded(mean).exp(), advantages, algorithm)
        case LossName.CISPO:
            return capped_policy_gradient(bounded(log_ratio).exp(), trainer, advantages, algorithm)


def own_gradient(mean: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """GSPO-token: log s_{i,t} = sg[log s_i] + log π_t − sg[log π_t], the sequence's value with the gradient of the token alone.

    Summed over a sequence both have the same gradient (arXiv 2507.18071, section 4.3). With a weight for each token, only this one
    removes a token's gradient together with its weight.
    """
    return mean.detach() + (trainer - trainer.detach())


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, algorithm: AlgorithmSpec
) -> tuple[torch.Tensor, Metrics]:
    """−min(r A, clip(r, 1 − low, 1 + high) A), and with a dual clip c, where A < 0, no more than −c A.

    Sources: arXiv 1707.06347 (PPO), 2503.14476 (clip-higher), 1912.09729 (dual clip), 2507.18071 (GSPO: r of the sequence).
    Computed from the clips that act, since these are reported: below 1 − low with A > 0, and above 1 + high with A < 0, the minimum is r A.
    """
    low, high = 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high
    above = (advantages > 0) & (ratio > high)
    below = (advantages < 0) & (ratio < low)
    clipped = torch.where(above, high, torch.where(below, low, ratio))
    metrics: Metrics = {"clip_fraction_high": above, "clip_fraction_low": below}
    if algorithm.dual_clip is not None:
        far_above = (advantages < 0) & (ratio > algorithm.dual_clip)
        clipped = torch.where(far_above, algorithm.dual_clip, clipped)
        metrics["clip_fraction_dual"] = far_above
    return -clipped * advantages, metrics


def capped_policy_gradient(
    ratio: torch.Tensor, trainer: torch.Tensor, advantages: torch.Tensor, algorithm: AlgorithmSpec
) -> tuple[torch.Tensor, Metrics]:
    """CISPO: −sg(min(r, 1 + high)) · A · log π_trainer: every token keeps a gradient, with at most the cap as weight (arXiv 2506.13585)."""
    cap = 1.0 + algorithm.clip_ratio_high
    above = ratio > cap
    metrics: Metrics = {"clip_fraction_high": above, "clip_fraction_low": torch.zeros_like(above)}
    return -ratio.detach().clamp_max(cap) * advantages * trainer, metrics


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


LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before exp: ratios stay within 2e-9 to 5e8, and their squares are finite in float32.
A token beyond the bound gets no gradient through its ratio; a clip would have kept it only for A < 0 with a ratio above 5e8."""


def unmasked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The values with 0 at masked tokens, whatever they were (NaN too); no gradient flows to those."""
    return torch.where(mask, values, values.new_zeros(()))


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """The log-ratio within ± LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_sum(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """For each token [R] the sum over its sequence; ids lie in 0..R−1."""
    return torch.zeros_like(values).index_add(0, sequence_ids, values)[sequence_ids]


def sequence_mean(values: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """For each token [R] the mean over its sequence's unmasked tokens; 0 where there is none. Masked values must be 0 already."""
    counts = sequence_sum(mask.to(values.dtype), sequence_ids).clamp_min(1.0)
    return sequence_sum(values, sequence_ids) / counts


def token_weights(inputs: LossInputs, algorithm: AlgorithmSpec) -> torch.Tensor:
    """For each token [R] its weight in Σ weight · loss / global_tokens over all micro-batches and ranks; 0 where masked.

    - mean over tokens: 1. The tokens may be split anywhere.
    - mean of sequence means: global_tokens / (global_sequences · unmasked tokens of the sequence).
    - Dr. GRPO: global_tokens / (global_sequences · constant_length).

    The last two need only the batch's two totals and whole sequences: a micro-batch never splits a sequence.
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
    """For each token the weight from π_prox / π_inference, [R], without gradient; and the tokens that it masks, bool [R]."""
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
