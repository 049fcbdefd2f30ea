"""The learner's clock counts a phase while it lasts, and nothing outside it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter

from services.learner.loops.metrics import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def value(counter: Counter) -> float:
    return next(sample.value for family in counter.collect() for sample in family.samples if "total" in sample.name)


@pytest.fixture
def counter() -> Counter:
    return Counter("waited_seconds", "Time.", registry=CollectorRegistry())


def test_a_phase_is_counted_while_it_lasts(counter: Counter) -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.phase(counter):
        clock.now += 5
        watch.tick()
        assert value(counter) == 5
        clock.now += 2
    assert value(counter) == 7


def test_nothing_is_counted_outside_a_phase(counter: Counter) -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.tick()
    clock.now += 50
    watch.tick()
    with watch.phase(counter):
        clock.now += 1
    clock.now += 50
    watch.tick()
    assert value(counter) == 1


def test_a_phase_that_breaks_off_is_counted_to_its_end(counter: Counter) -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def break_off() -> None:
        with watch.phase(counter):
            clock.now += 3
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    clock.now += 9
    watch.tick()
    assert value(counter) == 3
