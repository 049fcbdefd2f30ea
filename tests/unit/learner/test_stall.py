"""What counts as standing still: nothing arrives, and nobody has work in hand that moves."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from services.common.errors import WeightSyncError
from services.common.jobs.record import JobState
from services.common.service import heartbeat as heartbeats
from services.common.service.heartbeat import WorkerKind, WorkerStatus
from services.common.service.lifecycle import Drain
from services.common.spec.environment import EnvironmentSpec
from services.learner.groups.buffer import GroupBuffer
from services.learner.groups.ledger import Ledger
from services.learner.loops import monitor
from services.learner.loops.state import JobContext, Progress
from services.learner.weights.publisher import Publisher
from tests.unit.learner.scored_groups import LIMITS, job_spec


class Record:
    """What the monitor loop asks the job's record."""

    cancel_requested = False
    pause_requested = False


class Store:
    """Remembers the states that it was told, with their causes."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    async def record(self) -> Record:
        return Record()

    async def transition(self, to: str, **options: Any) -> None:
        self.said.append((to, options["cause"]))


def server(kind: WorkerKind = WorkerKind.ROLLOUT, *, job_id: str = "job", age_s: float | None = None) -> WorkerStatus:
    return WorkerStatus("worker-1", kind, "sampling", job_id=job_id, progress_age_s=age_s)


class Watched:
    """A job whose next step waits for groups, seen by the monitor loop a few times at a given stillness."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._store = Store()
        spec = job_spec()
        names = (
            "folder",
            "identity",
            "model_dir",
            "settings",
            "redis",
            "ranks",
            "tasks",
            "journal",
            "checkpoints",
            "consumer",
        )
        parts: dict[str, Any] = dict.fromkeys(names) | {"publisher": Mock(spec=Publisher)}
        self.job = JobContext(
            job_id="job",
            spec=spec,
            progress=Progress(lineage=1),
            buffer=GroupBuffer(spec, LIMITS, Ledger()),
            store=cast("Any", self._store),
            **parts,
        )
        self.job.activity.waiting_for = "scored groups"

    async def look(self, *workers: WorkerStatus, still_s: float, looks: int = 3) -> list[tuple[str, str]]:
        """The states and causes said in this round."""
        drain, left = Drain(), looks

        async def alive(_: object) -> list[WorkerStatus]:
            return list(workers)

        async def wait(_: float) -> bool:
            nonlocal left
            left -= 1
            return left < 0

        self._monkeypatch.setattr(heartbeats, "live_workers", alive)
        self._monkeypatch.setattr(drain, "wait", wait)
        self.job.activity.moved_at = time.monotonic() - still_s
        said = len(self._store.said)
        await monitor.monitor_loop(self.job, drain)
        return self._store.said[said:]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


LONG = 10 * monitor.STALLED_AFTER_S


@pytest.mark.parametrize("kind", [WorkerKind.ROLLOUT, WorkerKind.REWARD])
async def test_a_worker_whose_work_moves_is_no_stall_however_long_the_group_takes(
    watched: Watched, kind: WorkerKind
) -> None:
    assert await watched.look(server(kind, age_s=1.0), still_s=LONG) == []


@pytest.mark.parametrize(
    "worker",
    [server(age_s=None), server(age_s=LONG), server(job_id="another", age_s=1.0)],
    ids=["idle", "hung", "at another job"],
)
async def test_a_worker_that_is_idle_hung_or_at_another_job_does_not_hide_a_stall(
    watched: Watched, worker: WorkerStatus
) -> None:
    ((state, cause),) = await watched.look(worker, still_s=LONG)
    assert state == JobState.STALLED
    assert "waiting for scored groups" in cause
    assert "1 rollout servers" in cause


async def test_a_stall_names_how_long_and_who_is_alive(watched: Watched) -> None:
    ((_, cause),) = await watched.look(still_s=90)
    assert cause == "waiting for scored groups for 90 s; 0 rollout servers and 0 reward services alive"


async def test_a_stall_of_a_job_with_episodes_names_the_environment_servers_too(watched: Watched) -> None:
    spec = watched.job.spec.model_copy(update={"environment": EnvironmentSpec()})
    watched.job = replace(watched.job, spec=spec)
    ((_, cause),) = await watched.look(server(WorkerKind.ENVIRONMENT), still_s=90)
    assert cause.endswith("; 0 rollout servers and 0 reward services and 1 environment servers alive")


async def test_groups_that_fail_in_a_row_are_a_stall_though_they_arrive_and_then_end_the_job(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = watched.job.buffer.failures
    for _ in range(1000):
        failures.add("ValueError: boom")
    ((state, cause),) = await watched.look(still_s=0)
    assert (state, cause) == (JobState.STALLED, "1000 groups failed in a row; the newest: ValueError: boom")
    assert watched.job.control.hopeless == "", "the run is too young"
    monkeypatch.setattr("services.learner.groups.failures.MIN_RUN_S", 0.0)
    await watched.look(still_s=0)
    assert watched.job.control.hopeless == f"no step is possible: {cause}"


async def test_a_good_group_ends_the_stall(watched: Watched) -> None:
    for _ in range(1000):
        watched.job.buffer.failures.add("boom")
    drained: list[tuple[str, str]] = []

    async def transition(to: str, **options: Any) -> None:
        drained.append((to, options["cause"]))
        watched.job.buffer.failures.clear()

    watched._store.transition = transition  # type: ignore[method-assign]
    await watched.look(still_s=0)
    assert [state for state, _ in drained] == [JobState.STALLED, JobState.RUNNING]
    assert watched.job.control.hopeless == ""


async def test_failures_while_no_step_is_left_to_do_say_nothing(watched: Watched) -> None:
    watched.job.progress.step = watched.job.spec.learner.steps
    for _ in range(1000):
        watched.job.buffer.failures.add("boom")
    assert await watched.look(still_s=0) == []


async def test_a_short_wait_is_no_stall(watched: Watched) -> None:
    assert await watched.look(still_s=monitor.STALLED_AFTER_S - 1) == []


async def test_the_end_of_the_weights_process_ends_the_monitor(watched: Watched) -> None:
    cast("Mock", watched.job.publisher).check.side_effect = WeightSyncError("the weights' process ended")
    with pytest.raises(WeightSyncError, match="the weights' process ended"):
        await watched.look(still_s=0)
