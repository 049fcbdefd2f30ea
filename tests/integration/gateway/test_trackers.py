"""Trackers of the gateway, on a real Redis, with the processes that do the work."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import redis.asyncio

from services.common.config.settings import Settings
from services.common.jobs.folder import JobFolder
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.sandbox.pool import Sandbox
from services.common.service.process_tree import family
from services.common.spec.job import JobSpec
from services.gateway.metrics import GatewayMetrics
from services.gateway.trackers.delivery import Delivery
from services.gateway.trackers.supervisor import Trackers
from tests.unit.gateway.trackers.histories import SINK, add_eval, add_step

TIMEOUT_S = 40.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, tracker_interval_s=0.05)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(service="gateway-tracker") as opened:
        yield opened


@pytest.fixture
def store(redis: redis.asyncio.Redis, tmp_path: Path) -> JobStore:
    return JobStore(redis, tmp_path / "jobs")


async def running(store: JobStore, document: dict[str, Any]) -> JobRecord:
    """A job that a learner holds."""
    await store.create(JobSpec.model_validate(document))
    record = await store.claim("learner-0")
    assert record is not None
    await store.transition(record.id, JobState.RUNNING, allowed=[JobState.STARTING])
    return record


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def got(folder: Path) -> list[Any]:
    path = folder / "got.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def kinds(redis: redis.asyncio.Redis, job_id: str) -> list[str]:
    found: Any = await redis.xrange(keys.events(job_id))
    return [fields[b"kind"].decode() for _, fields in found]


async def write_steps(folder: JobFolder, count: int, seconds: float) -> list[float]:
    """What the learner's head does with each step's record, and what it took, seconds."""
    took = []
    for step in range(1, count + 1):
        began = time.monotonic()
        await asyncio.to_thread(add_step, folder, step)
        took.append(time.monotonic() - began)
        await asyncio.sleep(seconds)
    return took


async def test_a_tracker_that_hangs_and_dies_holds_up_no_step_and_loses_no_point(
    redis: redis.asyncio.Redis, store: JobStore, settings: Settings, sandbox: Sandbox, document: dict[str, Any]
) -> None:
    record = await running(store, document)
    folder = JobFolder(settings.job_dir(record.id))
    metrics, settings = GatewayMetrics(), settings.model_copy(update={"tracker_timeout_s": 1.0})
    delivery = Delivery(
        record, "mlflow", redis=redis, store=store, settings=settings, metrics=metrics, sandbox=sandbox, sink=SINK
    )
    (folder.path / "hang").touch()
    task = asyncio.create_task(delivery.run(asyncio.Semaphore(1)))
    hanging = await write_steps(folder, 60, 0.05)
    (folder.path / "die").touch()
    (folder.path / "hang").unlink()
    failures = metrics.tracker_failures.labels("mlflow")._value
    before = failures.get()
    await until(lambda: failures.get() > before + 1)
    (folder.path / "die").unlink()
    await until(lambda: len(got(folder.path)) == 60)
    await store.transition(record.id, JobState.SUCCEEDED, allowed=[JobState.RUNNING])
    await asyncio.wait_for(task, TIMEOUT_S)
    assert [line[0] for line in got(folder.path)] == [*range(1, 61), "end"]  # no point is missing, none came twice
    assert failures.get() >= 3
    assert metrics.tracker_points.labels("mlflow")._value.get() == 60
    assert (await kinds(redis, record.id)).count("tracker") == 2  # one when it began, one when it was over
    alone = await write_steps(JobFolder(settings.job_dir(record.id)), 60, 0.0)
    assert median(hanging) < median(alone) + 0.05


async def test_a_job_is_found_followed_and_left_with_a_whole_folder(
    redis: redis.asyncio.Redis, store: JobStore, settings: Settings, sandbox: Sandbox, document: dict[str, Any]
) -> None:
    trackers = Trackers(redis, store, settings, GatewayMetrics(), sandbox)
    task = asyncio.create_task(trackers.run())
    record = await running(store, document)
    folder = JobFolder(settings.job_dir(record.id))
    await redis.lpush(keys.samples(record.id), json.dumps({"group_id": 1}), json.dumps({"group_id": 2}))
    for step in range(1, 4):
        add_step(folder, step)
    add_eval(folder, 3)
    await until(lambda: any(folder.path.glob("trackers/tensorboard/events*")))
    await store.transition(record.id, JobState.SUCCEEDED, allowed=[JobState.RUNNING])
    await until(lambda: record.id in trackers._done)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert {"metrics.parquet", "evals.parquet", "curves.svg", "spec.yaml", "history.jsonl"} <= {
        path.name for path in folder.path.iterdir()
    }
    lines = (folder.path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["group_id"] for line in lines] == [1, 2]
    await until(lambda: sandbox.pid is not None and len(family(sandbox.pid)) == 1)  # an ended job needs no process


async def test_a_job_that_ended_while_no_gateway_ran_is_followed_to_its_end(
    redis: redis.asyncio.Redis, store: JobStore, settings: Settings, sandbox: Sandbox, document: dict[str, Any]
) -> None:
    record = await running(store, document)
    folder = JobFolder(settings.job_dir(record.id))
    add_step(folder, 1)
    await store.transition(record.id, JobState.FAILED, allowed=[JobState.RUNNING])
    await redis.zrem(keys.HELD, record.id)
    trackers = Trackers(redis, store, settings, GatewayMetrics(), sandbox)
    task = asyncio.create_task(trackers.run())
    await until(lambda: record.id in trackers._done)
    again = Trackers(redis, store, settings, GatewayMetrics(), sandbox)
    await again._begin(record.id)
    assert again._done == {record.id}  # the next gateway does nothing for it
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert json.loads((folder.path / "trackers" / "tensorboard.json").read_text())["ended"] == "failed"


async def test_a_deleted_job_is_left_alone(
    redis: redis.asyncio.Redis, store: JobStore, settings: Settings, sandbox: Sandbox, document: dict[str, Any]
) -> None:
    record = await running(store, document)
    delivery = Delivery(
        record, "tensorboard", redis=redis, store=store, settings=settings, metrics=GatewayMetrics(), sandbox=sandbox
    )
    settings.job_dir(record.id).rename(settings.home / "away")
    await redis.delete(keys.record(record.id))
    await asyncio.wait_for(delivery.run(asyncio.Semaphore(1)), TIMEOUT_S)
    assert not settings.job_dir(record.id).exists()


async def test_a_gateway_that_ends_just_after_a_job_still_sends_its_end(
    redis: redis.asyncio.Redis, store: JobStore, settings: Settings, sandbox: Sandbox, document: dict[str, Any]
) -> None:
    record = await running(store, document)
    folder = JobFolder(settings.job_dir(record.id))
    trackers = Trackers(redis, store, settings, GatewayMetrics(), sandbox)
    task = asyncio.create_task(trackers.run())
    add_step(folder, 1)
    await until((folder.path / "metrics.parquet").exists)
    add_step(folder, 2)
    await store.transition(record.id, JobState.SUCCEEDED, allowed=[JobState.RUNNING])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (folder.path / "curves.svg").exists()
    assert json.loads((folder.path / "trackers" / "tensorboard.json").read_text())["ended"] == "succeeded"
