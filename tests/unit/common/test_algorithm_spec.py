"""Settings of the objective that do not fit are refused with the field's name; those that do reach the loss from a job's YAML."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.common.errors import ConfigError
from services.common.spec import AlgorithmSpec, ImportanceCorrection, KlEstimator, LossName, parse_spec

JOB = "model: {path: tiny}\ndata: {train: {source: tasks.jsonl}}\nalgorithm: "


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("clip_ratio_low", {"clip_ratio_low": 1.0}),
        ("clip_ratio_low", {"clip_ratio_low": float("nan")}),
        ("clip_ratio_high", {"clip_ratio_high": -0.1}),
        ("clip_ratio_high", {"clip_ratio_high": float("inf")}),
        ("proximal_kl_coefficient", {"proximal_kl_coefficient": -1.0}),
        ("proximal_kl_coefficient", {"proximal_kl_coefficient": float("inf")}),
        ("proximal_kl_estimator", {"proximal_kl_estimator": "k4"}),
        ("dual_clip", {"dual_clip": 1.0}),
        ("dual_clip", {"dual_clip": float("inf")}),
        ("dual_clip", {"dual_clip": 3.0, "loss": "cispo"}),
        ("constant_length", {"constant_length": 0, "token_level_loss": False}),
        ("constant_length.*token_level_loss", {"constant_length": 8}),
        ("loss gspo.*token_level_loss", {"loss": "gspo"}),
        ("importance_correction", {"importance_correction": "capped"}),
        ("importance_weight_cap", {"importance_weight_cap": 2.0}),
        ("importance_weight_cap", {"importance_correction": "decoupled", "importance_weight_cap": 2.0}),
        ("importance_weight_cap", {"importance_correction": "truncated"}),
        ("importance_weight_cap", {"importance_correction": "masked"}),
        ("importance_weight_cap", {"importance_correction": "masked", "importance_weight_cap": 0.0}),
        (
            "importance_weight_floor",
            {"importance_correction": "masked", "importance_weight_cap": 2.0, "importance_weight_floor": 3.0},
        ),
        (
            "importance_weight_floor",
            {"importance_correction": "masked", "importance_weight_cap": 2.0, "importance_weight_floor": -0.1},
        ),
        (
            "importance_weight_floor",
            {"importance_correction": "truncated", "importance_weight_cap": 2.0, "importance_weight_floor": 0.5},
        ),
    ],
)
def test_a_setting_that_does_not_fit_is_named(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=field):
        AlgorithmSpec.model_validate(values)


def test_the_defaults_are_dapos_without_correction_or_penalty() -> None:
    spec = AlgorithmSpec()
    assert (spec.loss, spec.clip_ratio_low, spec.clip_ratio_high, spec.token_level_loss) == (
        LossName.DAPO, 0.2, 0.28, True,
    )  # fmt: skip
    assert (spec.dual_clip, spec.constant_length, spec.importance_weight_cap) == (None, None, None)
    assert spec.importance_correction is ImportanceCorrection.NONE
    assert spec.proximal_kl_coefficient == 0.0


def test_a_job_sets_every_part_of_the_objective() -> None:
    spec = parse_spec(
        JOB + "{token_level_loss: false, constant_length: 512, dual_clip: 3, importance_correction: masked, "
        "importance_weight_floor: 0.5, importance_weight_cap: 2, proximal_kl_coefficient: 0.01, proximal_kl_estimator: k2}"
    ).algorithm
    assert (spec.token_level_loss, spec.constant_length, spec.dual_clip) == (False, 512, 3.0)
    assert (spec.importance_weight_floor, spec.importance_weight_cap) == (0.5, 2.0)
    assert spec.importance_correction is ImportanceCorrection.MASKED
    assert (spec.proximal_kl_coefficient, spec.proximal_kl_estimator) == (0.01, KlEstimator.K2)


def test_a_job_that_does_not_fit_is_told_the_section_and_the_field() -> None:
    with pytest.raises(ConfigError, match=r"^algorithm: .*importance_weight_cap needs importance_correction"):
        parse_spec(JOB + "{importance_weight_cap: 2}")


@pytest.mark.parametrize(
    ("correction", "cap"), [("none", None), ("decoupled", None), ("truncated", 2.0), ("masked", 2.0)]
)
def test_every_correction_wants_the_trainers_proximal_policy(correction: str, cap: float | None) -> None:
    spec = AlgorithmSpec.model_validate({"importance_correction": correction, "importance_weight_cap": cap})
    assert spec.wants_trainer_proximal is (correction != "none")
