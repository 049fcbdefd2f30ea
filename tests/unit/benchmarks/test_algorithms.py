"""The benchmark of algorithms: its jobs are valid, its tables say what the histories say, and its sections have a place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.algorithms.figures import Outcome
from benchmarks.algorithms.jobs import AGES, CORRECTIONS, PRESET_CHANGES, aged_job, preset_job
from benchmarks.algorithms.table import UNKNOWN, age_section, preset_section
from benchmarks.peers.table import put_between
from services.common.spec.choices import ImportanceCorrection, Preset
from services.common.spec.job import JobSpec

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs/algorithms.md").read_text()
MODEL = Path("/models/tiny")


def step(number: int, **figures: Any) -> dict[str, Any]:
    at = {"step": number, "at": 100.0 + 2.0 * number, "step_s": 1.5, "reward": 0.1 * number, "policy_age_mean": 1.0}
    return at | figures


def outcome(*steps: dict[str, Any], after: float | None = 0.75, state: str = "succeeded", cause: str = "") -> Outcome:
    evals = [{"step": 0, "avg_at_k": 0.5}] + ([] if after is None else [{"step": len(steps), "avg_at_k": after}])
    return Outcome(state, cause, steps, evals)


def cells(lines: list[str], start: str) -> list[str]:
    [line] = [line for line in lines if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("preset", list(Preset))
def test_every_preset_has_a_valid_job_with_a_reference_to_measure(preset: Preset) -> None:
    spec = JobSpec.model_validate(preset_job(preset, MODEL, ("learner.steps=7",)))
    assert (spec.algorithm.preset, spec.learner.steps, spec.model.path) == (preset, 7, str(MODEL))
    assert spec.reference is not None
    assert (spec.critic is not None) is (spec.algorithm.advantage_estimator == "gae")
    assert spec.eval.enabled
    assert set(PRESET_CHANGES) == set(Preset)


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("correction", list(CORRECTIONS))
def test_every_age_has_a_valid_job_with_each_correction(age: int, correction: ImportanceCorrection) -> None:
    spec = JobSpec.model_validate(aged_job(age, correction, MODEL))
    assert (spec.off_policy.max_off_policy_steps, spec.algorithm.importance_correction) == (age, correction)
    assert spec.algorithm.importance_weight_cap == (None if correction is ImportanceCorrection.NONE else 2.0)
    assert spec.algorithm.filter_groups_enable, "DAPO's"


def test_a_row_has_the_gain_and_the_means_of_the_last_steps() -> None:
    early = [step(n, reference_kl=9.0, entropy=9.0) for n in range(1, 4)]
    late = [step(n, reference_kl=0.5, entropy=1.25) for n in range(4, 14)]
    lines = preset_section("head", {Preset.DAPO: outcome(*early, *late)})
    assert cells(lines, "`dapo`") == ["`dapo`", "13", "26", "0.500 → 0.750", "+0.250", "0.5000", "1.250", UNKNOWN]
    heads = [line for line in lines if line.startswith("| preset")]
    assert heads[0].count("|") == len(cells(lines, "`dapo`")) + 1, "a head for every cell"


def test_a_job_that_failed_has_no_gain_and_says_why() -> None:
    failed = outcome(step(1), after=0.6, state="failed", cause="rank 0 died")
    lines = preset_section("head", {Preset.PPO: failed, Preset.GRPO: outcome(after=None, state="cancelled")})
    assert cells(lines, "`ppo`")[3:5] == ["0.500 → –", UNKNOWN]
    assert cells(lines, "`grpo`")[1:5] == ["0", UNKNOWN, "0.500 → –", UNKNOWN]
    assert "ppo: failed: rank 0 died" in lines
    assert "grpo: cancelled: no cause" in lines


def test_the_study_has_a_row_for_each_age_and_correction_and_its_curves() -> None:
    masked = outcome(step(1, mismatch_kl_k3=0.02, importance_weight=1.5), step(2, mismatch_kl_k3=0.04), after=0.4)
    outcomes = {(0, ImportanceCorrection.NONE): outcome(step(1)), (8, ImportanceCorrection.TRUNCATED): masked}
    lines = age_section("head", outcomes, "images/off-policy.svg")
    assert cells(lines, "8") == [
        "8", "`truncated`", "1.00", "2", "4", "0.500 → 0.400", "-0.100", "0.0300", "1.500",
    ]  # fmt: skip
    assert cells(lines, "0")[-2:] == [UNKNOWN, UNKNOWN]
    assert sum("images/off-policy.svg" in line for line in lines) == 1
    assert not [line for line in age_section("head", outcomes, None) if "svg" in line]


def test_the_time_of_steps_begins_with_the_first_request_for_a_batch() -> None:
    assert outcome(step(1), step(2)).times() == [1.5, 3.5]
    assert outcome().times() == []
    assert outcome().seconds is None


@pytest.mark.parametrize("mark", ["algorithms", "off-policy"])
def test_the_document_has_a_place_for_each_section_and_the_rest_stays(mark: str) -> None:
    once = put_between(DOCUMENT, ["new"], mark)
    assert put_between(once, ["new"], mark) == once
    for other in {"algorithms", "off-policy"} - {mark}:
        assert put_between(once, [], other) != once
    assert once.startswith(DOCUMENT[: DOCUMENT.index(f"<!-- {mark} -->")])


def test_the_curves_are_the_same_file_for_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.algorithms.curves import draw_ages

    steps = [step(n) for n in range(1, 30)]
    outcomes = {(age, correction): outcome(*steps, step(30, reward=None)) for age in AGES for correction in CORRECTIONS}
    for name in ("a", "b"):
        draw_ages(tmp_path / name / "curves.svg", outcomes)
    first = (tmp_path / "a/curves.svg").read_text()
    assert first == (tmp_path / "b/curves.svg").read_text()
    assert all(f"age ≤ {age}, {correction}" in first for age in AGES for correction in CORRECTIONS)
