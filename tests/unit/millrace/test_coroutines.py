"""The same client for asyncio: it has every method, blocks no event loop, and leaves nothing behind when it is cancelled."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Iterator
from typing import Any, assert_type

import httpx
import pytest

from millrace import follower
from millrace.client import Client
from millrace.coroutines import AsyncClient, AsyncJob
from millrace.follower import StepTrained
from millrace.job import Job, JobFailedError
from tests.unit.millrace.stand_in import StandIn, on_transport

PLUMBING = {"gateway", "checked", "watch"}
"""What only the blocking twin needs."""


def client_of(gateway: StandIn) -> AsyncClient:
    client = AsyncClient("http://gateway", "secret")
    on_transport(client.blocking.gateway, gateway)
    return client


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - PLUMBING


@pytest.mark.parametrize(("blocking", "twin"), [(Client, AsyncClient), (Job, AsyncJob)])
def test_a_twin_has_every_method_with_its_parameters(blocking: type, twin: type) -> None:
    assert public(blocking) <= public(twin)
    for name in public(blocking):
        one, other = getattr(blocking, name), getattr(twin, name)
        if not isinstance(one, property):
            assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters), name


async def test_jobs_are_submitted_followed_and_resubmitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.0)
    gateway = StandIn(3)
    client = client_of(gateway)
    job = assert_type(await client.job("demo"), AsyncJob)
    assert [event.step async for event in job.follow() if isinstance(event, StepTrained)] == [1, 2, 3]
    assert (job.state, job.has_ended, await job.refresh() is job) == ("succeeded", True, True)
    again = await job.resubmit({"learner.lr": 3e-6})
    assert_type(await client.jobs(limit=3), list[AsyncJob])
    assert_type(await job.spec(), dict[str, Any])
    assert again.record["spec"]["learner"] == {"lr": 3e-6}
    await client.close()


async def test_a_failed_job_raises_unless_it_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.0)
    with pytest.raises(JobFailedError, match="rank 0 died"):
        await (await client_of(StandIn(1, "failed", "rank 0 died")).job("demo")).wait()
    job = await client_of(StandIn(1, "failed", "rank 0 died")).job("demo")
    assert (await job.wait(check=False)).state == "failed"


async def test_a_cancelled_wait_asks_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.01)
    gateway = StandIn(10**9)
    job = await client_of(gateway).job("demo")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await job.wait()
    await asyncio.sleep(0.1)  # a request that was under way ends
    asked = len(gateway.asked)
    await asyncio.sleep(0.1)
    assert len(gateway.asked) == asked > 2


@pytest.mark.parametrize("following", [False, True])
async def test_the_event_loop_goes_on_during_a_request(*, following: bool) -> None:
    answering, gateway = threading.Event(), StandIn(1)
    client = client_of(gateway)
    job = await client.job("demo")

    def answer(request: httpx.Request) -> httpx.Response:
        assert answering.wait(20)
        return gateway(request)

    on_transport(client.blocking.gateway, answer)
    reading = asyncio.create_task(anext(job.follow()) if following else job.refresh())
    await asyncio.sleep(0.05)
    assert not reading.done()
    answering.set()
    await reading


async def test_an_answer_is_streamed_and_read_whole() -> None:
    client = client_of(StandIn())
    async with await client.stream_chat("hi", model="demo") as answer:
        assert [piece async for piece in answer] == ["for", "ty"]
    assert answer.policy_version == {"min": 3, "max": 4}
    assert await client.chat("hi", model="demo") == "forty"


class Endless(httpx.SyncByteStream):
    """An answer that goes on until it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": null}]}\n\n'

    def close(self) -> None:
        self.closed.set()


async def test_a_cancelled_answer_is_closed_and_its_thread_ends() -> None:
    stream = Endless()
    client = client_of(StandIn())
    job = await client.job("demo")
    on_transport(client.blocking.gateway, lambda _: httpx.Response(200, stream=stream))
    answer = await client.stream_chat("hi", model=job)  # kept: it is not the garbage collector that ends it
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await answer.read()
    assert await asyncio.to_thread(stream.closed.wait, 10)
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("millrace-chat") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert set(answer.text) == {"x"}
    answer.close()
