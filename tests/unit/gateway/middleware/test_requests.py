"""A kind of requests that has filled its places is refused; the other kinds have theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from services.gateway.middleware.limits import RequestLimit

REQUESTS = {
    "read": ("GET", "/jobs"),
    "write": ("POST", "/jobs/x/cancel"),
    "submission": ("POST", "/jobs"),
    "chat": ("POST", "/v1/chat/completions"),
    "open": ("GET", "/metrics"),
}


class Gate:
    """Holds requests until it opens."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.inside = 0

    async def answer(self, _: Request) -> Response:
        self.inside += 1
        await self.open.wait()
        return PlainTextResponse("ok")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def client(gate: Gate) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=[Route("/{path:path}", gate.answer, methods=["GET", "POST"])])
    limited = RequestLimit(
        app,
        limit=4,
        chats={"/v1/chat/completions"},
        open_paths={"/metrics", "/healthz"},
        exempt={"/healthz"},
        wait_s=0.1,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(limited), base_url="http://x") as opened:
        yield opened


async def fill(client: httpx.AsyncClient, gate: Gate, kind: str, places: int) -> list[asyncio.Task[httpx.Response]]:
    tasks = [asyncio.create_task(client.request(*REQUESTS[kind])) for _ in range(places)]
    while gate.inside < places:
        await asyncio.sleep(0.01)
    return tasks


@pytest.mark.parametrize(("kind", "places"), [("read", 4), ("write", 1), ("submission", 1), ("chat", 4), ("open", 1)])
async def test_who_finds_no_place_is_told_to_come_again_and_other_kinds_are_let_in(
    client: httpx.AsyncClient, gate: Gate, kind: str, places: int
) -> None:
    held = await fill(client, gate, kind, places)
    refused = await client.request(*REQUESTS[kind])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many")
    assert int(refused.headers["retry-after"]) > 0
    others = [asyncio.create_task(client.request(*REQUESTS[other])) for other in REQUESTS if other != kind]
    exempt = [asyncio.create_task(client.get(path)) for path in ("/healthz", "/jobs/x/events", "/jobs/x/events")]
    while gate.inside < places + len(others) + len(exempt):
        await asyncio.sleep(0.01)
    gate.open.set()
    assert {answer.status_code for answer in await asyncio.gather(*held, *others, *exempt)} == {200}
    assert (await client.request(*REQUESTS[kind])).status_code == 200


async def test_who_comes_a_moment_too_early_waits_for_a_place(client: httpx.AsyncClient, gate: Gate) -> None:
    held = await fill(client, gate, "submission", 1)
    waiting = asyncio.create_task(client.request(*REQUESTS["submission"]))
    await asyncio.sleep(0.02)
    gate.open.set()
    assert [answer.status_code for answer in await asyncio.gather(*held, waiting)] == [200, 200]


async def test_a_request_whose_client_goes_gives_its_place_back(client: httpx.AsyncClient, gate: Gate) -> None:
    for _ in range(3):
        (task,) = await fill(client, gate, "write", 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.inside = 0
    gate.open.set()
    assert (await client.request(*REQUESTS["write"])).status_code == 200
