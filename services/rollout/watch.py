"""The watch over the engine: progress decides whether it hangs, not what it says of its health.

the heartbeat is a token; while nothing is sampled, an answer of every worker to a call

one of its processes is stopped by a signal, two periods long       ──► it hangs, whatever it was doing
no heartbeat for two periods, and none of its processes computes    ──► it hangs
no heartbeat for BUSY_S, though they compute                        ──► it hangs
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import psutil

from services.common import vitals
from services.common.vitals import Vitals, family

_LOOK_S = 1.0


class Watched(Protocol):
    """What the watch needs of an engine (`services.rollout.engine.Engine`)."""

    requests: int
    chats: int
    progress_at: float

    @property
    def up(self) -> bool:
        """Whether there is an engine that could answer."""

    @property
    def changing(self) -> bool:
        """Whether the weights are being changed: no token is to be expected."""

    @property
    def processes(self) -> list[psutil.Process]:
        """Its topmost processes."""

    async def beat(self) -> None:
        """A sign of life from every worker; sets `progress_at`."""


class EngineWatch:
    """Looks after one engine; call `trouble` once a second."""

    def __init__(self, engine: Watched) -> None:
        """Has seen nothing yet."""
        self._engine = engine
        self._vitals = Vitals()
        self._beating: asyncio.Task[None] | None = None
        self._since = time.monotonic()
        self._family: list[psutil.Process] = []
        self._next_count = 0.0

    def trouble(self) -> str | None:
        """Why the engine should be killed, or None."""
        engine, now = self._engine, time.monotonic()
        if now >= self._next_count:  # not each time: it goes through every process of the machine
            self._next_count = now + vitals.PERIOD_S
            self._family = [relative for root in engine.processes for relative in family(root.pid)]
        if not self._vitals.look(self._family):
            self._since = now
        if self._vitals.stopped_too_long(_LOOK_S):
            return f"the engine hangs: {self._vitals.still()}"
        if not engine.up or engine.changing:
            return None  # both have limits of their own
        silent_s = now - max(engine.progress_at, self._since)
        busy = engine.requests + engine.chats
        if not busy and silent_s > vitals.PERIOD_S:
            self._ask()
        hang = self._vitals.hang(silent_s, 2 * vitals.PERIOD_S)
        what = f"no token with {busy} requests in flight" if busy else "no answer"
        return f"the engine hangs: {what} for {hang}" if hang else None

    def close(self) -> None:
        """Waits for no answer any more."""
        if self._beating is not None:
            self._beating.cancel()

    def _ask(self) -> None:
        if self._beating is None or self._beating.done():
            if self._beating is not None and not self._beating.cancelled():
                self._beating.exception()  # an engine that died is noticed by its own error
            self._beating = asyncio.create_task(self._engine.beat(), name="beat")
