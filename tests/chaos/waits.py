"""How long the services wait for Redis: every read and every connecting, against its own deadline.

Each service notes its longest wait in `<folder>/waits/<service>-<process id>`; the harness reads them all when the run is over.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, UnixDomainSocketConnection

MOST = 2.0
"""No wait may last longer than so many times its deadline."""

_WAITS = (
    ("read_response", "a reply of Redis", "socket_timeout"),
    ("_connect", "a connection to Redis", "socket_connect_timeout"),
)


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of a service."""

    what: str
    seconds: float
    deadline_s: float

    @property
    def share(self) -> float:
        """Of its deadline; infinite for a wait that has none."""
        return self.seconds / self.deadline_s if math.isfinite(self.deadline_s) else math.inf


def folder_of(folder: Path) -> Path:
    """Where the services note their waits."""
    return folder / "waits"


def install(service: str, folder: Path) -> None:
    """Watches the waits of this process from now on."""
    path, longest = folder_of(folder) / f"{service}-{os.getpid()}", 0.0

    def note(wait: Wait) -> None:
        nonlocal longest
        if wait.share > longest:
            longest = wait.share
            path.parent.mkdir(exist_ok=True)
            draft = path.with_name(f".{path.name}")
            draft.write_text(json.dumps([wait.what, wait.seconds, wait.deadline_s]))
            draft.rename(path)

    for kind in (AbstractConnection, Connection, UnixDomainSocketConnection):
        for name, what, deadline in _WAITS:
            if name in vars(kind):
                setattr(kind, name, _timed(vars(kind)[name], f"{service}: {what}", deadline, note))


def _timed(
    function: Callable[..., Awaitable[Any]], what: str, deadline: str, note: Callable[[Wait], None]
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(function)
    async def call(connection: Any, *arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return await function(connection, *arguments, **options)
        finally:
            limit_s = options.get("timeout") or getattr(connection, deadline) or math.inf
            note(Wait(what, time.monotonic() - began, limit_s))

    return call


def longest(folder: Path) -> Wait | None:
    """The wait that came closest to its deadline, or went furthest beyond; None when nobody has noted any."""
    waits = [Wait(*json.loads(path.read_text())) for path in folder_of(folder).glob("[!.]*")]
    return max(waits, key=lambda wait: wait.share, default=None)
