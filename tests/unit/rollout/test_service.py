"""The process around the engine: its health, its watchdog, a job that it cannot serve. No engine is started."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common.config.settings import Platform, Settings
from services.common.errors import ConfigError, MillraceError, ModelError
from services.common.jobs import deaths
from services.common.jobs.follower import HUNG_AFTER_S
from services.common.jobs.record import ActiveJob
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.service.heartbeat import live_workers
from services.common.service.lifecycle import Drain
from services.common.spec.job import JobSpec
from services.rollout.engine.engine import Engine
from services.rollout.engine.update import EngineError
from services.rollout.service import RolloutService, run
from services.rollout.session import Wiring
from tests.unit.common.models.test_prompts import TEMPLATE, save

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
    monkeypatch.setattr(rollout._monitor, "fault", lambda: "the engine hangs: no token for 121 s")
    with pytest.raises(EngineError, match="no token for 121 s"):
        await rollout.watchdog()
    assert killed == [True]
    assert rollout.healthy() == "the engine hangs: no token for 121 s"


async def test_a_process_that_no_longer_looks_is_unhealthy(service: tuple[RolloutService, Engine, Drain]) -> None:
    rollout, _, _ = service
    assert rollout.ready() == "starting"
    rollout._follower._looked_at = time.monotonic() - HUNG_AFTER_S - 1
    assert "no look" in (rollout.healthy() or "")
    rollout._follower._looked_at = time.monotonic()
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
    (worker,) = await live_workers(redis)
    assert (worker.name, worker.state, worker.job_id) == ("r0", "idle", None)
    assert str(tmp_path / "missing") in str(worker.detail["trouble"])
    drain.request()
    await asyncio.wait_for(running, 20)
    assert await live_workers(redis) == []


def unknown_kind(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["type"] = "Nope"
    (folder / "tokenizer.json").write_text(json.dumps(document))


def truncated(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])


def no_shapes(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ' + "[" * 100_000)


@pytest.mark.parametrize("spoil", [unknown_kind, truncated, no_shapes])
async def test_what_a_job_brought_and_cannot_be_loaded_is_a_death_of_the_job_and_not_of_the_service(
    redis: Redis, redis_url: str, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    model = save(tmp_path / "model", TEMPLATE)
    spoil(model)
    drain = Drain()
    settings = Settings.model_validate(
        {"home": tmp_path, "REDIS_URL": redis_url, "worker": "r0", "drain_timeout_s": 5.0}
    )
    running = asyncio.create_task(run(settings, drain=drain))
    await JobStore(redis).activate(ActiveJob("job-1", 1, "127.0.0.1:1", 0, str(model), SPEC.model_dump(mode="json")))
    async with asyncio.timeout(60):
        while not (found := await deaths.deaths(redis, "job-1")) and not running.done():
            await asyncio.sleep(0.05)
    assert [(death.worker, death.loading) for death in found] == [("r0", True)]
    assert str(model) in found[0].cause
    assert not running.done()
    assert await redis.hgetall(keys.serving("r0")) == {}
    drain.request()
    await asyncio.wait_for(running, 20)


async def attached_to(rollout: RolloutService, redis: Redis, tmp_path: Path) -> None:
    """The job is active, and the service attached to it; its engine is what the test made of it."""
    job = ActiveJob("job-1", 1, "127.0.0.1:1", 0, str(tmp_path / "tiny"), SPEC.model_dump(mode="json"))
    await JobStore(redis).activate(job)
    await rollout._look({"job-1": job})


async def fails(engine: Engine, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object) -> None:
        await asyncio.sleep(0.05)
        raise error

    async def last_error() -> str:
        return "ValueError: Head size 16 is not supported"

    monkeypatch.setattr(engine, "start", start)
    monkeypatch.setattr(engine, "last_error", last_error)


@pytest.mark.parametrize("sampled", [True, False])
async def test_an_engine_that_dies_is_counted_once_with_its_own_last_words_whoever_notices_it(
    service: tuple[RolloutService, Engine, Drain], redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    sampled: bool,
) -> None:  # fmt: skip
    rollout, engine, _ = service
    await fails(engine, EngineError("the engine died"), monkeypatch)
    await attached_to(rollout, redis, tmp_path)
    assert json.loads((await redis.hgetall(keys.serving("r0")))[b"job-1"])["loading"] is True
    rollout._sampled = sampled
    monkeypatch.setattr(engine, "check", lambda: (_ for _ in ()).throw(EngineError("the engine's processes died")))
    ended = await asyncio.gather(rollout.attach(), rollout.watchdog(), return_exceptions=True)
    assert [type(error) for error in ended] == [EngineError, EngineError]
    (death,) = await deaths.deaths(redis, "job-1")
    assert death.cause.endswith("died: ValueError: Head size 16 is not supported")
    assert death.loading is not sampled
    assert await redis.hgetall(keys.serving("r0")) == {}


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (RedisConnectionError("gone"), None),
    ],
)
async def test_any_other_end_is_the_jobs_unless_it_is_redis_or_the_machines(
    service: tuple[RolloutService, Engine, Drain], redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    error: Exception, cause: str | None,
) -> None:  # fmt: skip
    rollout, engine, _ = service
    await fails(engine, error, monkeypatch)
    await attached_to(rollout, redis, tmp_path)
    with pytest.raises(type(error)):
        await rollout.attach()
    found = await deaths.deaths(redis, "job-1")
    assert [death.cause.partition(": ValueError")[0] for death in found] == ([cause] if cause else [])


async def test_a_setting_that_is_wrong_here_is_no_death_and_no_end(
    service: tuple[RolloutService, Engine, Drain], redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, engine, drain = service
    await fails(engine, ConfigError("stage directory /x is in use"), monkeypatch)
    await attached_to(rollout, redis, tmp_path)
    attaching = asyncio.create_task(rollout.attach())
    async with asyncio.timeout(10):
        while not rollout._trouble:
            await asyncio.sleep(0.05)
    assert await deaths.deaths(redis, "job-1") == []
    drain.request()
    await asyncio.wait_for(attaching, 10)
    assert await redis.hgetall(keys.serving("r0")) == {}


async def test_a_job_that_is_tried_again_here_is_counted_each_time(
    service: tuple[RolloutService, Engine, Drain], redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, engine, drain = service
    monkeypatch.setattr("services.rollout.service.RETRY_INTERVAL_S", 0.1)
    await fails(engine, ModelError("the engine hangs while it starts"), monkeypatch)
    await attached_to(rollout, redis, tmp_path)
    attaching = asyncio.create_task(rollout.attach())
    async with asyncio.timeout(20):
        while len(await deaths.deaths(redis, "job-1")) < 2:
            await asyncio.sleep(0.05)
    drain.request()
    await asyncio.wait_for(attaching, 10)


async def test_a_killed_servers_next_process_counts_its_death(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    await deaths.serving(redis, "job-1", "r0", loading=False)
    drain = Drain()
    settings = Settings.model_validate({"home": tmp_path, "REDIS_URL": redis_url, "worker": "r0"})
    running = asyncio.create_task(run(settings, drain=drain))
    async with asyncio.timeout(20):
        while not (found := await deaths.deaths(redis, "job-1")):
            await asyncio.sleep(0.05)
    assert [(death.worker, death.cause) for death in found] == [("r0", deaths.KILLED)]
    drain.request()
    await asyncio.wait_for(running, 20)


async def test_a_model_that_loads_keeps_nobody_waiting(
    service: tuple[RolloutService, Engine, Drain], redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, engine, _ = service

    async def start(*_: object) -> None:
        await asyncio.sleep(600)

    monkeypatch.setattr(engine, "start", start)
    await attached_to(rollout, redis, tmp_path)
    rollout._follower._looked_at = time.monotonic()
    await rollout._beat()
    (worker,) = await live_workers(redis)
    assert (rollout.ready(), worker.state) == (None, "loading")
    await rollout._detach()
    assert await redis.hgetall(keys.serving("r0")) == {}
    assert await deaths.deaths(redis, "job-1") == []


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
