from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.spec.job import JobSpec

Event = dict[str, str]


@pytest.fixture
async def job_id(store: JobStore, document: dict[str, Any]) -> str:
    return (await store.create(JobSpec.model_validate(document))).id


@pytest.fixture
async def live(process: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Asks the running process: in process, an answer would only come when it is whole."""
    headers = {"Authorization": f"Bearer {(process.home / 'gateway.token').read_text().strip()}"}
    async with httpx.AsyncClient(base_url=process.url, headers=headers, timeout=60) as opened:
        yield opened


async def events(answer: httpx.Response) -> AsyncGenerator[Event]:
    """Server-sent events, by their text format: fields until an empty line; a line that begins with a colon is a comment."""
    fields: Event = {}
    async for line in answer.aiter_lines():
        if line.startswith(":"):
            yield {"comment": line[1:].strip()}
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield fields
            fields = {}


async def finish(store: JobStore, job_id: str) -> None:
    await store.transition(job_id, JobState.SUCCEEDED, allowed=list(JobState))


async def test_a_stream_tells_what_was_then_what_happens_and_ends_with_the_job(
    live: httpx.AsyncClient, store: JobStore, job_id: str
) -> None:
    await store.history.event(job_id, "step", {"step": 1, "text": "é\nnew line"})
    told: list[Event] = []
    async with live.stream("GET", f"/jobs/{job_id}/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for event in events(answer):
            told.append(event)
            if len(told) == 2:
                await store.history.event(job_id, "step", {"step": 2})
            if len(told) == 3:
                await finish(store, job_id)
    assert [event["event"] for event in told] == ["state", "step", "step", "state", "end"]
    data = [json.loads(event["data"]) for event in told]
    assert [item.get("state", item.get("step")) for item in data] == ["queued", 1, 2, "succeeded", "succeeded"]
    assert data[1]["text"] == "é\nnew line"
    assert all(item["at"] > 0 for item in data[:-1])
    ids = [event["id"] for event in told[:-1]]
    assert ids == sorted(set(ids))
    assert "id" not in told[-1]


async def test_a_stream_resumes_after_the_last_event_that_was_seen(
    live: httpx.AsyncClient, store: JobStore, job_id: str
) -> None:
    for step in range(1, 501):
        await store.history.event(job_id, "step", {"step": step})
    seen: list[Event] = []
    async with live.stream("GET", f"/jobs/{job_id}/events") as answer:
        async for event in events(answer):
            seen.append(event)
            if len(seen) == 250:
                break
    await finish(store, job_id)
    async with live.stream("GET", f"/jobs/{job_id}/events", headers={"Last-Event-ID": seen[-1]["id"]}) as answer:
        seen += [event async for event in events(answer)]
    steps = [json.loads(event["data"])["step"] for event in seen if event["event"] == "step"]
    assert steps == list(range(1, 501))


async def test_a_reader_of_an_ended_job_is_told_not_to_come_back(
    client: httpx.AsyncClient, store: JobStore, redis: redis.asyncio.Redis, job_id: str
) -> None:
    await finish(store, job_id)
    whole = await client.get(f"/jobs/{job_id}/events")
    assert [line for line in whole.text.splitlines() if line.startswith("event")] == [
        "event: state",
        "event: state",
        "event: end",
    ]
    entries: Any = await redis.xrevrange(keys.events(job_id), count=1)
    [(last, _)] = entries
    again = await client.get(f"/jobs/{job_id}/events", headers={"Last-Event-ID": last.decode()})
    assert (again.status_code, again.content) == (204, b"")


@pytest.mark.parametrize("last", ["x", "1-2-3", "-1-0", "1", "(0-0", "9" * 20 + "-0"])
async def test_an_id_that_is_none_is_named(client: httpx.AsyncClient, job_id: str, last: str) -> None:
    answer = await client.get(f"/jobs/{job_id}/events", headers={"Last-Event-ID": last})
    assert answer.status_code == 422
    assert answer.json()["error"]["fields"][0]["field"] == "Last-Event-ID"


async def test_a_quiet_stream_is_kept_open_by_heartbeats(
    client: httpx.AsyncClient, store: JobStore, job_id: str
) -> None:
    async def end_soon() -> None:
        await asyncio.sleep(0.7)
        await finish(store, job_id)

    ending = asyncio.create_task(end_soon())
    text = (await client.get(f"/jobs/{job_id}/events")).text
    await ending
    assert text.count(": ping") >= 2


async def test_an_event_that_cannot_be_read_does_not_end_the_stream(
    client: httpx.AsyncClient, store: JobStore, redis: redis.asyncio.Redis, job_id: str
) -> None:
    entries: list[dict[Any, Any]] = [
        {"x": "y"},
        {"kind": "k", "d": "{"},
        {"kind": "k", "d": "[NaN]"},
        {"kind": "k", "at": "soon"},
    ]
    for fields in entries:
        await redis.xadd(keys.events(job_id), fields)
    await finish(store, job_id)
    text = (await client.get(f"/jobs/{job_id}/events")).text
    assert text.count("event: ") == 7
    assert "NaN" not in text


async def test_streams_are_counted_while_they_are_open(live: httpx.AsyncClient, job_id: str) -> None:
    async def open_streams() -> float:
        lines = (await live.get("/metrics")).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("millrace_gateway_event_streams "))

    async with live.stream("GET", f"/jobs/{job_id}/events") as answer:
        stream = events(answer)
        assert (await anext(stream))["event"] == "state"
        assert await open_streams() == 1
        await stream.aclose()
    for _ in range(200):
        if not await open_streams():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the stream is still counted 10 s after it was closed")
