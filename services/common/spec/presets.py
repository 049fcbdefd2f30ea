"""Presets of section `algorithm`: the fields in which a published algorithm differs from the section's defaults.

A field that the job sets itself wins. The resolved section is what a job records, so a preset that changes later changes no recorded job.
Formulas and papers: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.spec.choices import AdvantageEstimator, KlEstimator, KlPlacement, LossName, Preset

GSPO_CLIPS = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
"""Clips of the sequence's ratio (arXiv 2507.18071), which never reaches the usual bounds of a token's ratio."""
_SYMMETRIC = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
"""PPO's clips (arXiv 1707.06347)."""
_EVERY_GROUP = {"filter_groups_enable": False}
_KL_IN_REWARD = {"kl_placement": KlPlacement.REWARD, "kl_estimator": KlEstimator.K1}
_CONSTANT = {"token_level_loss": False}
"""With `constant_length`, which a job's `rollout.rollout_max_tokens` gives (JobSpec): sums over tokens, the same scale for every length."""

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    Preset.DAPO: {},
    Preset.GRPO: {
        **_SYMMETRIC, **_EVERY_GROUP, "token_level_loss": False, "kl_coefficient": 0.04, "kl_estimator": KlEstimator.K3,
    },
    Preset.DR_GRPO: {
        **_SYMMETRIC, **_EVERY_GROUP, **_CONSTANT, "advantage_estimator": AdvantageEstimator.DR_GRPO,
    },
    Preset.RLOO: {
        **_SYMMETRIC, **_EVERY_GROUP, **_CONSTANT, **_KL_IN_REWARD, "kl_coefficient": 0.05,
        "advantage_estimator": AdvantageEstimator.RLOO,
    },
    Preset.REINFORCE_PLUS_PLUS: {
        **_SYMMETRIC, **_EVERY_GROUP, **_KL_IN_REWARD, "kl_coefficient": 0.01,
        "advantage_estimator": AdvantageEstimator.REINFORCE_PLUS_PLUS,
    },
    Preset.REINFORCE_PLUS_PLUS_BASELINE: {
        **_SYMMETRIC, **_EVERY_GROUP, "kl_coefficient": 1e-3, "kl_estimator": KlEstimator.K2,
        "advantage_estimator": AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE,
    },
    Preset.GSPO: {**GSPO_CLIPS, **_EVERY_GROUP, "loss": LossName.GSPO, "token_level_loss": False},
    Preset.CISPO: {"loss": LossName.CISPO},
    Preset.PPO: {
        **_SYMMETRIC, **_EVERY_GROUP, **_KL_IN_REWARD, "kl_coefficient": 1e-3, "advantage_estimator": AdvantageEstimator.GAE,
        "lam": 0.95,
    },
}  # fmt: skip
DIVIDE_BY_LONGEST = frozenset({Preset.DR_GRPO, Preset.RLOO})
"""Presets whose `constant_length` is the job's longest response."""
