"""A run of failed groups: it slows the issuing down, and ends the job within a bound of groups and of time."""

from __future__ import annotations

import itertools

import pytest

from services.learner.groups.failures import LONG_RUN_S, MIN_FAILURES, MIN_RUN_S, SPREAD_S, STALLED_S, FailureRun

SLOTS = (1, 8, 192, 6144)


class Clock:
    """Seconds that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def failed(run: FailureRun, count: int) -> None:
    for _ in range(count):
        run.add("boom")


def test_the_pause_grows_with_the_run_up_to_a_bound_and_is_gone_with_a_good_group() -> None:
    run = FailureRun(slots=2)
    assert run.pause_s == 0.0
    pauses = []
    for _ in range(1000):
        run.add("boom")
        pauses.append(run.pause_s)
    assert all(a <= b for a, b in itertools.pairwise(pauses))
    assert 0.0 < pauses[0] < 0.02
    assert pauses[-1] == SPREAD_S / MIN_FAILURES
    run.clear()
    assert run.pause_s == 0.0
    run.add("boom")
    assert run.pause_s == pauses[0]


@pytest.mark.parametrize("slots", SLOTS)
def test_a_job_whose_every_group_fails_at_once_is_stalled_and_then_hopeless_within_two_minutes(slots: int) -> None:
    clock = Clock()
    run, began, stalled_at = FailureRun(slots, clock), clock.now, None
    failed(run, slots)  # all that was in flight
    while not run.hopeless:
        clock.now += run.pause_s
        run.add("8 of 8 checks failed: ValueError: boom")
        if run.stalled and stalled_at is None:
            stalled_at = clock.now
    assert stalled_at is not None
    assert stalled_at < clock.now
    assert MIN_RUN_S <= clock.now - began <= 120.0
    assert run.count >= max(3 * slots, MIN_FAILURES)
    assert str(run) == f"{run.count} groups failed in a row; the newest: 8 of 8 checks failed: ValueError: boom"


def test_many_failures_at_once_do_not_fail_a_job_before_what_broke_can_be_mended() -> None:
    clock = Clock()
    run = FailureRun(2, clock)
    failed(run, 10 * MIN_FAILURES)
    assert (run.stalled, run.hopeless) == (True, False)
    clock.now += MIN_RUN_S
    assert run.hopeless
    run.clear()
    assert (run.stalled, run.hopeless) == (False, False)


def test_slow_groups_are_judged_by_time_and_few_of_them_never_fail_a_job() -> None:
    clock = Clock()
    run = FailureRun(192, clock)
    failed(run, MIN_FAILURES - 1)
    clock.now += STALLED_S
    assert run.stalled
    clock.now += 100 * LONG_RUN_S
    assert not run.hopeless
    run.add("boom")
    assert run.hopeless
