"""Which token loss, with which bounds and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from services.common.errors import ConfigError
from services.common.spec import AlgorithmSpec, LossName
from services.learner.algorithms.kl import KlEstimator


class ImportanceCorrection(StrEnum):
    """What a token's loss is multiplied by, from w = π_prox / π_inference, detached."""

    NONE = "none"
    """1."""
    DECOUPLED = "decoupled"
    """w: decoupled PPO (arXiv 2110.00641, 2505.24298)."""
    TRUNCATED = "truncated"
    """min(w, cap): truncated importance sampling."""
    MASKED = "masked"
    """w within [floor, cap], else 0 (IcePop); the denominator stays the unmasked token count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The objective of one job.

    Example: LossSettings(clip_ratio_high=0.28, importance_correction=ImportanceCorrection.TRUNCATED, importance_weight_cap=2.0)
    """

    loss: LossName = LossName.DAPO
    clip_ratio_low: float = 0.2
    """The ratio is clipped below 1 − this where the advantage is negative. CISPO has no lower clip."""
    clip_ratio_high: float = 0.28
    """The ratio is clipped above 1 + this where the advantage is positive; CISPO caps its weight there for either sign."""
    dual_clip: float | None = None
    """Above 1: where the advantage is negative the ratio is clipped above this as well (usually 3). Off when None."""
    token_level_loss: bool = True
    """Mean over all unmasked tokens of the global batch; else the mean of the sequences' means."""
    constant_length: int | None = None
    """Dr. GRPO: a sequence's token losses are summed and divided by this many tokens instead of its own length (token_level_loss off)."""
    importance_correction: ImportanceCorrection = ImportanceCorrection.NONE
    importance_weight_floor: float = 0.0
    importance_weight_cap: float | None = None
    kl_coefficient: float = 0.0
    """PPO's penalty on KL(π_prox ‖ π_trainer), added to the loss of each token (arXiv 1707.06347, section 4)."""
    kl_estimator: KlEstimator = KlEstimator.K3

    def __post_init__(self) -> None:
        """Checks ranges and what fits together.

        Raises:
            ConfigError: names the field.
        """
        _require(0.0 <= self.clip_ratio_low < 1.0, f"clip_ratio_low must be 0 to below 1, not {self.clip_ratio_low}")
        _require(
            0.0 <= self.clip_ratio_high < math.inf, f"clip_ratio_high must not be negative, not {self.clip_ratio_high}"
        )
        _require(
            0.0 <= self.kl_coefficient < math.inf, f"kl_coefficient must not be negative, not {self.kl_coefficient}"
        )
        if self.dual_clip is not None:
            _require(1.0 < self.dual_clip < math.inf, f"dual_clip must be above 1, not {self.dual_clip}")
            _require(
                self.loss is not LossName.CISPO,
                "dual_clip has no meaning for cispo: its weight is capped for either sign",
            )
        if self.constant_length is not None:
            _require(self.constant_length >= 1, f"constant_length must be at least 1, not {self.constant_length}")
            _require(not self.token_level_loss, "constant_length divides per sequence: set token_level_loss to false")
        if self.loss is LossName.GSPO:
            _require(not self.token_level_loss, "loss gspo is a mean over sequences: set token_level_loss to false")
        self._check_importance()

    @property
    def wants_trainer_proximal(self) -> bool:
        """Whether `old_logprobs` must be the trainer's own at the start of the step: with the engine's, the correction would be 1."""
        return self.importance_correction is not ImportanceCorrection.NONE

    @classmethod
    def from_spec(cls, spec: AlgorithmSpec) -> Self:
        """The settings of a job spec's section `algorithm`."""
        capped = spec.importance_weight_cap is not None
        return cls(
            loss=spec.loss,
            clip_ratio_low=spec.clip_ratio_low,
            clip_ratio_high=spec.clip_ratio_high,
            token_level_loss=spec.token_level_loss,
            importance_correction=ImportanceCorrection.TRUNCATED if capped else ImportanceCorrection.NONE,
            importance_weight_cap=spec.importance_weight_cap,
        )

    def _check_importance(self) -> None:
        cap, floor, correction = self.importance_weight_cap, self.importance_weight_floor, self.importance_correction
        bounded = correction in {ImportanceCorrection.TRUNCATED, ImportanceCorrection.MASKED}
        _require(
            bounded == (cap is not None), f"importance_weight_cap is {cap} with importance_correction {correction}"
        )
        if cap is not None:
            _require(0.0 < cap < math.inf, f"importance_weight_cap must be above 0, not {cap}")
            _require(
                0.0 <= floor <= cap, f"importance_weight_floor must be 0 to importance_weight_cap ({cap}), not {floor}"
            )
        _require(
            floor == 0.0 or correction is ImportanceCorrection.MASKED,
            "importance_weight_floor needs importance_correction masked",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
