"""Limits of requests: size of a body, time to an answer, and how many are in flight by kind, so that none blocks the others."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Collection, Mapping
from enum import StrEnum

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
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                messages = await self._read(scope, receive)
        except TimeoutError:
            await error_answer(408, f"the body did not arrive within {self._timeout_s:g} s")(scope, receive, send)
            return
        if messages is None:
            await _discard(receive)
            await error_answer(413, f"the body is larger than {self._max_bytes} bytes")(scope, receive, send)
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
        self._app, self._timeout_s, self._longer_s = app, timeout_s, dict(longer_s or {})

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


WAIT_S = 3.0
"""Longest wait at the limit."""
_STREAM = re.compile(r"/jobs/[^/]+/events")


class Kind(StrEnum):
    """Kinds of requests; each has its own limit."""

    READ = "reads"
    WRITE = "changes"
    SUBMIT = "submissions"
    CHAT = "chats"
    OPEN = "requests without a token"


_DIVISORS = {Kind.READ: 1, Kind.CHAT: 1, Kind.WRITE: 4, Kind.SUBMIT: 4, Kind.OPEN: 4}
"""Divisors of the limit: changes and submissions hold bodies in memory, and requests without a token must stay cheap."""


class RequestLimit:
    """Bounds the requests in flight of each kind."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limit: int,
        chats: Collection[str],
        open_paths: Collection[str],
        exempt: Collection[str],
        wait_s: float = WAIT_S,
    ) -> None:
        """`limit`: reads at once, and chats at once; `chats`, `open_paths`, `exempt`: paths of chats, without a token, without a limit."""
        self._app, self._wait_s = app, wait_s
        self._chats, self._open, self._exempt = frozenset(chats), frozenset(open_paths), frozenset(exempt)
        self._semaphores = {kind: asyncio.Semaphore(max(1, limit // divisor)) for kind, divisor in _DIVISORS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        kind = self._kind(scope)
        if kind is None:
            await self._app(scope, receive, send)
            return
        semaphore = self._semaphores[kind]
        try:
            async with asyncio.timeout(self._wait_s if semaphore.locked() else None):
                await semaphore.acquire()
        except TimeoutError:
            await error_answer(429, f"too many {kind} at once: try again")(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            semaphore.release()

    def _kind(self, scope: Scope) -> Kind | None:
        """None: not limited here."""
        if scope["type"] != "http" or scope["path"] in self._exempt:
            return None
        path = scope["path"]
        if path in self._open:
            return Kind.OPEN
        if path in self._chats:
            return Kind.CHAT
        if scope["method"] in {"GET", "HEAD"}:
            return None if _STREAM.fullmatch(path) else Kind.READ
        return Kind.SUBMIT if path == "/jobs" else Kind.WRITE
