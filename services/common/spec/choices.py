"""Choices of section `algorithm`: the names that its fields accept."""

from __future__ import annotations

from enum import StrEnum


class AdvantageEstimator(StrEnum):
    """How rewards of a group become advantages (formulas: services/learner/algorithms/advantages.py)."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    GAE = "gae"

    @property
    def compares_group(self) -> bool:
        """Whether it needs a group of at least two rollouts."""
        return self not in {AdvantageEstimator.REINFORCE_PLUS_PLUS, AdvantageEstimator.GAE}


class TurnCredit(StrEnum):
    """What an episode's reward is credited to."""

    TRAJECTORY = "trajectory"
    TURN = "turn"


class LossName(StrEnum):
    """The token loss (formulas: services/learner/algorithms/losses.py)."""

    DAPO = "dapo"
    GSPO = "gspo"
    CISPO = "cispo"
    SURROGATE = "surrogate"
    """−r A without any clip: the policy gradient with its importance ratio."""


class FilterMetric(StrEnum):
    """What dynamic sampling compares within a group."""

    ACCURACY = "accuracy"
    REWARD = "reward"


class ImportanceCorrection(StrEnum):
    """What a token's loss is multiplied by, made of w = π_prox / π_inference without gradient."""

    NONE = "none"
    """1."""
    DECOUPLED = "decoupled"
    """w: decoupled PPO (arXiv 2110.00641, 2505.24298)."""
    TRUNCATED = "truncated"
    """min(w, cap): truncated importance sampling."""
    MASKED = "masked"
    """w within [floor, cap], else 0 (IcePop); the denominator stays the unmasked token count."""
    M2PO = "m2po"
    """w, but 0 for the tokens with the largest (log w)², until the mean of the others is at most a threshold (arXiv 2510.01161)."""

    @property
    def bounded(self) -> bool:
        """Whether it needs a cap."""
        return self in {ImportanceCorrection.TRUNCATED, ImportanceCorrection.MASKED}


class ImportanceLevel(StrEnum):
    """What w of a token is made of."""

    TOKEN = "token"  # noqa: S105  no password
    """Its own ratio."""
    SEQUENCE = "sequence"
    """The product of the ratios of its sequence."""
    GEOMETRIC = "geometric"
    """Their geometric mean."""


class ProximalPolicy(StrEnum):
    """The policy that the ratio of the loss is relative to."""

    INFERENCE = "inference"
    """The engine's, by the log-probs that came with the samples."""
    TRAINER = "trainer"
    """The trainer's own at the start of the step."""
    INTERPOLATED = "interpolated"
    """log π_prox = log μ + α (log π_θ − log μ), α = (v_prox − v_μ) / (v_θ − v_μ), without a pass of its own (arXiv 2512.06547)."""


class KlPlacement(StrEnum):
    """Where the KL to the reference acts."""

    LOSS = "loss"
    """Added to each token's loss."""
    REWARD = "reward"
    """Subtracted from each token's reward, before advantages."""


class Preset(StrEnum):
    """Values of `algorithm.preset`."""

    DAPO = "dapo"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    GSPO = "gspo"
    CISPO = "cispo"
    PPO = "ppo"


class KlEstimator(StrEnum):
    """With x = log p − log q of a token sampled from q; all have the mean KL(q ‖ p), k2 to second order."""

    K1 = "k1"
    """−x: unbiased, of either sign."""
    K2 = "k2"
    """x² / 2: biased, never negative."""
    K3 = "k3"
    """e^x − x − 1: unbiased, never negative."""
