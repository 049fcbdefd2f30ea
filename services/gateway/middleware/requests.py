"""Limit of requests in flight, by kind: a kind that uses its whole limit does not block the others.

At the limit a request waits a moment, first come, first served, and is then refused with 429. No body is read
meanwhile. Event streams have a limit of their own (`streams.py`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from enum import StrEnum

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.errors import too_many

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
        self._app = app
        self._chats, self._open, self._exempt = frozenset(chats), frozenset(open_paths), frozenset(exempt)
        self._wait_s = wait_s
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
            await too_many(f"too many {kind} at once: try again")(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            semaphore.release()

    def _kind(self, scope: Scope) -> Kind | None:
        """None: not limited here."""
        if scope["type"] != "http" or scope["path"] in self._exempt:
            return None
        method, path = scope["method"], scope["path"]
        if path in self._open:
            return Kind.OPEN
        if path in self._chats:
            return Kind.CHAT
        if method in {"GET", "HEAD"}:
            return None if _STREAM.fullmatch(path) else Kind.READ
        return Kind.SUBMIT if path == "/jobs" else Kind.WRITE
