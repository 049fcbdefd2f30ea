"""Deleting jobs over HTTP: only what has ended, nothing that another job needs, and never half."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from fastapi import FastAPI

from services.common.jobs.folder import JobFolder, is_deleted
from services.common.jobs.record import JobState
from services.common.jobs.restore import Restorer, restore
from services.common.jobs.retention import Retention
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.spec.job import JobSpec
from tests.gateway_process import running

HOUR_S = 3600.0


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def saving(redis: redis.asyncio.Redis, jobs_dir: Path) -> JobStore:
    """A store that keeps the jobs' folders, as a learner's does."""
    return JobStore(redis, jobs_dir)


@pytest.fixture
def retention(app: FastAPI) -> Retention:
    found: Retention = app.state.context.retention
    return found


async def finished(
    store: JobStore, jobs_dir: Path, document: dict[str, Any], *, hours_ago: float = 0.0, size: int = 0
) -> str:
    """A job that has trained two steps and ended."""
    record = await store.create(JobSpec.model_validate(document))
    for step in (1, 2):
        await store.history.append_step(record.id, step, {"step": step, "reward": float("nan")})
        JobFolder(jobs_dir / record.id).append("step", step, {"step": step, "reward": float("nan")})
    await store.history.append_eval(record.id, {"step": 2, "avg_at_k": 0.5})
    JobFolder(jobs_dir / record.id).append("eval", 2, {"step": 2, "avg_at_k": 0.5})
    await store.transition(
        record.id, JobState.SUCCEEDED, allowed=[JobState.QUEUED], finished_at=time.time() - hours_ago * HOUR_S, step=2
    )
    (jobs_dir / record.id / "weights").write_bytes(b"x" * size)
    return record.id


class CrashError(Exception):
    """The process ends here."""


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def all_keys(redis: redis.asyncio.Redis, job_id: str) -> list[bytes]:
    found = [key async for key in redis.scan_iter(match=f"*{job_id}*")]
    return [key for key in found if b":once:" not in key]  # these expire within minutes


async def test_a_deleted_job_leaves_nothing_behind(
    client: httpx.AsyncClient, redis: redis.asyncio.Redis, saving: JobStore, jobs_dir: Path, document: dict[str, Any]
) -> None:
    job_id = await finished(saving, jobs_dir, document)
    await redis.lpush(keys.samples(job_id), "{}")
    await redis.xadd(keys.dead(job_id, keys.Stage.TASKS), {"d": "x"})
    await redis.sadd(keys.seen(job_id, keys.Stage.TASKS), "x")
    assert (await client.delete(f"/jobs/{job_id}")).status_code == 204
    assert not (jobs_dir / job_id).exists()
    assert await all_keys(redis, job_id) == []
    assert (await client.get("/jobs")).json() == {"total": 0, "jobs": []}
    for path in ("", "/metrics", "/rollouts", "/events", "/ledger"):
        assert (await client.get(f"/jobs/{job_id}{path}")).status_code == 404
    assert (await client.delete(f"/jobs/{job_id}")).status_code == 204  # a repeat after a lost answer
    assert (await client.delete("/jobs/demo-00000000")).status_code == 404
    assert (await client.delete("/jobs/..%2f..%2fetc")).status_code == 404


@pytest.mark.parametrize("state", [state for state in JobState if not state.ended])
async def test_a_job_that_has_not_ended_is_not_deleted(
    client: httpx.AsyncClient, saving: JobStore, jobs_dir: Path, document: dict[str, Any], state: JobState
) -> None:
    record = await saving.create(JobSpec.model_validate(document))
    if state is not JobState.QUEUED:
        await saving.transition(record.id, state, allowed=[JobState.QUEUED], learner="learner-0")
    answer = await client.delete(f"/jobs/{record.id}")
    assert answer.status_code == 409
    assert str(state) in answer.json()["error"]["message"]
    pruned = await client.post("/jobs/prune", params={"keep": 0, "older_than_days": 0, "max_bytes": 0})
    assert pruned.json()["jobs"] == []
    assert (jobs_dir / record.id / "job.json").exists()
    assert (await client.get(f"/jobs/{record.id}")).status_code == 200


async def test_a_job_that_another_begins_with_stays_until_that_one_has_ended(
    client: httpx.AsyncClient, saving: JobStore, jobs_dir: Path, document: dict[str, Any]
) -> None:
    first = await finished(saving, jobs_dir, document)
    second = await saving.create(JobSpec.model_validate(document | {"checkpoint": {"load": f"{first}/checkpoints"}}))
    answer = await client.delete(f"/jobs/{first}")
    assert answer.status_code == 409
    assert second.id in answer.json()["error"]["message"]
    assert (await client.post("/jobs/prune", params={"keep": 0})).json()["jobs"] == []
    assert (jobs_dir / first / "job.json").exists()
    await saving.cancel(second.id)
    assert (await client.delete(f"/jobs/{first}")).status_code == 204


async def test_a_job_cannot_begin_with_one_that_was_deleted_since_it_was_checked(
    client: httpx.AsyncClient, saving: JobStore, jobs_dir: Path, document: dict[str, Any]
) -> None:
    first = await finished(saving, jobs_dir, document)
    assert (await client.delete(f"/jobs/{first}")).status_code == 204
    answer = await client.post(
        "/jobs", json=document | {"checkpoint": {"load": first}}
    )  # the app's admission allows all
    assert answer.status_code == 422
    assert answer.json()["error"]["fields"] == [{"field": "checkpoint.load", "message": f"job {first} was deleted"}]


async def test_prune_tells_what_would_go_and_then_deletes_it(
    client: httpx.AsyncClient, saving: JobStore, jobs_dir: Path, document: dict[str, Any]
) -> None:
    ids = [await finished(saving, jobs_dir, document, hours_ago=hours, size=200_000) for hours in (72, 48, 24, 1)]
    for params, expected in (
        ({"keep": 3}, ids[:1]),
        ({"older_than_days": 1.5}, ids[:2]),
        ({"max_bytes": 500_000}, ids[:2]),
    ):
        answer = (await client.post("/jobs/prune", params=params | {"dry_run": True})).json()
        assert [job["id"] for job in answer["jobs"]] == expected
        assert answer["dry_run"]
        assert answer["size_bytes"] == sum(job["size_bytes"] for job in answer["jobs"]) >= 200_000
    assert (await client.get("/jobs")).json()["total"] == 4
    done = (await client.post("/jobs/prune", params={"keep": 1})).json()
    assert [job["id"] for job in done["jobs"]] == ids[:3]
    assert [job["id"] for job in (await client.get("/jobs")).json()["jobs"]] == ids[3:]
    assert (await client.post("/jobs/prune")).status_code == 422


@pytest.mark.parametrize(
    ("method", "path", "allow"), [("DELETE", "/jobs/schema", "GET"), ("GET", "/jobs/prune", "POST")]
)
async def test_a_path_of_its_own_is_no_job(client: httpx.AsyncClient, method: str, path: str, allow: str) -> None:
    answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["Allow"]) == (405, allow)


async def test_an_idempotency_key_makes_a_new_job_once_the_old_one_is_deleted(
    client: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    key = {"Idempotency-Key": "mine"}
    first = (await client.post("/jobs", json=document, headers=key)).json()["id"]
    await client.post(f"/jobs/{first}/cancel")
    assert (await client.delete(f"/jobs/{first}")).status_code == 204
    again = await client.post("/jobs", json=document, headers=key)
    assert again.status_code == 201
    assert again.json()["id"] != first


@pytest.mark.parametrize("crash", ["after the mark", "after the rename", "after Redis", "Redis put back"])
async def test_a_crash_in_the_middle_is_finished_by_the_next_sweep_and_brings_no_job_back(
    redis: redis.asyncio.Redis,
    retention: Retention,
    saving: JobStore,
    jobs_dir: Path,
    document: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    crash: str,
) -> None:
    job_id = await finished(saving, jobs_dir, document)
    record = await saving.get(job_id)

    def end(*_: object) -> None:
        raise CrashError

    with monkeypatch.context() as patch:
        if crash == "after the mark":
            patch.setattr(Path, "rename", end)
        elif crash == "after the rename":
            patch.setattr(retention, "_clear", end)
        else:
            patch.setattr(retention, "_remove_soon", end)
        with pytest.raises(CrashError):
            await retention.delete(job_id)
    if crash == "Redis put back":
        await restore(redis, jobs_dir, record)
    restored = await Restorer(redis, jobs_dir, "gateway", lambda _: True).restore_lost()
    assert restored == []
    await retention.sweep()
    assert await saving.find(job_id) is None
    assert await all_keys(redis, job_id) == []
    assert files_below(jobs_dir) == []


async def test_two_gateways_that_delete_the_same_job_delete_it_once(
    redis: redis.asyncio.Redis, app: FastAPI, saving: JobStore, jobs_dir: Path, document: dict[str, Any]
) -> None:
    job_id = await finished(saving, jobs_dir, document, size=1_000_000)
    context = app.state.context
    gateways = [Retention(redis, context.store, context.settings) for _ in range(4)]
    assert await asyncio.gather(*(gateway.delete(job_id) for gateway in gateways)) == [True] * 4
    for gateway in gateways:
        await gateway.close()
    assert files_below(jobs_dir) == []


async def test_what_an_old_process_writes_for_a_deleted_job_goes_again(
    retention: Retention, saving: JobStore, jobs_dir: Path, document: dict[str, Any]
) -> None:
    job_id = await finished(saving, jobs_dir, document)
    await retention.delete(job_id)
    await saving.records.save(job_id)
    (jobs_dir / job_id / "checkpoints").mkdir(parents=True)
    (jobs_dir / job_id / "job.json").write_text("{}")
    assert saving.records.load(job_id) is None
    await retention.sweep()
    assert not (jobs_dir / job_id).exists()
    assert is_deleted(jobs_dir / job_id)


async def test_redis_part_of_an_ended_job_goes_and_its_folder_answers(
    client: httpx.AsyncClient,
    redis: redis.asyncio.Redis,
    retention: Retention,
    saving: JobStore,
    jobs_dir: Path,
    document: dict[str, Any],
) -> None:
    old = await finished(saving, jobs_dir, document, hours_ago=25)
    young = await finished(saving, jobs_dir, document, hours_ago=23)
    running = (await saving.create(JobSpec.model_validate(document))).id
    for job_id in (old, young):
        await redis.lpush(keys.samples(job_id), json.dumps({"group_id": 1}))
    before = {path: (await client.get(f"/jobs/{old}{path}")).json() for path in ("", "/metrics", "/metrics?from=2")}
    assert await retention.archive(24 * HOUR_S) == 1
    assert await retention.archive(24 * HOUR_S) == 0
    assert await all_keys(redis, old) == [keys.record(old).encode()]
    for path, answer in before.items():
        assert (await client.get(f"/jobs/{old}{path}")).json() == answer
    assert before["/metrics?from=2"]["steps"] == [{"step": 2, "reward": None}]
    assert (await client.get(f"/jobs/{old}/ledger")).status_code == 200
    assert (await client.get(f"/jobs/{old}/rollouts")).json() == {"archived": True, "samples": []}
    assert (await client.get(f"/jobs/{young}/rollouts")).json() == {"archived": False, "samples": [{"group_id": 1}]}
    events = (await client.get(f"/jobs/{old}/events")).text
    assert "event: archived" in events
    assert "event: end" in events
    assert (await client.get(f"/jobs/{old}/events", headers={"Last-Event-ID": "1-0"})).status_code == 204
    assert {job["id"] for job in (await client.get("/jobs")).json()["jobs"]} == {old, young, running}
    assert (await client.delete(f"/jobs/{old}")).status_code == 204


async def test_a_history_that_the_folder_lacks_stays_in_redis(
    client: httpx.AsyncClient, retention: Retention, saving: JobStore, jobs_dir: Path, document: dict[str, Any]
) -> None:
    job_id = await finished(saving, jobs_dir, document, hours_ago=25)
    (jobs_dir / job_id / "history.jsonl").unlink()
    assert await retention.archive(24 * HOUR_S) == 0
    assert (await client.get(f"/jobs/{job_id}/metrics")).json()["total"] == 2


async def test_the_gateway_keeps_to_its_settings_by_itself(
    redis: redis.asyncio.Redis,
    redis_url: str,
    home: Path,
    document: dict[str, Any],
) -> None:
    store = JobStore(redis, home / "jobs")
    ids = [await finished(store, home / "jobs", document, hours_ago=hours) for hours in (30, 3, 2)]
    waits = await store.create(JobSpec.model_validate(document))
    settings = {"MILLRACE_KEEP_JOBS": "1", "MILLRACE_KEEP_IN_REDIS_HOURS": "1"}
    with running(redis_url, home, **settings):
        deadline = time.monotonic() + 20
        while await redis.exists(keys.events(ids[2])):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    assert [record.id for record in await store.list()] == [waits.id, ids[2]]
    assert sorted(path.name for path in (home / "jobs").glob("*-*")) == sorted([waits.id, ids[2]])
