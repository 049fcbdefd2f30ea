"""Token losses: DAPO (PPO with clip-higher), GSPO, CISPO, the plain surrogate or an installed one, with corrections and penalties.

    log-probs ─► ratio π_trainer / π_prox ─► policy loss ─► + proximal KL ─► · importance weight ─┐
                              + β · reference KL − coefficient · entropy (both unweighted) ◄──────┘
                                             └─► · token weight ─► token_loss [R]

Nothing is reduced here. The trainer sums Σ token_loss over the unmasked tokens of all ranks and micro-batches and divides by the global
token count, so that the result does not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from services.common.config.plugins import LOSSES
from services.common.errors import ConfigError
from services.common.spec.algorithm import FIRST_REVISION, AlgorithmSpec
from services.common.spec.choices import ImportanceCorrection, KlEstimator, KlPlacement, LossName
from services.learner.algorithms.importance import importance_weights
from services.learner.algorithms.kl import kl_estimate, reference_kl
from services.learner.algorithms.plugins import load
from services.learner.algorithms.ratios import bounded, sequence_mean, sequence_sum, unmasked

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The response tokens of one micro-batch, R in all; those of each sequence are contiguous.

    A loss is a sum over tokens, divided by `global_tokens` afterwards. A loss that averages over sequences weights its tokens
    accordingly: `global_tokens / (global_sequences · tokens of the sequence)`.
    """

    trainer_logprobs: torch.Tensor
    """float32 [R], of the weights being trained; it has a gradient."""
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
    entropy: torch.Tensor
    """float32 [R], nats, of the distribution that each token was drawn from; it has a gradient where entropy_coefficient is above 0."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [R], of the reference policy. None without one."""
    kl_coefficient: float = 0.0
    """β of this step; an adaptive one changes from step to step."""
    importance_kept: torch.Tensor | None = None
    """bool [R], the tokens that importance_correction m2po keeps (`second_moment_mask`). None without it."""


LossFunction = Callable[[LossInputs], tuple[torch.Tensor, Metrics]]
"""A token loss, pure: returns each token's loss [R], and named metrics [R] whose means over the global batch are reported.
It is also called for empty micro-batches, with one masked token."""
PolicyLoss = Callable[[LossInputs, AlgorithmSpec], tuple[torch.Tensor, Metrics]]
"""The policy's loss of each token [R], unweighted, and named metrics [R]; masked inputs are 0 already. An installed loss (entry-point
group `millrace.losses`) is one; corrections, KL, entropy and the mean are applied to it as to the built-in ones."""


def make_loss(algorithm: AlgorithmSpec) -> LossFunction:
    """The loss function of section `algorithm` of a job spec.

    The correction's weight multiplies the policy loss together with the proximal penalty: both are expectations over the proximal policy.
    The KL to the reference and the entropy bonus are added after it, unweighted: they are of the policy in training, whatever sampled the
    tokens. Aggregation then weighs the whole.

    Its token losses [R] have a gradient in `trainer_logprobs`, and with an entropy_coefficient in `entropy`, and are 0 where masked,
    whatever the inputs are there. Its metrics [R] are detached and 0 where masked; their means over the unmasked tokens of the global
    batch are:

    - `clip_fraction_high`, `clip_fraction_low`: the clip acts, where A > 0 and where A < 0 (CISPO: only high, for either sign; surrogate:
      neither is reported);
    - `clip_fraction_dual`: the dual clip acts (only if set);
    - `importance_weight`: of the correction (only if there is one);
    - `mask_fraction_positive`, `mask_fraction_negative`: the correction masks the token, by the sign of A (likewise);
    - `proximal_kl`: estimate of KL(π_prox ‖ π_trainer), before the coefficient (only if there is one);
    - `reference_kl`: the estimate k3 of KL(π_trainer ‖ π_ref), before β (only with reference log-probs).

    Raises:
        ConfigError: an installed loss does not exist, or (from the loss function) its result does not fit the tokens; names it.
        ValueError (from the loss function): inputs that the settings need are None.
    """
    policy = policy_loss if isinstance(algorithm.loss, LossName) else _installed(algorithm.loss)

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        known = _known(inputs)
        mask = known.loss_mask
        token_loss, metrics = policy(known, algorithm)
        if algorithm.proximal_kl_coefficient > 0.0:
            penalty = kl_estimate(algorithm.proximal_kl_estimator, bounded(known.trainer_logprobs - known.old_logprobs))
            token_loss = token_loss + algorithm.proximal_kl_coefficient * penalty
            metrics["proximal_kl"] = penalty
        if algorithm.importance_correction is not ImportanceCorrection.NONE:
            token_loss, corrected = _corrected(token_loss, known, algorithm)
            metrics |= corrected
        penalties, regularized = _regularization(known, algorithm)
        metrics |= regularized
        for penalty in penalties:
            token_loss = token_loss + penalty
        dtype = known.trainer_logprobs.dtype
        reported = {name: unmasked(value.detach().to(dtype), mask) for name, value in metrics.items()}
        return token_loss * token_weights(known, algorithm), reported

    return loss


