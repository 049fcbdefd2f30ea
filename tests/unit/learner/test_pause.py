"""What a pause does to clocks: no deadline runs out, no rate counts it, and the stall watch is silent."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from services.common.service import heartbeat
from services.common.service.lifecycle import Drain
from services.learner.groups.buffer import GroupBuffer
from services.learner.groups.evaluation import EvalRound
from services.learner.groups.ledger import Ledger
from services.learner.loops import monitor
from services.learner.loops.state import JobContext, Progress
from services.learner.weights.publisher import Publisher
from tests.unit.learner.scored_groups import LIMITS, job_spec

TIMEOUT_S = 10.0


class Clock:
    """Monotonic seconds that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def job(clock: Clock) -> JobContext:
    spec = job_spec(rollout={"group_timeout_s": TIMEOUT_S})
    parts: dict[str, Any] = dict.fromkeys(
        (
            "folder",
            "identity",
            "model_dir",
            "settings",
            "redis",
            "store",
            "ranks",
            "tasks",
            "journal",
            "checkpoints",
            "consumer",
        )
    )
    parts["publisher"] = Mock(spec=Publisher)
    made = JobContext(
        job_id="job", spec=spec, progress=Progress(1), buffer=GroupBuffer(spec, LIMITS, Ledger(), clock), **parts
    )
    made.activity.flow.since = clock.now
    return made


def test_a_groups_deadline_gets_the_time_of_the_pause_back(job: JobContext, clock: Clock) -> None:
    group = job.buffer.ledger.issue(0)
    group.issued_at = clock.now
    clock.now += TIMEOUT_S - 1
    job.control.pause()
    clock.now += 1000 * TIMEOUT_S
    job.resume()
    assert job.buffer.overdue() == []
    clock.now += 0.5
    assert job.buffer.overdue() == []
    clock.now += 1.0
    assert job.buffer.overdue() == [group]


def test_a_group_issued_while_the_step_under_way_ended_is_not_issued_in_the_future(
    job: JobContext, clock: Clock
) -> None:
    job.control.pause()
    clock.now += 5
    group = job.buffer.ledger.issue(0)
    group.issued_at = clock.now
    clock.now += 5
    job.resume()
    assert group.issued_at == clock.now


def test_an_evaluations_deadline_and_duration_leave_the_pause_out(job: JobContext, clock: Clock) -> None:
    evaluation = EvalRound(0, 0, 4, 8, deadline=clock.now + 30, started=clock.now)
    job.evals.rounds.append(evaluation)
    clock.now += 10
    job.control.pause()
    clock.now += 100
    job.resume()
    assert not evaluation.done({})
    assert evaluation.result({})["seconds"] == 10
    clock.now += 21
    assert evaluation.done({})


def test_rates_leave_the_pause_out(job: JobContext, clock: Clock) -> None:
    clock.now += 3
    job.control.pause()
    clock.now += 100
    job.resume()
    assert clock.now - job.activity.flow.since == 3


def test_pausing_twice_begins_once_and_resuming_twice_ends_once(job: JobContext, clock: Clock) -> None:
    job.control.pause()
    clock.now += 50
    job.control.pause()
    job.resume()
    job.resume()
    assert not job.control.paused
    assert job.activity.flow.since == clock.now


async def test_waiting_for_the_end_of_a_pause_ends_with_it_or_with_the_job(job: JobContext) -> None:
    drain = Drain()
    assert await job.control.resumed(drain)
    job.control.pause()
    job.control.stopping = "cancelled on request"
    assert not await job.control.resumed(drain)
    job.control.stopping = ""
    drain.request()
    assert not await job.control.resumed(drain)
    job.resume()
    assert await job.control.resumed(drain)


class Record:
    """What the monitor loop asks the job's record."""

    cancel_requested = False
    pause_requested = True


class Store:
    """Remembers the states that it was told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    async def record(self) -> Record:
        return Record()

    async def transition(self, to: str, **options: Any) -> None:
        self.said.append((to, options["cause"]))


@pytest.mark.parametrize(("requested", "states"), [(True, []), (False, ["stalled"])])
async def test_a_pause_is_no_stall(
    job: JobContext, clock: Clock, monkeypatch: pytest.MonkeyPatch, requested: bool, states: list[str]
) -> None:
    store, drain, looks = Store(), Drain(), 0

    async def describe_wait(*_: object) -> str:
        return "a wait"

    async def wait(_: float) -> bool:
        nonlocal looks
        looks += 1
        return looks > 5

    monkeypatch.setattr(Record, "pause_requested", requested)

    async def nobody(_: object) -> list[object]:
        return []

    monkeypatch.setattr(monitor, "_describe_wait", describe_wait)
    monkeypatch.setattr(heartbeat, "live_workers", nobody)
    monkeypatch.setattr(drain, "wait", wait)
    job = replace(job, store=cast("Any", store))
    job.activity.waiting_for = "scored groups"
    clock.now = job.activity.moved_at + 10 * monitor.STALLED_AFTER_S
    if requested:
        job.control.pause()  # moved() at the request would hide what this asks: how the loop treats a job that is paused already
    await monitor.monitor_loop(job, drain)
    assert [state for state, _ in store.said] == states
