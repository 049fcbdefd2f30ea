"""An OpenAI-compatible server for tests of judges: answers, refuses, stalls and drops as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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
    troubles: list[web.StreamResponse | str] = field(default_factory=list)
    """Of the next requests, the first first: a response, `stall` or `drop`; then `always`."""
    always: web.StreamResponse | str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    delay_s: float = 0.0
    _now: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            return await self._handle(request)
        finally:
            self._now -= 1

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
        if isinstance(trouble, web.StreamResponse):
            return trouble
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
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
