"""Health of the engine: a hang is detected by missing progress, not by the engine's own health check.

heartbeat: a token; while nothing is sampled, a reply of every worker to a call

one process is stopped by a signal for two periods                  ──► hang, whatever the engine was doing
no heartbeat for two periods, and no process computes               ──► hang
no heartbeat for BUSY_S, though processes compute                   ──► hang

There is no heartbeat during a start: then the processes must compute or read (`StartMonitor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import psutil

from services.common.service import watchdog
from services.common.service.process_tree import family
from services.common.service.watchdog import Vitals

POLL_INTERVAL_S = 1.0
START_STILL_S = 120.0
"""A start whose processes neither compute nor read for so long hangs."""
STILL_COMPUTES_S = 0.5
STILL_BYTES = 1 << 20
"""Processor time and bytes that processes of a hanging start may still use: their threads tick."""


class Monitored(Protocol):
    """The part of an engine that the monitor uses (`services.rollout.engine.engine.Engine`)."""

    requests: int
    chats: int
    progress_at: float

    @property
    def up(self) -> bool:
        """Whether an engine runs."""

    @property
    def starting(self) -> bool:
        """Whether an engine is starting; `StartMonitor` monitors that."""

    @property
    def changing(self) -> bool:
        """Whether the weights are being changed: no token can come."""

    @property
    def processes(self) -> list[psutil.Process]:
        """Its topmost processes."""

    async def beat(self) -> None:
        """Waits for a reply of every worker, and sets `progress_at`."""


class EngineMonitor:
    """Monitor of one engine; call `fault` once a second."""

    def __init__(self, engine: Monitored) -> None:
        self._engine = engine
        self._vitals = Vitals()
        self._beating: asyncio.Task[None] | None = None
        self._regular_since = time.monotonic()
        self._family: list[psutil.Process] = []
        self._next_listing_at = 0.0

    def fault(self) -> str | None:
        """Why the engine should be killed, or None."""
        engine, now = self._engine, time.monotonic()
        if now >= self._next_listing_at:  # not on each call: it reads every process of the machine
            self._next_listing_at = now + watchdog.PERIOD_S
            self._family = [relative for root in engine.processes for relative in family(root.pid)]
        if not self._vitals.sample(self._family):
            self._regular_since = now
        if engine.starting:
            return None
        if self._vitals.stopped_too_long(POLL_INTERVAL_S):
            return f"the engine hangs: {self._vitals.still()}"
        if not engine.up or engine.changing:
            return None  # starts and weight changes have limits of their own
        silent_s = now - max(engine.progress_at, self._regular_since)
        busy = engine.requests + engine.chats
        if not busy and silent_s > watchdog.PERIOD_S:
            self._request_beat()
        hang = self._vitals.hang(silent_s, 2 * watchdog.PERIOD_S)
        what = f"no token with {busy} requests in flight" if busy else "no answer"
        return f"the engine hangs: {what} for {hang}" if hang else None

    def close(self) -> None:
        """Cancels the request for a heartbeat."""
        if self._beating is not None:
            self._beating.cancel()

    def _request_beat(self) -> None:
        if self._beating is None or self._beating.done():
            if self._beating is not None and not self._beating.cancelled():
                self._beating.exception()  # retrieved and ignored: `Engine.check` reports an engine that died
            self._beating = asyncio.create_task(self._engine.beat(), name="beat")


class StartMonitor:
    """Monitor of an engine that starts; call `fault` once a second."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit_s`: the longest start, seconds; `clock`: for tests."""
        self._limit_s, self._clock = limit_s, clock
        self._vitals = Vitals(clock)
        self._started_at = self._progress_at = clock()
        self._used = (0.0, 0)

    def fault(self, processes: Iterable[psutil.Process]) -> str | None:
        """Why the start should be aborted, or None; `processes`: those of the engine that exist so far."""
        now, members = self._clock(), list(processes)
        regular = self._vitals.sample(members)
        used = [_usage(member) for member in members]
        computed_s, moved_bytes = sum(seconds for seconds, _ in used), sum(size for _, size in used)
        if (
            not (members and regular)
            or abs(computed_s - self._used[0]) > STILL_COMPUTES_S
            or abs(moved_bytes - self._used[1]) > STILL_BYTES
        ):
            self._used, self._progress_at = (computed_s, moved_bytes), now
        if self._vitals.stopped_too_long(POLL_INTERVAL_S):
            return f"hangs while it starts: {self._vitals.still()}"
        if now - self._progress_at >= START_STILL_S:
            return f"hangs while it starts: its processes have neither computed nor read for {START_STILL_S:.0f} s"
        return f"is not up after {self._limit_s:.0f} s" if now - self._started_at >= self._limit_s else None


def _usage(process: psutil.Process) -> tuple[float, int]:
    """Processor seconds used, and bytes read and written, as far as the system reports them."""
    with contextlib.suppress(psutil.Error, AttributeError):  # AttributeError: macOS does not count bytes
        times, io = process.cpu_times(), process.io_counters()
        return times.user + times.system, io.read_bytes + io.write_bytes + io.read_chars + io.write_chars
    return 0.0, 0
