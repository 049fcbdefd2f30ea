"""What holds a job up is told where its record has no cause."""

from __future__ import annotations

from services.common.service.heartbeat import WorkerKind, WorkerStatus
from services.gateway.routes.jobs import loading, writes_refused


def test_redis_refuses_once_a_write_to_its_file_has_failed_and_not_where_it_has_none() -> None:
    assert writes_refused({"aof_enabled": 1, "aof_last_write_status": "err"})
    assert not writes_refused({"aof_enabled": 1, "aof_last_write_status": "ok"})
    assert not writes_refused({"aof_enabled": 0})


def test_engines_load_while_no_server_of_the_job_is_ready() -> None:
    reward = WorkerStatus("reward-1", WorkerKind.REWARD, "idle", job_id="a")
    first, second = (WorkerStatus(f"rollout-{n}", WorkerKind.ROLLOUT, "loading", job_id="a") for n in (1, 2))
    ready = WorkerStatus("rollout-3", WorkerKind.ROLLOUT, "sampling", job_id="a")
    assert loading("a", [reward, first, second]) == "the engine loads on rollout-1, rollout-2"
    assert loading("a", [reward, first, second, ready]) == ""
    assert loading("b", [first, second]) == ""
    assert loading("a", []) == ""
