"""Which job a rollout server attaches to."""

from __future__ import annotations

from services.common.jobs.record import ActiveJob
from services.common.service.heartbeat import WorkerKind, WorkerStatus
from services.rollout.session import choose


def job(name: str) -> ActiveJob:
    return ActiveJob(name, 1, "127.0.0.1:1", 0, "/models/tiny")


def server(name: str, job_id: str | None, kind: WorkerKind = WorkerKind.ROLLOUT) -> WorkerStatus:
    return WorkerStatus(name, kind, "sampling", job_id=job_id)


def test_the_job_with_the_fewest_rollout_servers_is_chosen() -> None:
    active = {name: job(name) for name in ("a", "b")}
    workers = [server("r1", "a"), server("r2", "b"), server("r3", "a")]
    assert choose(active, workers, "r9") == active["b"]


def test_other_kinds_of_workers_and_its_own_old_entry_do_not_count() -> None:
    active = {name: job(name) for name in ("a", "b")}
    workers = [server("w", "a", WorkerKind.REWARD), server("r9", "a"), server("r2", "b")]
    assert choose(active, workers, "r9") == active["a"]


def test_without_jobs_there_is_none() -> None:
    assert choose({}, [], "r9") is None
