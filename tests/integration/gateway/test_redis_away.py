from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as sync_redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.common.config.settings import Settings
from services.common.redis.connection import connect
from services.gateway.admission.admission import Admission
from services.gateway.app import create_app
from tests.gateway_process import running
from tests.own_redis import OwnRedis

PATIENCE_S = 30.0

ROUTES = ["/jobs", "/jobs/demo-00000000", "/jobs/demo-00000000/metrics", "/jobs/demo-00000000/events", "/workers"]


@pytest.fixture
async def cut_off(home: Path, token: str, admission: Admission) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway whose Redis is not there."""
    redis = connect("redis://user:canary-password@127.0.0.1:1/0")
    redis.set_retry(Retry(NoBackoff(), 0))
    settings = Settings(home=home, gateway_hosts=["gateway"])
    transport = httpx.ASGITransport(create_app(settings, redis, token, admission=admission))
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as opened:
        yield opened
    await redis.aclose()


@pytest.mark.parametrize("path", [*ROUTES, "/readyz"])
async def test_without_redis_every_read_says_try_again(
    cut_off: httpx.AsyncClient, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await cut_off.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert "canary" not in answer.text + caplog.text


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}])
async def test_without_redis_a_good_job_is_not_lost_but_put_off(
    cut_off: httpx.AsyncClient, document: dict[str, Any], headers: dict[str, str]
) -> None:
    answer = await cut_off.post("/jobs", json=document, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_without_redis_the_process_is_still_healthy_and_measured(cut_off: httpx.AsyncClient) -> None:
    assert (await cut_off.get("/healthz")).status_code == 200
    assert "millrace_gateway_redis_up 0.0" in (await cut_off.get("/metrics")).text
    assert (await cut_off.get("/jobs/schema")).status_code == 200


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    """A server that the test may stop."""
    server = OwnRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


def test_the_gateway_outlives_a_restart_of_redis_and_loses_no_job(
    own_redis: OwnRedis, home: Path, document: dict[str, Any]
) -> None:
    with (
        running(own_redis.url, home) as process,
        httpx.Client(base_url=process.url, headers=process.bearer, timeout=60) as client,
    ):
        job = client.post("/jobs", json=document).json()
        own_redis.stop()
        started = time.monotonic()
        assert client.get("/jobs").status_code == 503
        assert time.monotonic() - started < 10
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
        own_redis.start()
        assert client.get("/readyz").status_code == 200
        assert client.get(f"/jobs/{job['id']}").json() == job
        assert client.post("/jobs", json=document).status_code == 201


def test_an_emptied_redis_gets_its_jobs_and_their_keys_back(
    own_redis: OwnRedis, home: Path, document: dict[str, Any]
) -> None:
    with (
        running(own_redis.url, home) as process,
        httpx.Client(base_url=process.url, headers=process.bearer, timeout=60) as client,
    ):
        job = client.post("/jobs", json=document, headers={"Idempotency-Key": "k"}).json()
        other = client.post("/jobs", json=document).json()
        client.post(f"/jobs/{other['id']}/cancel")
        before = client.get("/jobs").json()

        def await_jobs() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while client.get("/jobs").json() != before:
                assert time.monotonic() < deadline, client.get("/jobs").json()
                time.sleep(0.1)

        for again in ("at once", "after a second"):
            with sync_redis.Redis.from_url(own_redis.url) as direct:
                direct.flushall()
            if again == "at once":
                assert client.post("/jobs", json=document, headers={"Idempotency-Key": "k"}).json() == job
            await_jobs()
        own_redis.stop()
        shutil.rmtree(own_redis.folder)  # another Redis at the same address
        own_redis.start()
        await_jobs()


async def test_a_job_that_only_its_folder_knows_is_said_to_come_back_and_not_to_be_unknown(
    client: httpx.AsyncClient, redis: Redis, document: dict[str, Any]
) -> None:
    job = (await client.post("/jobs", json=document)).json()
    await redis.flushall()
    for path in (f"/jobs/{job['id']}", f"/jobs/{job['id']}/metrics"):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) > 0
    assert (await client.get(f"/jobs/{job['id'][:-8]}00000000")).status_code == 404
