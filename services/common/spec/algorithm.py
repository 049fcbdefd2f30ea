"""Section `algorithm`: the objective and the filter of groups, under the names of Ascend tooling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, ValidationInfo, model_validator

from services.common.spec.base import RECORDED, Section
from services.common.spec.choices import (
    AdvantageEstimator,
    FilterMetric,
    ImportanceCorrection,
    ImportanceLevel,
    KlEstimator,
    KlPlacement,
    LossName,
    Preset,
    ProximalPolicy,
    TurnCredit,
)
from services.common.spec.presets import GSPO_CLIPS, PRESETS

FIRST_REVISION = 1
"""Revision of a recorded spec that names none."""
CURRENT_REVISION = 2
"""Revision of a new job."""
InstalledName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")]
"""Name of a function that an installed package offers (services/learner/algorithms/plugins.py)."""


class AlgorithmSpec(Section):
    """Section `algorithm`; the defaults are DAPO's (arXiv 2503.14476)."""

    preset: Preset | None = Field(
        default=None,
        strict=False,
        description="A published algorithm, whose values replace the defaults of this section; a field that is set wins. Off when null.",
    )
    advantage_estimator: Annotated[AdvantageEstimator, Field(strict=False)] | InstalledName = Field(
        default=AdvantageEstimator.GRPO,
        union_mode="left_to_right",
        description="Advantage of a response's tokens, from rewards and, for gae, values; or the name of an installed estimator.",
    )
    gamma: float = Field(
        default=1.0, ge=0.0, le=1.0, description="Discount γ of gae and reinforce_plus_plus, per token."
    )
    lam: float = Field(default=1.0, ge=0.0, le=1.0, description="λ of gae.")
    advantage_clip: float | None = Field(
        default=None, gt=0.0, description="Advantages are clipped to ± this before the loss. Off when null."
    )
    turn_credit: TurnCredit = Field(
        default=TurnCredit.TRAJECTORY,
        strict=False,
        description="Of episodes: trajectory, all turns have the advantage of the whole reward; turn, each has that of the rewards from "
        "it on, which the environment gives turn by turn and which are compared with those of all turns of the group (grpo alone).",
    )
    loss: Annotated[LossName, Field(strict=False)] | InstalledName = Field(
        default=LossName.DAPO,
        union_mode="left_to_right",
        description="Token loss; dapo is PPO's clipped surrogate with two clips. Or the name of an installed one.",
    )
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
    proximal_policy: ProximalPolicy = Field(
        default=ProximalPolicy.INFERENCE,
        strict=False,
        description="Policy π_prox that the loss's ratio π_trainer / π_prox is relative to: inference, the engine's that sampled; trainer, "
        "the trainer's at the start of the step; interpolated, between the two by policy versions. Default inference; with an "
        "importance_correction trainer.",
    )
    importance_correction: ImportanceCorrection = Field(
        default=ImportanceCorrection.NONE,
        strict=False,
        description="Weight of a token's loss, made of w = π_prox / π_inference: none is 1, decoupled is w, truncated is w up to the cap, "
        "masked is w between floor and cap, else 0, m2po is w without the tokens that are furthest off. With one optimizer step per batch "
        "and proximal_policy trainer, π_trainer / π_prox is 1: no clip acts and the proximal KL is 0.",
    )
    importance_level: ImportanceLevel = Field(
        default=ImportanceLevel.TOKEN,
        strict=False,
        description="What w is: the token's ratio, the product over its sequence, or their geometric mean.",
    )
    importance_m2_threshold: float | None = Field(
        default=None,
        gt=0.0,
        description="Bound on the mean of (log w)² over the tokens that importance_correction m2po keeps (0.04 in its paper): set exactly "
        "with it.",
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
    kl_coefficient: float = Field(
        default=0.0,
        ge=0.0,
        description="β of the KL to the reference model: times the estimate of KL(π_trainer ‖ π_ref). Needs section reference.",
    )
    kl_placement: KlPlacement = Field(
        default=KlPlacement.LOSS,
        strict=False,
        description="Where it acts: added to each token's loss, or subtracted from each token's reward.",
    )
    kl_estimator: KlEstimator = Field(
        default=KlEstimator.K3,
        strict=False,
        description="Estimate of that KL from a token. In the loss k1 has a gradient of mean 0: k2 or k3 there.",
    )
    kl_target: float | None = Field(
        default=None,
        gt=0.0,
        description="Adaptive coefficient (arXiv 1909.08593): β grows while the KL is above this target and falls while it is below. "
        "Constant when null.",
    )
    kl_horizon: int = Field(
        default=10_000,
        ge=1,
        description="Responses over which an adaptive β changes by as much as the KL is off, at most 20 %.",
    )
    entropy_coefficient: float = Field(
        default=0.0, ge=0.0, description="Entropy bonus: times a token's entropy, nats, subtracted from its loss."
    )
    mask_truncated: bool = Field(
        default=False,
        description="Responses that were cut by a length limit give no loss; their rewards still count in the group.",
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
        """Fills in the preset's values, the revision of a recorded spec that names none, and defaults that depend on other fields."""
        if not isinstance(given, Mapping):
            return given
        values = ({"revision": FIRST_REVISION} if info.context is RECORDED else {}) | dict(given)
        implied: dict[str, Any] = {}
        if values.get("loss") == LossName.GSPO and values.get("revision") != FIRST_REVISION:
            implied |= GSPO_CLIPS
        if values.get("importance_correction", ImportanceCorrection.NONE) != ImportanceCorrection.NONE:
            implied["proximal_policy"] = ProximalPolicy.TRAINER
        return dict(_preset_values(values.get("preset"))) | implied | values

    @model_validator(mode="after")
    def _loss_and_mean_agree(self) -> Self:
        if self.loss == LossName.GSPO and self.token_level_loss:
            raise ValueError("loss gspo is a mean over sequences: set token_level_loss to false")
        if self.loss == LossName.CISPO and self.dual_clip is not None:
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

    @model_validator(mode="after")
    def _importance_parts_agree(self) -> Self:
        correction, level = self.importance_correction, self.importance_level
        if correction is not ImportanceCorrection.NONE and self.proximal_policy is ProximalPolicy.INFERENCE:
            raise ValueError(
                f"importance_correction {correction} needs proximal_policy trainer or interpolated: every weight would be 1"
            )
        if level is not ImportanceLevel.TOKEN and not (
            correction.bounded or correction is ImportanceCorrection.DECOUPLED
        ):
            raise ValueError(f"importance_level {level} has no meaning for importance_correction {correction}")
        m2po = correction is ImportanceCorrection.M2PO
        if m2po and self.importance_m2_threshold is None:
            raise ValueError("importance_correction m2po needs importance_m2_threshold (0.04 in its paper)")
        if not m2po and self.importance_m2_threshold is not None:
            raise ValueError(f"importance_m2_threshold needs importance_correction m2po, and that is {correction}")
        if m2po and self.loss not in {LossName.DAPO, LossName.SURROGATE}:
            raise ValueError(
                f"importance_correction m2po has no meaning for loss {self.loss}: it masks tokens of dapo or surrogate"
            )
        if m2po and self.proximal_policy is not ProximalPolicy.TRAINER:
            raise ValueError(
                f"importance_correction m2po needs proximal_policy trainer, and that is {self.proximal_policy}"
            )
        return self

    @model_validator(mode="after")
    def _turns_have_an_estimator(self) -> Self:
        if self.turn_credit is TurnCredit.TURN and (
            self.advantage_estimator != AdvantageEstimator.GRPO or self.kl_in_reward
        ):
            raise ValueError("turn_credit turn needs advantage_estimator grpo, without a KL in the reward")
        return self

    @model_validator(mode="after")
    def _kl_parts_agree(self) -> Self:
        if self.kl_target is not None and self.kl_coefficient == 0.0:
            raise ValueError("kl_target adapts kl_coefficient, which is 0: set where it begins")
        return self

    @property
    def wants_reference(self) -> bool:
        """Whether a step needs the reference's log-probs."""
        return self.kl_coefficient > 0.0

    @property
    def kl_in_reward(self) -> bool:
        """Whether rewards of tokens are lowered by their KL to the reference."""
        return self.wants_reference and self.kl_placement is KlPlacement.REWARD

    @property
    def compares_group(self) -> bool:
        """Whether a group of one rollout carries no advantage. An installed estimator decides for itself."""
        estimator = self.advantage_estimator
        return isinstance(estimator, AdvantageEstimator) and estimator.compares_group

    @property
    def groups_per_step(self) -> int:
        """Groups that one optimizer step consumes (B)."""
        return self.filter_groups_train_batch_size


def _preset_values(name: object) -> Mapping[str, Any]:
    """The values of the preset of that name; none for a name that its field will refuse."""
    return next((values for preset, values in PRESETS.items() if preset == name), {})
