"""Many clients at once, over real sockets: the gateway's limits are the gateway's, and nobody waits for others' streams."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.jobs.store import JobStore
from services.common.spec.job import JobSpec
from services.gateway.middleware.limits import WAIT_S
from tests.gateway_process import GatewayProcess, running

STREAMS = 150
"""More than redis-py's own pool has connections."""


def client_of(process: GatewayProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=process.url, headers=process.bearer, timeout=60, limits=limits)


@pytest.fixture
async def job_id(store: JobStore, document: dict[str, Any]) -> str:
    return (await store.create(JobSpec.model_validate(document))).id


@asynccontextmanager
async def streams(client: httpx.AsyncClient, job_id: str, count: int) -> AsyncIterator[list[httpx.Response]]:
    """So many event streams, opened at the same time."""

    async def opened() -> httpx.Response:
        return await client.send(client.build_request("GET", f"/jobs/{job_id}/events"), stream=True)

    answers = await asyncio.gather(*(opened() for _ in range(count)))
    try:
        yield answers
    finally:
        await asyncio.gather(*(answer.aclose() for answer in answers))


async def test_requests_are_answered_beside_more_streams_than_redis_has_connections(
    process: GatewayProcess, job_id: str
) -> None:
    async with client_of(process) as client, streams(client, job_id, STREAMS) as opened:
        assert {answer.status_code for answer in opened} == {200}
        answers = await asyncio.gather(*(client.get(f"/jobs/{job_id}") for _ in range(STREAMS)))
        assert {answer.status_code for answer in answers} == {200}


async def answered(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """The answer to a client that comes again when it is told to; nobody is told so who has not waited for a place."""
    while True:
        begun = time.monotonic()
        answer = await client.get(path)
        if answer.status_code != 429:
            return answer
        assert time.monotonic() - begun >= WAIT_S
        await asyncio.sleep(int(answer.headers["retry-after"]))


async def test_four_hundred_requests_at_once_are_all_answered(process: GatewayProcess, job_id: str) -> None:
    async with client_of(process) as client, asyncio.timeout(60):
        answers = await asyncio.gather(*(answered(client, f"/jobs/{job_id}") for _ in range(400)))
    assert {answer.status_code for answer in answers} == {200}


async def test_a_stream_too_many_is_told_to_come_again_and_has_the_permit_of_one_that_goes(
    redis_url: str, home: Path, job_id: str
) -> None:
    with running(redis_url, home, MILLRACE_MAX_EVENT_STREAMS="3") as process:
        async with client_of(process) as client, streams(client, job_id, 3) as opened:
            assert {answer.status_code for answer in opened} == {200}
            refused = await client.get(f"/jobs/{job_id}/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many")
            assert int(refused.headers["retry-after"]) > 0
            assert "MILLRACE_MAX_EVENT_STREAMS" in refused.json()["error"]["message"]
            assert (await client.get(f"/jobs/{job_id}")).status_code == 200
            await opened[0].aclose()
            deadline = time.monotonic() + 20
            while True:
                async with streams(client, job_id, 1) as (again,):
                    if again.status_code == 200:
                        return
                assert time.monotonic() < deadline, "the permit of a stream that was closed is not free again"
                await asyncio.sleep(0.05)


async def test_an_exhausted_pool_is_the_gateways_doing_and_not_redis(
    client: httpx.AsyncClient, app: Any, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = app.state.context.redis.connection_pool
    monkeypatch.setattr(pool, "_wait_s", 0.05)
    monkeypatch.setattr("services.gateway.routes.service.READY_TIMEOUT_S", 0.02)
    held = [await pool.get_connection() for _ in range(100)]
    for path in (f"/jobs/{job_id}", "/jobs", "/workers", "/readyz"):
        answer = await client.get(path)
        assert answer.status_code == 503
        assert "busy" in answer.json()["error"]["message"]
        assert "Redis" not in answer.text
        assert "job store" not in answer.text
        assert int(answer.headers["retry-after"]) > 0
    for connection in held:
        await pool.release(connection)
    assert (await client.get(f"/jobs/{job_id}")).status_code == 200


def test_a_kept_connection_is_answered_at_once(process: GatewayProcess) -> None:
    """Without TCP_NODELAY each answer waits 40 ms for the client's acknowledgement; the quickest of many says whether it does."""
    host, _, port = process.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    times = []
    for _ in range(60):
        began = time.perf_counter()
        connection.request("GET", "/jobs", headers=process.bearer)
        assert connection.getresponse().read()
        times.append(time.perf_counter() - began)
    connection.close()
    assert min(times[20:]) < 0.03, sorted(times)


async def test_a_foreign_name_is_misdirected_whoever_asks(process: GatewayProcess, job_id: str) -> None:
    async with client_of(process) as client:
        for path in ("/", "/console/", "/docs", "/metrics", f"/jobs/{job_id}", "/v1/models", "/jobs"):
            answer = await client.get(path, headers={"Host": "evil.example:8080"})
            assert answer.status_code == 421
            assert "error" in answer.json()
        assert (await client.get("/healthz", headers={"Host": "evil.example"})).status_code == 200
        assert (await client.get("/readyz", headers={"Host": "evil.example"})).status_code == 200
        assert (await client.get("/jobs", headers={"Host": "localhost:1234"})).status_code == 200
