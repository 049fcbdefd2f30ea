"""A connection that does not finish its headers is closed; one whose answer takes its time is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.gateway import header_deadline
from services.gateway.header_deadline import HeaderDeadline, HeaderDeadlineProtocol

DEADLINE_S, ANSWER_S = 0.5, 0.8
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class HeaderDeadlineH11(HeaderDeadline, H11Protocol):
    """Where httptools is not installed."""


async def slow_answer(_scope: Scope, _receive: Receive, send: Send) -> None:
    await asyncio.sleep(ANSWER_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(params=[HeaderDeadlineProtocol, HeaderDeadlineH11])
async def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(header_deadline, "HEADERS_S", DEADLINE_S)
    config = uvicorn.Config(
        slow_answer, port=0, http=request.param, ws="none", lifespan="off", log_config=None, timeout_keep_alive=5
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(REQUEST)
    return await reader.readuntil(b"ok")


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: he"], ids=["silent", "half a header"])
async def test_a_connection_without_whole_headers_is_closed(port: int, begun: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    began = time.monotonic()
    await asyncio.wait_for(reader.read(), 5.0)
    assert time.monotonic() - began == pytest.approx(DEADLINE_S, abs=0.4)
    writer.close()


async def test_headers_that_trickle_do_not_move_the_deadline(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began, closed = time.monotonic(), asyncio.create_task(reader.read())
    writer.write(b"GET / HTTP/1.1\r\n")
    while not closed.done() and time.monotonic() - began < 5.0:
        writer.write(b"X: x\r\n")
        await asyncio.sleep(0.05)
    assert time.monotonic() - began == pytest.approx(DEADLINE_S, abs=0.4)
    writer.close()


async def test_a_slow_answer_and_a_kept_connection_are_left_alone(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert (await ask(reader, writer)).startswith(b"HTTP/1.1 200")
    await asyncio.sleep(DEADLINE_S + 0.3)  # idle: the time of kept connections counts
    assert b"HTTP/1.1 200" in await ask(reader, writer)
    writer.write(b"GET / HTTP/1.1\r\n")
    began = time.monotonic()
    await asyncio.wait_for(reader.read(), 5.0)
    assert time.monotonic() - began == pytest.approx(DEADLINE_S, abs=0.4)
    writer.close()
