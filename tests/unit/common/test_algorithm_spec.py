"""Settings of the objective that do not fit are refused with the field's name; those that do reach the loss from a job's YAML."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.errors import ConfigError
from services.common.jobs.record import JobRecord, JobState, from_hash, to_hash
from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import ImportanceCorrection, KlEstimator, LossName, ProximalPolicy
from services.common.spec.job import dump_spec, parse_recorded_spec, parse_spec

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


MASKED = {"importance_correction": "masked", "importance_weight_cap": 2.0}
M2PO = {"importance_correction": "m2po", "importance_m2_threshold": 0.04}


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"loss": "gspo", "token_level_loss": True}, ("loss gspo", "token_level_loss")),
        ({"loss": "cispo", "dual_clip": 3.0}, ("loss cispo", "dual_clip")),
        ({"constant_length": 8}, ("constant_length", "token_level_loss")),
        ({"importance_correction": "truncated"}, ("importance_correction truncated", "importance_weight_cap")),
        ({"importance_correction": "masked"}, ("importance_correction masked", "importance_weight_cap")),
        ({"importance_weight_cap": 2.0}, ("importance_weight_cap", "importance_correction")),
        ({**M2PO, "importance_weight_cap": 2.0}, ("importance_weight_cap", "importance_correction")),
        ({"importance_weight_floor": 0.5}, ("importance_weight_floor", "importance_correction")),
        ({**MASKED, "importance_weight_floor": 3.0}, ("importance_weight_floor", "importance_weight_cap")),
        (
            {"importance_correction": "decoupled", "proximal_policy": "inference"},
            ("importance_correction decoupled", "proximal_policy"),
        ),
        ({"importance_level": "sequence"}, ("importance_level sequence", "importance_correction none")),
        ({**M2PO, "importance_level": "geometric"}, ("importance_level geometric", "importance_correction m2po")),
        ({"importance_correction": "m2po"}, ("importance_correction m2po", "importance_m2_threshold")),
        ({"importance_m2_threshold": 0.04}, ("importance_m2_threshold", "importance_correction")),
        ({**M2PO, "loss": "cispo"}, ("importance_correction m2po", "loss cispo")),
        ({**M2PO, "loss": "gspo", "token_level_loss": False}, ("importance_correction m2po", "loss gspo")),
        ({**M2PO, "loss": "installed"}, ("importance_correction m2po", "loss installed")),
        ({**M2PO, "proximal_policy": "interpolated"}, ("importance_correction m2po", "proximal_policy")),
        ({"kl_target": 0.1}, ("kl_target", "kl_coefficient")),
    ],
)
def test_an_impossible_combination_names_both_fields(values: dict[str, Any], fields: tuple[str, str]) -> None:
    with pytest.raises(ValidationError) as caught:
        AlgorithmSpec.model_validate(values)
    [problem] = caught.value.errors()
    assert all(field in problem["msg"] for field in fields), problem["msg"]


@pytest.mark.parametrize("field", ["loss", "advantage_estimator"])
@pytest.mark.parametrize("value", ["Not A Name", "", 3, None, ["dapo"]])
def test_a_name_that_no_function_can_have_is_a_problem_of_its_field_alone(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(JOB + json.dumps({field: value}))
    assert {problem.field for problem in caught.value.problems} == {f"algorithm.{field}"}


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
    assert (spec.proximal_policy is ProximalPolicy.TRAINER) is (correction != "none")


GSPO = JOB + "{loss: gspo, token_level_loss: false}"
RECORDED = JOB + "{loss: gspo, token_level_loss: false, clip_ratio_low: 0.2, clip_ratio_high: 0.28, dual_clip: null}"
"""As a release before the revision wrote it down: every default that it knew."""


def test_gspo_has_the_clips_of_its_paper_unless_a_job_sets_its_own() -> None:
    spec = parse_spec(GSPO).algorithm
    assert (spec.clip_ratio_low, spec.clip_ratio_high) == (3e-4, 4e-4)
    own = AlgorithmSpec(loss=LossName.GSPO, token_level_loss=False, clip_ratio_high=0.01)
    assert (own.clip_ratio_low, own.clip_ratio_high) == (3e-4, 0.01)
    assert AlgorithmSpec(loss=LossName.CISPO).clip_ratio_high == 0.28


def test_what_is_written_out_says_clips_and_revision_and_reads_back_the_same() -> None:
    written = dump_spec(parse_spec(GSPO))
    assert "clip_ratio_low: 0.0003" in written
    assert "revision: 2" in written
    assert parse_recorded_spec(written) == parse_spec(GSPO)


def test_a_spec_that_was_recorded_before_there_were_revisions_keeps_its_mathematics() -> None:
    spec = parse_recorded_spec(RECORDED).algorithm
    assert (spec.revision, spec.clip_ratio_low, spec.clip_ratio_high) == (1, 0.2, 0.28)
    assert parse_spec(RECORDED).algorithm.revision == 2
    assert parse_recorded_spec(GSPO).algorithm.clip_ratio_high == 0.28, "the default then"


def test_a_record_in_redis_of_an_earlier_release_keeps_its_mathematics_too() -> None:
    record = JobRecord(
        "demo-1", "demo", JobState.RUNNING, "", 1.0, None, None, None, 1, 0, 10, 0, False, False, {}, None, parse_spec(GSPO)
    )  # fmt: skip
    assert from_hash("demo-1", to_hash(record)).spec == record.spec
    spec = json.loads(to_hash(record)["spec"])
    spec["algorithm"] = {"loss": "gspo", "token_level_loss": False, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    algorithm = from_hash("demo-1", to_hash(record) | {"spec": json.dumps(spec)}).spec.algorithm
    assert (algorithm.revision, algorithm.clip_ratio_high) == (1, 0.28)


def test_what_is_wrong_with_a_recorded_spec_is_said_as_of_any_other() -> None:
    with pytest.raises(ConfigError, match="algorithm"):
        parse_recorded_spec(JOB + "[1]")
    with pytest.raises(ConfigError, match=r"algorithm\.revision"):
        parse_spec(JOB + "{revision: 3}")
