"""The whole service as a process: a real learner's publisher, a real Redis, real vLLM; killed, drained, its learner moved."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from redis.asyncio import Redis

from services.cli.stack.children import free_port
from services.common.config.settings import Settings
from services.common.jobs.record import ActiveJob
from services.common.jobs.store import JobStore
from services.common.pb import weight_sync_pb2 as pb
from services.common.redis import keys
from services.common.redis.connection import connect
from services.common.redis.keys import Stage
from services.common.service.heartbeat import WorkerStatus, live_workers
from services.common.service.process_tree import is_running
from services.common.service.watchdog import PERIOD_S
from services.common.spec.job import JobSpec
from services.common.streams import codec, stream
from services.common.streams.consumer import Consumer
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import Message, Purpose, RolloutGroup, Task
from services.common.weight_sync.server import WeightServer
from services.common.weight_sync.staging import default_stage_directory
from tests.integration.rollout.conftest import Tensors, snapshot, that_say

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.parametrize(
        "redis_url", ["embedded"], indirect=True
    ),  # each engine start takes its time: one Redis will do
]

ROOT = Path(__file__).parents[3]
FIRST = 40
ACTIVATED = 'millrace_rollout_weight_syncs_total{outcome="activated"}'


class Service:
    """`python -m services.rollout` in a process of its own."""

    def __init__(self, redis_url: str, home: Path) -> None:
        self.port = free_port()
        self.name = f"rollout-test-{self.port}"
        self._log = home / "rollout.log"
        environment = os.environ | {
            "REDIS_URL": redis_url, "MILLRACE_HOME": str(home), "MILLRACE_WORKER": self.name,
            "MILLRACE_METRICS_PORT": str(self.port), "MILLRACE_DRAIN_TIMEOUT_S": "60", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.rollout"], cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=5, trust_env=False)

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def log(self) -> str:
        return self.whole_log()[-4000:]

    def whole_log(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            for process in [*self.descendants(), psutil.Process(self.process.pid)]:
                process.kill()
            self.process.wait(10)
        # A killed service leaves its stage to the next of its name; here there will be none.
        stage = default_stage_directory(self.name, self._log.parent, 0, Settings().shared_memory)
        shutil.rmtree(stage, ignore_errors=True)


async def wait_until(what: str, reached: Callable[[], bool], service: Service, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert service.process.poll() is None, f"the service ended: {service.log()}"
        assert time.monotonic() < deadline, f"{what} not within {timeout_s} s: {service.log()}"
        await asyncio.sleep(0.05)


async def wait_activated(count: int, service: Service) -> None:
    await wait_until(f"{count} versions in use", lambda: service.metric(ACTIVATED) == count, service)


async def gone(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, within_s)
    return [process for process in left if is_running(process)]


def a_task(job_id: str, group_id: int, **changes: object) -> Task:
    values: dict[str, object] = {
        "job_id": job_id, "lineage": 1, "group_id": group_id, "attempt": 1, "purpose": Purpose.TRAIN,
        "prompt": (Message("user", f"{group_id} + 3 ="),), "data_source": "test", "ground_truth": "5", "extra_info": {},
        "group_size": 4, "temperature": 1.0, "max_tokens": 16, "min_policy_version": 0, "timeout_s": 120.0,
    } | changes  # fmt: skip
    return Task(**values)  # type: ignore[arg-type]


class World:
    """A learner's side of a job: publisher, task producer, reader of groups."""

    def __init__(
        self, redis: Redis, blocking: Redis, job: ActiveJob, publisher: WeightServer, weights: Tensors
    ) -> None:
        self.redis, self.job, self.publisher, self._weights = redis, job, publisher, weights
        self.reports: list[pb.ReportRequest] = []
        self._reader = Consumer(
            redis, blocking, job.job_id, Stage.ROLLOUTS, group="reward", name="test", limit_bytes=MIN_ENTRY_BYTES
        )

    def publish(self, n: int, lineage: int = 1) -> None:
        self.publisher.publish(snapshot(lineage, n, that_say(FIRST + n, self._weights)))

    async def ask(self, *tasks: Task) -> None:
        for task in tasks:
            await stream.add(self.redis, self.job.job_id, Stage.TASKS, task.member, codec.encode(task, MIN_ENTRY_BYTES))

    async def groups(self, count: int, timeout_s: float = 120.0) -> list[RolloutGroup]:
        found: list[RolloutGroup] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} groups came"
            for entry in await self._reader.read(count, 1.0):
                found.append(codec.decode(RolloutGroup, entry.payload, MIN_ENTRY_BYTES))
                await self._reader.ack(entry)
        return found

    async def worker(self) -> WorkerStatus | None:
        return next(iter(await live_workers(self.redis)), None)