def _known(inputs: LossInputs) -> LossInputs:
    """The inputs with 0 at masked tokens, and with a gradient only where the loss has one."""
    mask = inputs.loss_mask

    def constant(values: torch.Tensor) -> torch.Tensor:
        return unmasked(values.detach(), mask)

    reference = inputs.reference_logprobs
    return replace(
        inputs,
        trainer_logprobs=unmasked(inputs.trainer_logprobs, mask),
        old_logprobs=constant(inputs.old_logprobs),
        inference_logprobs=constant(inputs.inference_logprobs),
        advantages=constant(inputs.advantages),
        entropy=unmasked(inputs.entropy, mask),
        reference_logprobs=None if reference is None else constant(reference),
    )


def _corrected(token_loss: torch.Tensor, known: LossInputs, algorithm: AlgorithmSpec) -> tuple[torch.Tensor, Metrics]:
    """The loss times the importance weight, and the correction's metrics."""
    weight, left_out = importance_weights(
        known.old_logprobs, known.inference_logprobs, algorithm,
        mask=known.loss_mask, sequence_ids=known.sequence_ids, kept=known.importance_kept,
    )  # fmt: skip
    return token_loss * weight, {
        "importance_weight": weight,
        "mask_fraction_positive": left_out & (known.advantages > 0),
        "mask_fraction_negative": left_out & (known.advantages < 0),
    }


def _regularization(known: LossInputs, algorithm: AlgorithmSpec) -> tuple[list[torch.Tensor], Metrics]:
    """What is added to each token's loss, [R] each: β · KL to the reference, −coefficient · entropy; and the metric `reference_kl`."""
    penalties: list[torch.Tensor] = []
    metrics: Metrics = {}
    trainer, reference = known.trainer_logprobs, known.reference_logprobs
    if reference is not None:
        metrics["reference_kl"] = reference_kl(KlEstimator.K3, trainer.detach(), reference)
    if algorithm.kl_placement is KlPlacement.LOSS and known.kl_coefficient > 0.0:
        if reference is None:
            raise ValueError("a KL in the loss needs the reference's log-probs: reference_logprobs")
        penalties.append(known.kl_coefficient * reference_kl(algorithm.kl_estimator, trainer, reference))
    if algorithm.entropy_coefficient > 0.0:
        penalties.append(-algorithm.entropy_coefficient * known.entropy)
    return penalties, metrics


def _installed(name: str) -> PolicyLoss:
    """The installed loss of this name, with its result checked: tensors [R]. What it returns for masked tokens does not matter."""
    function = cast("PolicyLoss", load(LOSSES, name, "algorithm.loss"))

    def checked(known: LossInputs, algorithm: AlgorithmSpec) -> tuple[torch.Tensor, Metrics]:
        token_loss, metrics = function(known, algorithm)
        for what, values in {"token losses": token_loss, **metrics}.items():
            if not isinstance(values, torch.Tensor) or values.shape != known.loss_mask.shape:
                found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                expected = f"a tensor of shape {tuple(known.loss_mask.shape)}"
                raise ConfigError(f"loss {name!r}: {what} must be {expected}, not {found}", field="algorithm.loss")
        return unmasked(token_loss, known.loss_mask), dict(metrics)

    return checked


def policy_loss(known: LossInputs, algorithm: AlgorithmSpec) -> tuple[torch.Tensor, Metrics]:
    """The policy's loss of each token [R], unweighted, and where a clip acts. Masked values must be 0 already."""
    trainer, advantages = known.trainer_logprobs, known.advantages
    log_ratio = trainer - known.old_logprobs
    match algorithm.loss:
        case LossName.DAPO:
            return clipped_surrogate(bounded(log_ratio).exp(), advantages, algorithm)
        case LossName.GSPO:
            mean = sequence_mean(log_ratio, known.loss_mask, known.sequence_ids)
            if algorithm.revision > FIRST_REVISION:
                mean = own_gradient(mean, trainer)
            return clipped_surrogate(bounded(mean).exp(), advantages, algorithm)
        case LossName.CISPO:
            return capped_policy_gradient(bounded(log_ratio).exp(), trainer, advantages, algorithm)
        case LossName.SURROGATE:
            return -bounded(log_ratio).exp() * advantages, {}
        case name:
            raise ValueError(f"{name} is no built-in loss")


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
