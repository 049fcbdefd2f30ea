"""Busy time is the time with a rollout in flight, however seldom somebody looks."""

from __future__ import annotations

from prometheus_client import REGISTRY

from services.rollout.metrics import BusyClock


def busy_s() -> float:
    value = REGISTRY.get_sample_value("millrace_rollout_busy_seconds_total")
    assert value is not None
    return value


def test_only_time_with_rollouts_in_flight_counts() -> None:
    now = 10.0
    clock, before = BusyClock(lambda: now), busy_s()
    now += 5
    clock.note(0)  # idle until here; eight begin
    now += 2
    clock.note(8)  # four of them end
    now += 1
    clock.note(4)  # a look in between
    now += 3
    clock.note(4)  # the last ones end
    now += 100
    clock.note(0)
    assert busy_s() - before == 6
