"""Processes of the environment service: they say where they are, drain, and die; episodes begin at those that are there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from services.common.environments.servers import KNOWN_FOR_S, EnvironmentServers
from services.common.environments.types import EnvironmentFailed, Reason
from services.common.service.heartbeat import WorkerStatus, live_workers
from services.common.streams.types import EnvironmentCall, Purpose, Task

PATIENCE_S = 60.0
CALL = EnvironmentCall(
    "guess_number", {}, 3, max_turns=3, max_turn_tokens=8, max_observation_tokens=64, step_timeout_s=10.0
)
TASK = Task(
    job_id="job", lineage=1, group_id=0, attempt=1, purpose=Purpose.TRAIN, prompt=(), data_source="environment:guess_number",
    ground_truth="", extra_info={}, group_size=2, temperature=1.0, max_tokens=64, min_policy_version=0, timeout_s=60.0, environment=CALL,
)  # fmt: skip
Start = Callable[[str], Awaitable[asyncio.subprocess.Process]]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def status_of(redis: Redis, name: str) -> WorkerStatus | None:
    return next((status for status in await live_workers(redis) if status.name == name), None)


@pytest.fixture
async def start(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Start]:
    started: list[asyncio.subprocess.Process] = []

    async def begin(name: str) -> asyncio.subprocess.Process:
        environment = {**os.environ, "REDIS_URL": redis_url, "MILLRACE_WORKER": name, "MILLRACE_HOME": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.environment", env=environment, stderr=asyncio.subprocess.PIPE
        )
        started.append(process)

        async def is_there() -> bool:
            return await status_of(redis, name) is not None

        await until(is_there)
        return process

    yield begin
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
async def servers(redis: Redis) -> AsyncIterator[EnvironmentServers]:
    made = EnvironmentServers(redis, None)
    yield made
    await made.close()


async def test_a_server_that_drains_ends_its_episodes_and_has_no_new_ones(
    redis: Redis, start: Start, servers: EnvironmentServers
) -> None:
    first, _ = await start("environment-0"), await start("environment-1")
    async with AsyncExitStack() as episodes:
        worlds = [await episodes.enter_async_context(servers.episode(TASK)) for _ in range(2)]
        for world in worlds:
            assert not (await world.reset()).done
        first.send_signal(signal.SIGTERM)

        async def drains() -> bool:
            status = await status_of(redis, "environment-0")
            return status is not None and status.state == "draining" and status.environment_address is None

        await until(drains)
        await asyncio.sleep(KNOWN_FOR_S)
        for world in worlds:
            assert (await world.step("0")).messages, "the episodes go on"
        other = await status_of(redis, "environment-1")
        assert other is not None
        async with servers.episode(TASK) as one, servers.episode(TASK) as two:
            await asyncio.gather(one.reset(), two.reset())
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{other.metrics_port}") as http:
                assert "millrace_environment_in_flight_episodes 3.0" in (await http.get("/metrics")).text
        assert first.returncode is None
    _, errors = await asyncio.wait_for(first.communicate(), PATIENCE_S)
    assert await first.wait() == 0, errors.decode()
    assert await status_of(redis, "environment-0") is None
    assert {json.loads(line)["service"] for line in errors.decode().splitlines()} == {"environment"}


async def test_an_episode_on_a_server_that_dies_fails_and_the_next_attempt_is_played_elsewhere(
    start: Start, servers: EnvironmentServers
) -> None:
    processes = [await start("environment-0"), await start("environment-1")]
    async with AsyncExitStack() as episodes:
        worlds = [await episodes.enter_async_context(servers.episode(TASK)) for _ in range(2)]
        for world in worlds:
            await world.reset()
        processes[0].kill()
        await processes[0].wait()
        answers = await asyncio.gather(*(world.step("0") for world in worlds), return_exceptions=True)
        (failure,) = [answer for answer in answers if isinstance(answer, BaseException)]
        assert isinstance(failure, EnvironmentFailed)
        assert (failure.reason, failure.permanent) == (Reason.LOST, False)
    for _ in range(4):  # its heartbeat is still in the list
        async with servers.episode(TASK) as world:
            assert not (await world.reset()).done
