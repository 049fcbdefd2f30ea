"""Limits of one request: the size of its body, and the time to its answer; two small ASGI layers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import error_answer

MAX_BODY_BYTES = 1024 * 1024
DISCARD_BYTES = 16 * 1024 * 1024
"""Bytes of a refused body that are still read and dropped, so that a client which is still sending receives the answer."""
DISCARD_S = 2.0
BODY_TIMEOUT_S = 15.0
REQUEST_TIMEOUT_S = 45.0


class BodyLimit:
    """Reads and counts the body before the route runs: 413 beyond the limit, 408 when it arrives too slowly."""

    def __init__(self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S) -> None:
        """Holds at most `max_bytes` and one chunk per request in memory."""
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                messages = await self._read(scope, receive)
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout_s:g} s"
            await error_answer(408, message)(scope, receive, send)
            return
        if messages is None:
            await _discard(receive)
            message = f"the body is larger than {self._max_bytes} bytes"
            await error_answer(413, message)(scope, receive, send)
            return
        await self._app(scope, _replay(messages, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> list[Message] | None:
        """The request's messages; None as soon as they are too large."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            return None
        messages: list[Message] = []
        size = 0
        while not messages or _more(messages[-1]):
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                return None
            messages.append(message)
        return messages


class RequestTimeout:
    """Answers 504 when an answer has not begun in time; one that has begun (a stream of events) may take any time."""

    def __init__(
        self, app: ASGIApp, *, timeout_s: float = REQUEST_TIMEOUT_S, longer_s: Mapping[str, float] | None = None
    ) -> None:
        """`longer_s`: paths with a limit of their own."""
        self._app = app
        self._timeout_s = timeout_s
        self._longer_s = dict(longer_s or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        timeout_s = self._longer_s.get(scope["path"], self._timeout_s)
        try:
            async with asyncio.timeout(timeout_s) as timer:

                async def send_and_disarm(message: Message) -> None:
                    timer.reschedule(None)
                    await send(message)

                await self._app(scope, receive, send_and_disarm)
        except TimeoutError:
            if not timer.expired():
                raise
            await error_answer(504, f"no answer within {timeout_s:g} s")(scope, receive, send)


def _more(message: Message) -> bool:
    return message["type"] == "http.request" and bool(message.get("more_body", False))


async def _discard(receive: Receive) -> None:
    """Reads the rest for a moment and drops it."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while size <= DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not _more(message):
                    return


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """Returns these messages again, then those that follow them."""
    pending = iter(messages)

    async def replayed() -> Message:
        message = next(pending, None)
        return await receive() if message is None else message

    return replayed
