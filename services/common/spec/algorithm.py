"""Section `algorithm`: the objective and the filter of groups, under the names of Ascend tooling."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, ValidationInfo, model_validator

from services.common.spec.base import RECORDED, Section

FIRST_REVISION = 1
"""Revision of a recorded spec that names none."""
CURRENT_REVISION = 2
"""Revision of a new job."""
GSPO_CLIPS = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
"""Clips of the sequence's ratio (arXiv 2507.18071), which never reaches the usual bounds of a token's ratio."""


class AdvantageEstimator(StrEnum):
    """How rewards of a group become advantages (formulas: services/learner/algorithms/advantages.py)."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"


class LossName(StrEnum):
    """The token loss (formulas: services/learner/algorithms/losses.py)."""

    DAPO = "dapo"
    GSPO = "gspo"
    CISPO = "cispo"


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

    @property
    def bounded(self) -> bool:
        """Whether it needs a cap."""
        return self in {ImportanceCorrection.TRUNCATED, ImportanceCorrection.MASKED}


class KlEstimator(StrEnum):
    """With x = log p − log q of a token sampled from q; all have the mean KL(q ‖ p), k2 to second order."""

    K1 = "k1"
    """−x: unbiased, of either sign."""
    K2 = "k2"
    """x² / 2: biased, never negative."""
    K3 = "k3"
    """e^x − x − 1: unbiased, never negative."""


