"""Section `algorithm`: the objective and the choice of groups, under the names that users of Ascend tooling know."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from services.common.spec.base import Section


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


class AlgorithmSpec(Section):
    """Section `algorithm`; the defaults are DAPO's (arXiv 2503.14476)."""

    advantage_estimator: AdvantageEstimator = Field(
        default=AdvantageEstimator.GRPO, description="Advantage of a rollout within its group."
    )
    loss: LossName = Field(default=LossName.DAPO, description="Token loss.")
    clip_ratio_low: float = Field(default=0.2, ge=0.0, lt=1.0, description="Ratio is clipped below 1 − this.")
    clip_ratio_high: float = Field(
        default=0.28, ge=0.0, le=10.0, description="Ratio is clipped above 1 + this (clip-higher)."
    )
    token_level_loss: bool = Field(
        default=True, description="Mean over all response tokens of the global batch; else mean of sequence means."
    )
    importance_weight_cap: float | None = Field(
        default=None,
        gt=0.0,
        description="Truncated importance sampling: caps the trainer/engine ratio of a token's weight. Off when null.",
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
        default=FilterMetric.ACCURACY, description="What must differ within a group."
    )
    filter_groups_max_batches: int = Field(
        default=20,
        ge=1,
        le=10_000,
        description="Most batches of groups judged for one step; then it trains on what it has, and says so.",
    )
    filter_groups_train_batch_size: int = Field(
        default=64, ge=1, le=65_536, description="Informative groups that one step trains (groups_per_step)."
    )

    @model_validator(mode="after")
    def _loss_and_mean_agree(self) -> Self:
        if self.loss is LossName.GSPO and self.token_level_loss:
            raise ValueError("loss gspo is a mean over sequences: set token_level_loss to false")
        return self

    @property
    def groups_per_step(self) -> int:
        """Groups that one optimizer step consumes (B)."""
        return self.filter_groups_train_batch_size
