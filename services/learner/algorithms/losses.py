"""Token losses: DAPO (PPO with clip-higher), GSPO, CISPO, each with an optional off-policy correction and KL penalty.

    log-probs ─► ratio π_trainer / π_prox ─► policy loss ─► + KL penalty ─► · importance weight ─► · token weight ─► token_loss [R]

Nothing is reduced here. The trainer sums Σ token_loss over the unmasked tokens of all ranks and micro-batches and divides by the global
token count, so that the result does not depend on the split.
"""

from __future__ import annotations

import torch

from services.common.spec import AlgorithmSpec, ImportanceCorrection, LossName
from services.common.spec.algorithm import FIRST_REVISION
from services.learner.algorithms.kl import kl_estimate
from services.learner.algorithms.ratios import bounded, sequence_mean, unmasked
from services.learner.algorithms.weights import importance_weights, token_weights
from services.learner.megatron.loss import LossFunction, LossInputs

Metrics = dict[str, torch.Tensor]


def make_loss(algorithm: AlgorithmSpec) -> LossFunction:
    """The loss function that section `algorithm` of a job spec describes.

    Its token losses [R] have a gradient in `trainer_logprobs` only, and are 0 where masked, whatever the inputs hold there. Its metrics [R]
    are detached, 0 where masked, and mean to the figure of their name over the unmasked tokens of the global batch:

    - `clip_fraction_high`, `clip_fraction_low`: the clip acts, where A > 0 and where A < 0 (CISPO: only high, for either sign);
    - `clip_fraction_dual`: the dual clip acts (only if set);
    - `importance_weight`: of the correction (only if there is one);
    - `mask_fraction_positive`, `mask_fraction_negative`: the correction leaves the token out, by the sign of A (likewise);
    - `proximal_kl`: estimate of KL(π_prox ‖ π_trainer), before the coefficient (only if there is one).
    """

    def loss(inputs: LossInputs, /) -> tuple[torch.Tensor, Metrics]:
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
    """The policy's loss of each token [R], unweighted, and where a clip acts. Masked tokens must hold 0 already."""
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

    Summed over a sequence both have the same gradient (arXiv 2507.18071, section 4.3); with a weight for each token only this one takes
    a token's gradient away together with its weight.
    """
    return mean.detach() + (trainer - trainer.detach())


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, algorithm: AlgorithmSpec
) -> tuple[torch.Tensor, Metrics]:
    """−min(r A, clip(r, 1 − low, 1 + high) A), and with a dual clip c, where A < 0, no more than −c A.

    Sources: arXiv 1707.06347 (PPO), 2503.14476 (clip-higher), 1912.09729 (dual clip), 2507.18071 (GSPO: r of the sequence).
    Written as the clips that act, for these are reported too: below 1 − low with A > 0, and above 1 + high with A < 0, the minimum is r A.
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
    """CISPO: −sg(min(r, 1 + high)) · A · log π_trainer: every token keeps a gradient, none weighs more than the cap (arXiv 2506.13585)."""
    cap = 1.0 + algorithm.clip_ratio_high
    above = ratio > cap
    metrics: Metrics = {"clip_fraction_high": above, "clip_fraction_low": torch.zeros_like(above)}
    return -ratio.detach().clamp_max(cap) * advantages * trainer, metrics
