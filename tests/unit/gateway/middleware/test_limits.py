from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.middleware.limits import MAX_BODY_BYTES, BodyLimit, RequestTimeout


async def count_body(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(str(len(body)))(scope, receive, send)


async def chunks(total: int, size: int = 65_536) -> AsyncIterator[bytes]:
    for start in range(0, total, size):
        yield b"x" * min(size, total - start)


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(
    ("size", "status"), [(0, 200), (MAX_BODY_BYTES, 200), (MAX_BODY_BYTES + 1, 413), (40_000_000, 413)]
)
async def test_a_body_of_one_mebibyte_passes_and_one_byte_more_does_not(
    size: int, status: int, announced: bool
) -> None:
    async with client_of(BodyLimit(count_body)) as client:
        answer = await client.post("/", content=b"x" * size if announced else chunks(size))
    assert answer.status_code == status
    if status == 200:
        assert answer.text == str(size)
    else:
        assert answer.json()["error"]["code"] == "body_too_large"


async def test_the_route_never_runs_for_a_refused_body() -> None:
    async def never(*_: object) -> None:
        raise AssertionError("the route ran")

    async with client_of(BodyLimit(never, max_bytes=10)) as client:
        assert (await client.post("/", content=chunks(11, 1))).status_code == 413


@pytest.mark.parametrize("announced", [b"-1", b"1e3", b"", b"99999999999999999999999"])
async def test_a_false_announcement_does_not_get_past_the_count(announced: bytes) -> None:
    sent: list[Message] = []
    messages = iter([{"type": "http.request", "body": b"x" * 8, "more_body": True}] * 3)

    async def receive() -> Message:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", announced)]}
    await BodyLimit(count_body, max_bytes=10)(scope, receive, send)
    assert sent[0]["status"] == 413


async def test_a_body_that_does_not_arrive_ends_with_408() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(30)
        yield b"x"

    async with client_of(BodyLimit(count_body, timeout_s=0.05)) as client:
        answer = await client.post("/", content=slow())
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")


async def test_a_route_that_does_not_answer_ends_with_504() -> None:
    async def hang(*_: object) -> None:
        await asyncio.sleep(30)

    async with client_of(RequestTimeout(hang, timeout_s=0.05)) as client:
        answer = await client.get("/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


async def test_an_answer_that_has_begun_is_not_cut_off() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(4):
            await asyncio.sleep(0.05)
            yield b"part "

    async with client_of(RequestTimeout(StreamingResponse(parts()), timeout_s=0.1)) as client:
        assert (await client.get("/")).text == "part part part part "


async def test_a_timeout_of_the_route_itself_is_not_taken_for_the_limit() -> None:
    async def fail(*_: object) -> None:
        raise TimeoutError("something else")

    async with client_of(RequestTimeout(fail, timeout_s=5)) as client:
        with pytest.raises(TimeoutError, match="something else"):
            await client.get("/")
