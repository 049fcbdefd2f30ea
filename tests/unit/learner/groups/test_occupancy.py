"""Occupancy of servers from the groups that arrive."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.common.streams.consumer import Entry
from services.common.streams.types import ScoredGroup
from services.learner.groups.occupancy import Occupancy, Occupied
from tests.unit.learner.scored_groups import scored_group


def arrival(server: str, start: float, end: float, judge_s: float = 0.5) -> tuple[ScoredGroup, Entry]:
    """A group sampled from `start` to `end` (seconds), judged for `judge_s`."""
    scored = scored_group(1, [1.0, 0.0])
    group = replace(scored.group, server=server, generate_s=end - start)
    return replace(scored, group=group, judge_s=judge_s), Entry(f"{round((end + judge_s) * 1000)}-0", "m", b"", 1)


def test_time_with_several_groups_counts_once_for_each_server() -> None:
    occupancy = Occupancy()
    for server, start, end in (("a", 0.0, 2.0), ("a", 1.0, 3.0), ("a", 5.0, 6.0), ("b", 0.0, 1.0), ("a", 1.5, 5.5)):
        occupancy.note(*arrival(server, 100 + start, 100 + end))
    taken = occupancy.take()
    assert (taken.servers, taken.sampled) == (2, 5)
    assert taken.busy_s == pytest.approx(6.0 + 1.0)
    assert taken.generate_s == pytest.approx(2 + 2 + 1 + 1 + 4)


def test_each_take_counts_what_came_since_the_last() -> None:
    occupancy = Occupancy()
    occupancy.note(*arrival("a", 100.0, 102.0))
    occupancy.take()
    occupancy.note(*arrival("a", 101.0, 104.0))
    assert occupancy.take().busy_s == pytest.approx(2.0)
    assert occupancy.take() == Occupied(0, 0.0, 0, 0.0)


def test_a_failed_group_counts_for_nothing() -> None:
    occupancy = Occupancy()
    occupancy.note(scored_group(1, [], failure="no prompt"), Entry("1000-0", "m", b"", 1))
    assert occupancy.take().servers == 0


def test_it_is_the_measure_of_the_union_in_any_order() -> None:
    """Against a count of milliseconds, in more spans than are kept of a server."""
    drawn = random.Random(0)
    spans = sorted((start := drawn.randrange(100_000), start + drawn.randrange(1, 900)) for _ in range(400))
    spans.sort(key=lambda span: span[1] + drawn.randrange(300))
    occupancy = Occupancy()
    for start, end in spans:
        occupancy.note(*arrival("a", 1000 + start / 1000, 1000 + end / 1000, judge_s=0.0))
    covered = {ms for start, end in spans for ms in range(start, end)}
    assert occupancy.take().busy_s == pytest.approx(len(covered) / 1000, rel=1e-3)