@pytest.fixture
async def world(redis: Redis, redis_url: str, model_dir: Path, spec: JobSpec, weights: Tensors) -> AsyncIterator[World]:
    job_id = "job-1"
    blocking = connect(redis_url, block_s=2.0)
    reports: list[pb.ReportRequest] = []
    with WeightServer(job_id, "127.0.0.1", 0, None, on_report=reports.append) as publisher:
        job = ActiveJob(job_id, 1, publisher.address, 0, str(model_dir), spec.model_dump(mode="json"))
        world = World(redis, blocking, job, publisher, weights)
        world.reports = reports
        yield world
    await blocking.aclose()


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Callable[[], Service]]:
    started: list[Service] = []

    def make() -> Service:
        started.append(Service(redis_url, tmp_path))
        return started[-1]

    yield make
    for service in started:
        service.end()


def check_stamps(group: RolloutGroup) -> None:
    assert group.failure is None, group.failure
    for rollout in group.rollouts:
        bounds = [*(span.start for span in rollout.versions), len(rollout.tokens)]
        for span, end in zip(rollout.versions, bounds[1:], strict=True):
            assert set(rollout.tokens[span.start : end].tolist()) == {FIRST + span.policy_version}


@pytest.mark.slow
async def test_a_job_from_attach_to_retire(world: World, start: Callable[[], Service]) -> None:
    service = start()
    await wait_until("health", lambda: "health on port" in service.log(), service)
    world.publish(0)
    await world.ask(*(a_task(world.job.job_id, i) for i in range(6)))
    await JobStore(world.redis).activate(world.job)

    groups = await world.groups(6, timeout_s=240)
    for group in groups:
        check_stamps(group)
        assert group.max_policy_version == 0
        assert group.rollouts[0].text == chr(32 + FIRST - 5) * 16

    # Updates while it samples: stamps hold, and a task that asks for a newer version waits for it.
    await world.ask(*(a_task(world.job.job_id, i, max_tokens=200) for i in range(10, 30)))
    await world.ask(a_task(world.job.job_id, 30, min_policy_version=2))
    await wait_until("sampling", lambda: service.metric("millrace_rollout_in_flight_requests") > 0, service)
    for n in (1, 2):
        # A server that is still fetching one version goes to the newest: each is published when the one before is used.
        await wait_activated(n, service)
        world.publish(n)
    groups = await world.groups(21)
    for group in groups:
        check_stamps(group)
        assert group.min_policy_version >= group.task.min_policy_version
    assert service.metric("millrace_rollout_weight_pause_seconds_count") == 3
    assert service.metric(ACTIVATED) == 3
    report = world.reports[-1]
    assert report.server == groups[0].server
    assert report.pause_seconds > 0

    # What cannot be used is put aside at once, and a task of an older lineage is dropped.
    await stream.add(world.redis, world.job.job_id, Stage.TASKS, "train:31:1", b"\xc1 not MessagePack")
    await world.ask(a_task(world.job.job_id, 32, lineage=0), a_task(world.job.job_id, 33))
    assert [group.task.group_id for group in await world.groups(1)] == [33]
    assert await world.redis.xlen(keys.dead(world.job.job_id, Stage.TASKS)) == 1
    await wait_until(
        "the stale task", lambda: service.metric('millrace_rollout_groups_total{outcome="stale_lineage"}') == 1, service
    )
    assert await world.redis.xlen(keys.stream(world.job.job_id, Stage.TASKS)) == 0

    # A new lineage: what was being sampled for the old one is dropped.
    await world.ask(*(a_task(world.job.job_id, i, max_tokens=220) for i in range(40, 56)))
    await asyncio.sleep(0.3)
    world.publish(3, lineage=2)
    await world.ask(a_task(world.job.job_id, 60, lineage=2, min_policy_version=3))
    while True:
        (group,) = await world.groups(1)
        check_stamps(group)
        if group.task.lineage == 2:
            break
    assert service.get("/healthz").status_code == 200

    # Retired: it lets go and stays up; then SIGTERM ends it with all its processes.
    await JobStore(world.redis).retire(world.job.job_id)
    await wait_until("detach", lambda: "detached from job" in service.log(), service)
    assert await world.redis.exists(*keys.work(world.job.job_id)) == 0
    descendants = service.descendants()
    service.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(service.process.wait, 60) == 0
    assert await gone(descendants, 5) == []
    assert await world.worker() is None


