"""Settings that do not fit are refused with the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.spec import AlgorithmSpec, LossName
from services.learner.algorithms.loss_settings import ImportanceCorrection, LossSettings


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("clip_ratio_low", {"clip_ratio_low": 1.0}),
        ("clip_ratio_low", {"clip_ratio_low": float("nan")}),
        ("clip_ratio_high", {"clip_ratio_high": -0.1}),
        ("kl_coefficient", {"kl_coefficient": -1.0}),
        ("dual_clip", {"dual_clip": 1.0}),
        ("dual_clip", {"dual_clip": 3.0, "loss": LossName.CISPO}),
        ("constant_length", {"constant_length": 0, "token_level_loss": False}),
        ("token_level_loss", {"constant_length": 8}),
        ("token_level_loss", {"loss": LossName.GSPO}),
        ("importance_weight_cap", {"importance_weight_cap": 2.0}),
        ("importance_weight_cap", {"importance_correction": ImportanceCorrection.TRUNCATED}),
        ("importance_weight_cap", {"importance_correction": ImportanceCorrection.MASKED, "importance_weight_cap": 0.0}),
        (
            "importance_weight_floor",
            {
                "importance_correction": ImportanceCorrection.MASKED,
                "importance_weight_cap": 2.0,
                "importance_weight_floor": 3.0,
            },
        ),
        (
            "importance_weight_floor",
            {
                "importance_correction": ImportanceCorrection.TRUNCATED,
                "importance_weight_cap": 2.0,
                "importance_weight_floor": 0.5,
            },
        ),
    ],
)
def test_a_setting_that_does_not_fit_is_named(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=field):
        LossSettings(**values)


def test_the_specs_defaults_are_the_settings_defaults() -> None:
    assert LossSettings.from_spec(AlgorithmSpec()) == LossSettings()


def test_a_cap_in_the_spec_means_truncated_importance_sampling_from_the_trainers_proximal() -> None:
    settings = LossSettings.from_spec(
        AlgorithmSpec(importance_weight_cap=2.0, clip_ratio_high=0.3, token_level_loss=False)
    )
    assert settings.importance_correction is ImportanceCorrection.TRUNCATED
    assert (settings.importance_weight_cap, settings.clip_ratio_high, settings.token_level_loss) == (2.0, 0.3, False)
    assert settings.wants_trainer_proximal
    assert not LossSettings().wants_trainer_proximal
