"""An OpenAI-compatible server for tests of judges: answers, refuses, stalls and drops as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Reply = Callable[[dict[str, Any]], str]
"""The answer's text to a request."""


@dataclass
class JudgeServer:
    """What the server does next, and what it was asked."""

    url: str = ""
    reply: Reply = lambda _: "[[10]]"
    troubles: list[web.Response | str] = field(default_factory=list)
    """Of the next requests, the first first: a response, `stall` or `drop`; then `always`."""
    always: web.Response | str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    delay_s: float = 0.0
    held_s: list[float] = field(default_factory=list)
    """How long each request was open; of a stalled one, until the client gave it up."""
    _now: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        began = time.monotonic()
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            return await self._handle(request)
        finally:
            self._now -= 1
            self.held_s.append(time.monotonic() - began)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        trouble = self.troubles.pop(0) if self.troubles else self.always
        if trouble == "stall":
            await asyncio.sleep(600)
        if trouble == "drop":
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(600)
        if isinstance(trouble, web.Response):
            return web.Response(status=trouble.status, headers=trouble.headers, body=trouble.body)
        await asyncio.sleep(self.delay_s)
        return web.json_response(completion(self.reply(body)))


def completion(text: str) -> dict[str, Any]:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"object": "chat.completion", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


def refusal(status: int, **headers: str) -> web.Response:
    """An error of the server; `headers` with `_` for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.Response(status=status, headers=named, text=json.dumps({"error": {"message": f"status {status}"}}))


@asynccontextmanager
async def judge_server() -> AsyncIterator[JudgeServer]:
    """A server on a free port of loopback."""
    server = JudgeServer()
    app = web.Application(client_max_size=16 * 1024**2)
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]] = server.handle
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextmanager
def judge_thread() -> Iterator[JudgeServer]:
    """The same in a thread of its own, for tests that wait for other processes."""
    started: list[JudgeServer] = []
    ready, done = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with judge_server() as server:
            started.append(server)
            ready.set()
            await done.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10.0)
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10.0)
        loop.close()