@pytest.mark.slow
async def test_a_killed_service_leaves_no_process_and_loses_no_task(world: World, start: Callable[[], Service]) -> None:
    service = start()
    world.publish(0)
    await JobStore(world.redis).activate(world.job)
    await world.ask(*(a_task(world.job.job_id, i, max_tokens=200) for i in range(12)))
    done = await world.groups(1, timeout_s=240)
    descendants = service.descendants()
    assert len(descendants) >= 2
    service.process.kill()
    service.process.wait()
    assert await gone(descendants, 10) == []

    # Started again under the same name, it catches up first, then takes what the dead one had left pending.
    world.publish(5)
    name = done[0].server
    again = start()
    again_name = again.name
    assert again_name != name
    await world.redis.xgroup_createconsumer(keys.stream(world.job.job_id, Stage.TASKS), "rollout", again_name)
    pending = await world.redis.xpending_range(keys.stream(world.job.job_id, Stage.TASKS), "rollout", "-", "+", 100)
    if pending:  # hand them over now: waiting for the lease would take a minute
        await world.redis.xclaim(
            keys.stream(world.job.job_id, Stage.TASKS),
            "rollout",
            again_name,
            0,
            [item["message_id"] for item in pending],
        )
    groups = {group.task.group_id: group for group in done}
    while len(groups) < 12:
        for group in await world.groups(1, timeout_s=240):
            check_stamps(group)
            groups[group.task.group_id] = group
    late = [group for group in groups.values() if group.server == again_name]
    assert late
    assert all(group.min_policy_version == 5 for group in late), "it sampled before it had caught up"

    # The learner comes back elsewhere, with a task in flight: a drain finishes it.
    with WeightServer(world.job.job_id, "127.0.0.1", 0, None) as moved:
        world.publisher.stop()
        world.publisher = moved
        world.publish(6)
        await JobStore(world.redis).activate(
            ActiveJob(world.job.job_id, 1, moved.address, 6, world.job.model_path, world.job.spec)
        )
        await world.ask(a_task(world.job.job_id, 70, min_policy_version=6, max_tokens=200))
        await wait_until("the task", lambda: again.metric("millrace_rollout_in_flight_requests") > 0, again)
        again.process.send_signal(signal.SIGTERM)
        (last,) = await world.groups(1)
        check_stamps(last)
        assert last.min_policy_version == 6
        assert await asyncio.to_thread(again.process.wait, 60) == 0


@pytest.mark.slow
async def test_an_engine_that_is_stopped_is_noticed_within_two_heartbeats_and_loses_no_task(
    world: World, start: Callable[[], Service]
) -> None:
    service, tasks = start(), 33
    world.publish(0)
    await JobStore(world.redis).activate(world.job)
    await world.ask(a_task(world.job.job_id, 0))
    done = await world.groups(1, timeout_s=240)
    # Four times what it samples at once: it has work for as long as it takes to stop it.
    await world.ask(*(a_task(world.job.job_id, i, max_tokens=200) for i in range(1, tasks)))
    await wait_until("sampling", lambda: service.metric("millrace_rollout_in_flight_requests") > 0, service)
    descendants = service.descendants()
    stopped = next(process for process in descendants if "EngineCore" in " ".join(process.cmdline()))
    stopped.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    while "the engine hangs: process" not in service.log():
        assert time.monotonic() - began < 2 * PERIOD_S + 2.0, service.log()
        await asyncio.sleep(0.1)
    assert await asyncio.to_thread(service.process.wait, 30) == 1, service.log()
    assert await gone(descendants, 5) == [], "a stopped process never wakes up"
    done += await drain_groups(world)
    left = await world.redis.xlen(keys.stream(world.job.job_id, Stage.TASKS))
    assert len({group.task.group_id for group in done}) + left == tasks


async def drain_groups(world: World) -> list[RolloutGroup]:
    """The groups that are on the stream now."""
    count = await world.redis.xlen(keys.stream(world.job.job_id, Stage.ROLLOUTS))
    return await world.groups(count) if count else []
