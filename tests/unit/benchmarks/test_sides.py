"""Ratios of each side with the other idle, from times and counts that are given."""

from __future__ import annotations

import pytest

from benchmarks.sides import JUDGED, Sampled, quantile, report_sampling, report_training


def test_each_step_is_divided_by_the_time_of_its_own_batch(capsys: pytest.CaptureFixture[str]) -> None:
    beside, alone = {1: 9.0, 2: 0.2, 3: 0.3, 4: 1.2}, {1: 1.0, 2: 0.1, 3: 0.1, 4: 0.2}
    report_training(beside, alone, skipped=1)
    printed = capsys.readouterr().out
    assert "steps 2 to 4" in printed
    assert "ratio of a step: median 3.00 (tenths: 2.00 to 6.00); of all steps together 4.25" in printed


def test_a_step_that_was_not_trained_again_ends_the_measurement() -> None:
    with pytest.raises(SystemExit, match=r"\[2\]"):
        report_training({1: 1.0, 2: 1.0}, {1: 1.0}, skipped=0)


def test_the_rollout_sides_rate_counts_samples_not_groups(capsys: pytest.CaptureFixture[str]) -> None:
    report_sampling(Sampled(30, 10.0, {}, {("engine", 1): 6.0}), group_size=8, alone=30.0)
    printed = capsys.readouterr().out
    assert "ratio 0.80" in printed
    assert "200.00" in printed  # milliseconds a group


def test_only_groups_with_verdicts_are_counted() -> None:
    page = (
        'millrace_reward_groups_total{result="judged"} 1.2e+04\nmillrace_reward_groups_total{result="passed_on"} 3.0\n'
    )
    assert [float(found) for found in JUDGED.findall(page)] == [12000.0]


@pytest.mark.parametrize(("share", "value"), [(0.1, 1.0), (0.5, 3.0), (0.9, 5.0)])
def test_a_quantile_is_one_of_the_values(share: float, value: float) -> None:
    assert quantile([5.0, 1.0, 4.0, 2.0, 3.0], share) == value
