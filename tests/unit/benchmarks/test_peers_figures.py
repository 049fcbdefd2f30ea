"""Figures of the comparison with peers, from steps that are given."""

from __future__ import annotations

import pytest

from benchmarks.peers.figures import (
    Learning,
    Plan,
    Run,
    Spread,
    Step,
    informative_per_s,
    informative_samples,
    is_measured,
    samples_per_s,
    smooth,
    step_s,
    time_to,
)


def steps_at(ends: list[float], rewards: list[float] | None = None) -> tuple[Step, ...]:
    given = rewards or [0.0] * len(ends)
    return tuple(Step(at, samples=10, informative=4, reward=reward) for at, reward in zip(ends, given, strict=True))


def test_only_the_steps_and_the_time_after_the_warm_up_count() -> None:
    run = Run(steps_at([100.0, 130.0, 132.0, 134.0, 138.0]), peak_bytes=1, started=50.0)
    assert samples_per_s(run, warm_up=2) == pytest.approx(30 / 8)
    assert informative_per_s(run, warm_up=2) == pytest.approx(12 / 8)
    assert step_s(run, warm_up=2) == pytest.approx(8 / 3)


@pytest.mark.parametrize("warm_up", [0, 3, 4])
def test_a_run_without_a_measured_step_is_refused(warm_up: int) -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        samples_per_s(Run(steps_at([1.0, 2.0, 3.0]), 1, 0.0), warm_up)


def test_a_group_whose_accuracies_are_equal_is_not_informative() -> None:
    assert informative_samples([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], 2) == 2
    assert informative_samples([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], 3) == 6


def test_the_smoothed_reward_is_the_mean_of_the_last_steps() -> None:
    assert smooth([0.0, 1.0, 0.5, 0.3], 2) == pytest.approx([0.5, 0.75, 0.4])
    assert smooth([1.0], 2) == []


def test_a_single_high_step_does_not_reach_the_threshold() -> None:
    steps = steps_at([10.0, 12.0, 14.0, 16.0, 18.0], [0.0, 0.9, 0.0, 0.5, 0.5])
    assert time_to(steps, Learning(0.5, 2, 60.0)) == pytest.approx(8.0)
    assert time_to(steps, Learning(0.8, 2, 60.0)) is None
    assert time_to(steps[:1], Learning(0.0, 2, 60.0)) is None


def test_a_run_ends_after_its_steps_and_its_time() -> None:
    plan = Plan(warm_up=1, least=2, seconds=5.0)
    assert not is_measured([], plan)
    assert not is_measured(steps_at([0.0, 9.0]), plan)
    assert not is_measured(steps_at([0.0, 2.0, 4.0]), plan)
    assert is_measured(steps_at([0.0, 2.0, 5.0]), plan)


def test_a_run_that_learns_goes_on_until_the_threshold_or_its_limit() -> None:
    plan = Plan(warm_up=1, least=1, seconds=1.0, learning=Learning(0.5, 1, limit_s=20.0))
    assert not is_measured(steps_at([0.0, 2.0], [0.1, 0.4]), plan)
    assert is_measured(steps_at([0.0, 2.0], [0.1, 0.5]), plan)
    assert is_measured(steps_at([0.0, 20.0], [0.1, 0.4]), plan)


def test_a_spread_is_the_median_with_both_ends() -> None:
    assert Spread.of([3.0, 1.0, 9.0]) == Spread(3.0, 1.0, 9.0)
