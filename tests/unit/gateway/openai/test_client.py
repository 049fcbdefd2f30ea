"""Which rollout server a chat is sent to."""

from __future__ import annotations

from typing import Any

from services.common.jobs.record import RECORD_FIELDS, JobRecord, JobState
from services.common.service.heartbeat import WorkerKind, WorkerStatus
from services.common.spec.job import JobSpec
from services.gateway.openai.client import candidates

JOB = "demo-00000001"
OTHER = "demo-00000002"


def a_record(state: JobState) -> JobRecord:
    spec = JobSpec.model_validate({"model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}})
    values: dict[str, Any] = dict.fromkeys(RECORD_FIELDS, 0)
    return JobRecord(**(values | {"id": JOB, "state": state, "export": "/hf", "spec": spec}))


def a_server(
    name: str, state: str, job_id: str | None = None, version: int | None = None, chats: int = 0
) -> WorkerStatus:
    return WorkerStatus(
        name,
        WorkerKind.ROLLOUT,
        state,
        job_id,
        version,
        inference_address="127.0.0.1:1",
        detail={"chats_in_flight": chats},
    )


def chosen(state: JobState, *servers: WorkerStatus) -> list[str]:
    return [server.name for server in candidates(a_record(state), servers)]


def test_a_running_job_is_asked_of_its_own_servers_the_least_busy_first() -> None:
    servers = (
        a_server("busy", "sampling", JOB, 4, chats=2),
        a_server("free", "updating", JOB, 4),
        a_server("loading", "loading", JOB),
        a_server("leaving", "draining", JOB, 4),
        a_server("other", "sampling", OTHER, 4),
        a_server("idle", "idle"),
    )
    assert chosen(JobState.RUNNING, *servers) == ["free", "busy"]


def test_an_ended_job_is_asked_where_it_is_loaded_then_where_nothing_is_then_where_nobody_trains() -> None:
    servers = (
        a_server("another export", "serving", OTHER, 9),
        a_server("idle", "idle"),
        a_server("training", "sampling", OTHER, 4),
        a_server("its own", "serving", JOB, 30, chats=2),
        a_server("leaving", "draining"),
    )
    assert chosen(JobState.SUCCEEDED, *servers) == ["its own", "idle", "another export"]


def test_who_cannot_be_asked_is_not() -> None:
    silent = WorkerStatus("an older server", WorkerKind.ROLLOUT, "idle")
    learner = WorkerStatus("learner", WorkerKind.LEARNER, "idle")
    assert chosen(JobState.CANCELLED, silent, learner) == []
