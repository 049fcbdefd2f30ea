"""Limit of requests in flight, by kind: whoever fills one kind's places leaves the others theirs.

Who comes when all places are taken waits a moment, first come, first served, and is refused with 429 then. No body is
read meanwhile. Event streams have a limit of their own (`streams.py`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from enum import StrEnum

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.errors import too_many

WAIT_S = 3.0
"""Longest wait for a place."""
_STREAM = re.compile(r"/jobs/[^/]+/events")


class Kind(StrEnum):
    """Requests that share their places."""

    READ = "reads"
    WRITE = "changes"
    SUBMIT = "submissions"
    CHAT = "chats"
    OPEN = "requests without a token"


_SHARE = {Kind.READ: 1, Kind.CHAT: 1, Kind.WRITE: 4, Kind.SUBMIT: 4, Kind.OPEN: 4}
"""What the limit is divided by: changes and submissions hold bodies, and what needs no token must not be dear."""


class RequestLimit:
    """Lets so many requests of each kind in."""

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
        """`limit`: reads at once, and chats; `chats`, `open_paths`, `exempt`: paths of chats, without a token, without a limit."""
        self._app = app
        self._chats, self._open, self._exempt = frozenset(chats), frozenset(open_paths), frozenset(exempt)
        self._wait_s = wait_s
        self._places = {kind: asyncio.Semaphore(max(1, limit // share)) for kind, share in _SHARE.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        kind = self._kind(scope)
        if kind is None:
            await self._app(scope, receive, send)
            return
        places = self._places[kind]
        try:
            async with asyncio.timeout(self._wait_s if places.locked() else None):
                await places.acquire()
        except TimeoutError:
            await too_many(f"too many {kind} at once: try again")(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            places.release()

    def _kind(self, scope: Scope) -> Kind | None:
        """None: it needs no place here."""
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
