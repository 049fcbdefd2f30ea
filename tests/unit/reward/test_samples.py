"""Samples are for people: as many as are kept come at once, and then no more than people read."""

from __future__ import annotations

from services.reward.samples import MAX_SAMPLES, SAMPLES_PER_S, SampleBudget


class Clock:
    """Time that passes as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(budget: SampleBudget, tries: int) -> int:
    return sum(budget.take() for _ in range(tries))


def test_a_burst_of_as_many_as_are_kept_is_kept_whole_and_no_more() -> None:
    assert taken(SampleBudget(Clock()), 3 * MAX_SAMPLES) == MAX_SAMPLES


def test_the_right_comes_back_with_time_up_to_what_is_kept() -> None:
    clock = Clock()
    budget = SampleBudget(clock)
    taken(budget, MAX_SAMPLES)
    clock.now += 2.0
    assert taken(budget, 1000) == 2 * SAMPLES_PER_S
    clock.now += 1e6
    assert taken(budget, 1000) == MAX_SAMPLES


def test_groups_that_come_slowly_are_all_kept() -> None:
    clock = Clock()
    budget = SampleBudget(clock)
    for _ in range(5 * MAX_SAMPLES):
        clock.now += 1.0 / SAMPLES_PER_S
        assert budget.take()