class AlgorithmSpec(Section):
    """Section `algorithm`; the defaults are DAPO's (arXiv 2503.14476)."""

    advantage_estimator: AdvantageEstimator = Field(
        default=AdvantageEstimator.GRPO, strict=False, description="Advantage of a rollout within its group."
    )
    loss: LossName = Field(default=LossName.DAPO, strict=False, description="Token loss.")
    revision: int = Field(
        default=CURRENT_REVISION,
        ge=FIRST_REVISION,
        le=CURRENT_REVISION,
        description="Revision of the formulas behind these names. 2: GSPO weighs each token's own gradient by its correction, and "
        "REINFORCE++ baseline is whitened over tokens. 1: as jobs without this setting were trained, so that they replay bit for bit.",
    )
    clip_ratio_low: float = Field(
        default=0.2,
        ge=0.0,
        lt=1.0,
        description="Ratio is clipped below 1 − this where the advantage is negative. CISPO has no lower clip. Default 0.2; with loss gspo "
        "0.0003, for the ratio of a sequence.",
    )
    clip_ratio_high: float = Field(
        default=0.28,
        ge=0.0,
        le=10.0,
        description="Ratio is clipped above 1 + this where the advantage is positive (clip-higher); CISPO caps its weight there for "
        "either sign. Default 0.28; with loss gspo 0.0004, for the ratio of a sequence.",
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1.0,
        description="Where the advantage is negative the ratio is clipped above this as well; not for CISPO. Off when null, as in DAPO's "
        "paper and in TRL; verl clips at 3 unless told otherwise, and DAPO's recipe for verl at 10.",
    )
    token_level_loss: bool = Field(
        default=True, description="Mean over all response tokens of the global batch; else mean of sequence means."
    )
    constant_length: int | None = Field(
        default=None,
        ge=1,
        description="Dr. GRPO: a sequence's token losses are divided by this many tokens instead of its own length; "
        "needs token_level_loss off. Off when null.",
    )
    importance_correction: ImportanceCorrection = Field(
        default=ImportanceCorrection.NONE,
        strict=False,
        description="Weight of a token's loss, made of w = π_prox / π_inference, where π_prox is the trainer's policy at the start of the "
        "step: none is 1, decoupled is w, truncated is w up to the cap, masked is w between floor and cap, else 0. "
        "Since a batch gets one optimizer step, π_trainer / π_prox is then 1: no clip acts and the proximal KL is 0.",
    )
    importance_weight_floor: float = Field(
        default=0.0,
        ge=0.0,
        description="Below this weight a token is left out; only with importance_correction masked.",
    )
    importance_weight_cap: float | None = Field(
        default=None,
        gt=0.0,
        description="Bound on w, usually 2: set exactly with importance_correction truncated or masked.",
    )
    proximal_kl_coefficient: float = Field(
        default=0.0,
        ge=0.0,
        description="PPO's penalty (arXiv 1707.06347, section 4): times KL(π_prox ‖ π_trainer), added to each token's loss. Not a KL to a "
        "reference model: the proximal policy is the engine's, or with an importance_correction the trainer's at the start of the step.",
    )
    proximal_kl_estimator: KlEstimator = Field(
        default=KlEstimator.K3,
        strict=False,
        description="Estimate of that KL from a token, x being the log-ratio: −x, x²/2 or e^x − x − 1.",
    )
    overlong_buffer_enable: bool = Field(default=False, description="Soft overlong punishment.")
    overlong_buffer: int = Field(
        default=4096, ge=1, description="Width of the punished zone before rollout_max_tokens, tokens."
    )
    overlong_buffer_penalty_factor: float = Field(
        default=1.0, ge=0.0, le=100.0, description="Largest overlong punishment."
    )
    filter_groups_enable: bool = Field(
        default=True, description="Dynamic sampling: train only on groups that carry an advantage."
    )
    filter_groups_metric: FilterMetric = Field(
        default=FilterMetric.ACCURACY, strict=False, description="What must differ within a group."
    )
    filter_groups_max_batches: int = Field(
        default=20,
        ge=1,
        le=10_000,
        description="Most batches of groups judged for one step; then it trains on what it has, and says so. With nothing to train on the "
        "job is stalled, and after twice as many (256 groups at the least) it fails: no step is possible.",
    )
    filter_groups_train_batch_size: int = Field(
        default=64, ge=1, le=65_536, description="Informative groups that one step trains (groups_per_step)."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any, info: ValidationInfo) -> Any:  # noqa: ANN401  any body of a request
        """Fills in the revision of a recorded spec that names none, and the clips' defaults, which depend on the loss."""
        if not isinstance(given, Mapping):
            return given
        values = ({"revision": FIRST_REVISION} if info.context is RECORDED else {}) | dict(given)
        gspo = values.get("loss") == LossName.GSPO and values.get("revision") != FIRST_REVISION
        return (GSPO_CLIPS if gspo else {}) | values

    @model_validator(mode="after")
    def _loss_and_mean_agree(self) -> Self:
        if self.loss is LossName.GSPO and self.token_level_loss:
            raise ValueError("loss gspo is a mean over sequences: set token_level_loss to false")
        if self.loss is LossName.CISPO and self.dual_clip is not None:
            raise ValueError(
                "dual_clip has no meaning for loss cispo, whose weight is capped for either sign: leave it out"
            )
        if self.constant_length is not None and self.token_level_loss:
            raise ValueError("constant_length divides per sequence: set token_level_loss to false")
        return self

    @model_validator(mode="after")
    def _importance_bounds_agree(self) -> Self:
        correction, floor, cap = self.importance_correction, self.importance_weight_floor, self.importance_weight_cap
        if correction.bounded and cap is None:
            raise ValueError(f"importance_correction {correction} needs importance_weight_cap (2 is usual)")
        if cap is not None and not correction.bounded:
            needed = "importance_correction truncated or masked"
            raise ValueError(f"importance_weight_cap needs {needed}, and that is {correction}")
        if floor > 0.0 and correction is not ImportanceCorrection.MASKED:
            raise ValueError(f"importance_weight_floor needs importance_correction masked, and that is {correction}")
        if cap is not None and floor > cap:
            raise ValueError(f"importance_weight_floor ({floor}) is above importance_weight_cap ({cap})")
        return self

    @property
    def wants_trainer_proximal(self) -> bool:
        """Whether the proximal policy is the trainer's at the start of the step; with the engine's, every weight would be 1."""
        return self.importance_correction is not ImportanceCorrection.NONE

    @property
    def groups_per_step(self) -> int:
        """Groups that one optimizer step consumes (B)."""
        return self.filter_groups_train_batch_size
