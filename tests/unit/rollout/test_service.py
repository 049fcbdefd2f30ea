"""The process around the engine: its health, its watchdog, a job that it cannot serve. No engine is started."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.common.errors import MillraceError
from services.common.job_records import ActiveJob
from services.common.jobs import JobStore
from services.common.lifecycle import Drain
from services.common.settings import Platform, Settings
from services.common.spec import JobSpec
from services.common.workers import alive
from services.rollout.attachment import Wiring
from services.rollout.engine import Engine
from services.rollout.service import BLOCKED_S, RolloutService, run
from services.rollout.switch import EngineError

SPEC = JobSpec.model_validate({"model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}})


@pytest.fixture
async def service(redis: Redis, tmp_path: Path) -> tuple[RolloutService, Engine, Drain]:
    engine, drain = Engine(Platform.CPU), Drain()
    return RolloutService(Wiring(redis, redis, engine, Settings(home=tmp_path), "r0", drain)), engine, drain


async def test_an_engine_that_hangs_is_killed_and_the_process_ends(
    service: tuple[RolloutService, Engine, Drain], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, engine, _ = service
    killed: list[bool] = []
    monkeypatch.setattr(engine, "kill", lambda: killed.append(True))
    monkeypatch.setattr(rollout._watch, "trouble", lambda: "the engine hangs: no token for 121 s")
    with pytest.raises(EngineError, match="no token for 121 s"):
        await rollout.watchdog()
    assert killed == [True]
    assert rollout.healthy() == "the engine hangs: no token for 121 s"


async def test_a_process_that_no_longer_looks_is_unhealthy(service: tuple[RolloutService, Engine, Drain]) -> None:
    rollout, _, _ = service
    assert rollout.ready() == "starting"
    rollout._looked_at = time.monotonic() - BLOCKED_S - 1
    assert "no look" in (rollout.healthy() or "")
    rollout._looked_at = time.monotonic()
    assert (rollout.healthy(), rollout.ready()) == (None, None)


async def test_a_job_whose_model_is_missing_is_refused_by_name_and_the_service_lives_on(
    redis: Redis, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drain = Drain()
    settings = Settings.model_validate(
        {"home": tmp_path, "REDIS_URL": redis_url, "worker": "r0", "drain_timeout_s": 5.0}
    )
    running = asyncio.create_task(run(settings, drain=drain))
    job = ActiveJob("job-1", 1, "127.0.0.1:1", 0, str(tmp_path / "missing"), SPEC.model_dump(mode="json"))
    await JobStore(redis).activate(job)
    async with asyncio.timeout(60):
        while "cannot be served here" not in caplog.text and not running.done():
            await asyncio.sleep(0.05)
        await asyncio.sleep(2.5)  # one more heartbeat
    (worker,) = await alive(redis)
    assert (worker.name, worker.state, worker.job_id) == ("r0", "idle", None)
    assert str(tmp_path / "missing") in str(worker.detail["trouble"])
    drain.request()
    await asyncio.wait_for(running, 20)
    assert await alive(redis) == []


async def test_a_loop_that_dies_ends_the_process(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(_: object) -> None:
        raise MillraceError("the list of workers cannot be written")

    monkeypatch.setattr(RolloutService, "heartbeat", die)
    settings = Settings.model_validate(
        {"home": tmp_path, "REDIS_URL": redis_url, "worker": "r0", "drain_timeout_s": 5.0}
    )
    with pytest.raises(MillraceError, match="cannot be written"):
        await asyncio.wait_for(run(settings, drain=Drain()), 20)
    assert await redis.ping()
