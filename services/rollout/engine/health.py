"""The watch over the engine: progress decides whether it hangs, not what it says of its health.

the heartbeat is a token; while nothing is sampled, an answer of every worker to a call

one of its processes is stopped by a signal, two periods long       ──► it hangs, whatever it was doing
no heartbeat for two periods, and none of its processes computes    ──► it hangs
no heartbeat for BUSY_S, though they compute                        ──► it hangs

While it starts there is no heartbeat: then its processes must compute or read (`StartWatch`).
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

_LOOK_S = 1.0
START_STILL_S = 120.0
"""An engine that starts, and whose processes neither compute nor read for so long, hangs."""
STILL_COMPUTES_S = 0.5
STILL_BYTES = 1 << 20
"""What processes that stand still may compute and read all the same: their threads tick."""


class Watched(Protocol):
    """What the watch needs of an engine (`services.rollout.engine.engine.Engine`)."""

    requests: int
    chats: int
    progress_at: float

    @property
    def up(self) -> bool:
        """Whether there is an engine that could answer."""

    @property
    def starting(self) -> bool:
        """Whether one is being started, which has a watch of its own."""

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
            self._next_count = now + watchdog.PERIOD_S
            self._family = [relative for root in engine.processes for relative in family(root.pid)]
        if not self._vitals.look(self._family):
            self._since = now
        if engine.starting:
            return None
        if self._vitals.stopped_too_long(_LOOK_S):
            return f"the engine hangs: {self._vitals.still()}"
        if not engine.up or engine.changing:
            return None  # both have limits of their own
        silent_s = now - max(engine.progress_at, self._since)
        busy = engine.requests + engine.chats
        if not busy and silent_s > watchdog.PERIOD_S:
            self._ask()
        hang = self._vitals.hang(silent_s, 2 * watchdog.PERIOD_S)
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


class StartWatch:
    """Looks after an engine that is being started; call `trouble` once a second."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit_s`: the longest start, seconds; `clock`: for tests."""
        self._limit_s, self._clock = limit_s, clock
        self._vitals = Vitals(clock)
        self._began = self._moved_at = clock()
        self._done = (0.0, 0)

    def trouble(self, processes: Iterable[psutil.Process]) -> str | None:
        """Why the start should be given up, or None; `processes`: all of the engine's, as far as there are any yet."""
        now, members = self._clock(), list(processes)
        regular = self._vitals.look(members)
        done = [_done(member) for member in members]
        computed_s, moved_bytes = sum(used for used, _ in done), sum(size for _, size in done)
        if (
            not (members and regular)
            or abs(computed_s - self._done[0]) > STILL_COMPUTES_S
            or abs(moved_bytes - self._done[1]) > STILL_BYTES
        ):
            self._done, self._moved_at = (computed_s, moved_bytes), now
        if self._vitals.stopped_too_long(_LOOK_S):
            return f"hangs while it starts: {self._vitals.still()}"
        if now - self._moved_at >= START_STILL_S:
            return f"hangs while it starts: its processes have neither computed nor read for {START_STILL_S:.0f} s"
        return f"is not up after {self._limit_s:.0f} s" if now - self._began >= self._limit_s else None


def _done(process: psutil.Process) -> tuple[float, int]:
    """Processor seconds that it has used, and bytes that it has read and written, as far as the system says."""
    with contextlib.suppress(psutil.Error, AttributeError):  # AttributeError: macOS does not count bytes
        times, io = process.cpu_times(), process.io_counters()
        return times.user + times.system, io.read_bytes + io.write_bytes + io.read_chars + io.write_chars
    return 0.0, 0
