"""Watchdog: processes that stand still, seen from outside (`Vitals`), and an event loop that hangs, seen from within (`LoopGuard`).

A process that does not answer may be busy (it loads a model, its machine is overloaded) or hang. A missing heartbeat together with no
processor time tells the two apart soon; a process that computes without ever answering has a longer limit.

A process ends itself when its event loop hangs, or when it was stopped for longer than its leases. Docker does not restart a container
that is unhealthy, but one whose process has ended; and a process that wakes up after others have taken its work must not go on with it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable

import psutil

from services.common.redis.fencing import LEASE_S

log = logging.getLogger(__name__)

PERIOD_S = 5.0
"""The heartbeat: signs of life come at least as often."""
BUSY_S = 120.0
"""Without a sign of life for so long processes hang, however much they compute."""
STILL_S = 4.0
"""Without processor time for so long, processes stand still. Clocks tick every 10 ms, and even an idle service ticks more often."""


def two_beats(look_s: float) -> float:
    """The longest silence, in seconds, that one who looks every `look_s` seconds may wait for and still kill within two heartbeats."""
    return 2 * PERIOD_S - 2 * look_s


class Vitals:
    """Follows a set of processes; look about once a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """They count as alive at first."""
        self._clock = clock
        self._used: dict[int, float] = {}
        self._moved_at = clock()
        self._stopped: set[int] = set()
        self._stopped_at = self._looked_at = clock()

    def due(self, every_s: float) -> bool:
        """Whether the last look was `every_s` seconds ago, for those who come by more often."""
        return self._clock() - self._looked_at >= every_s

    def look(self, processes: Iterable[psutil.Process]) -> bool:
        """Takes note of what they have used until now; processes that are gone are left out.

        Returns whether the looks are regular. If not, whoever looks has been held up itself: what it believes to be late may not be,
        and everything counts as alive again.
        """
        now = self._clock()
        regular = now - self._looked_at < STILL_S
        self._looked_at = now
        used, stopped, waits_for_a_core = {}, set(), False
        for process in processes:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    used[process.pid] = times.user + times.system
                    status = process.status()
                    waits_for_a_core |= status == psutil.STATUS_RUNNING
                    if status == psutil.STATUS_STOPPED:
                        stopped.add(process.pid)
            except psutil.Error:
                continue
        if used != self._used or waits_for_a_core or not regular:
            self._used, self._moved_at = used, now
        if not (stopped & self._stopped) or not regular:
            self._stopped_at = now
        self._stopped = stopped
        return regular

    def stopped_s(self) -> float:
        """Seconds for which one of them has been stopped by a signal; 0 when none is."""
        return self._clock() - self._stopped_at if self._stopped else 0.0

    def stopped_too_long(self, look_s: float) -> bool:
        """Whether one of them has been stopped for so long that it hangs, whatever it was doing; `look_s`: seconds between looks."""
        return self.stopped_s() > two_beats(look_s)

    def still(self) -> str | None:
        """How they stand still, for people; None while they do not."""
        idle = bool(self._used) and self._clock() - self._moved_at >= STILL_S
        if self._stopped and (idle or self.stopped_s() >= STILL_S):
            return f"process {min(self._stopped)} is stopped"
        return "it uses no processor time" if idle else None

    def hang(self, silent_s: float, enough_s: float) -> str | None:
        """How long they have given no sign of life, and how they stand still, for people, when that means that they hang; else None.

        Args:
            silent_s: since the last sign of life, seconds.
            enough_s: silence that is enough when they stand still; when they compute, BUSY_S is.
        """
        still = self.still()
        if silent_s < BUSY_S and (silent_s < enough_s or still is None):
            return None
        return f"{silent_s:.0f} s" + (f", and {still}" if still else "")


BLOCKED_S = 120.0
"""An event loop that does not turn for so long hangs."""
STOPPED_S = LEASE_S
"""Whoever was stopped for longer begins anew: others have its work."""
EXIT_CODE = 70
_TICK_S = 1.0


class LoopGuard:
    """Watches the running event loop from a thread, from `start` to `stop`."""

    def __init__(
        self,
        blocked_s: float = BLOCKED_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`clock`, `end`: for tests."""
        self._blocked_s, self._clock, self._end = blocked_s, clock, end
        self._turned = self._ticked = clock()
        self._over = threading.Event()

    def start(self) -> None:
        """Begins; call it in the loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="loop-guard", daemon=True).start()

    def stop(self) -> None:
        """Watches no more."""
        self._over.set()

    def turn(self) -> None:
        """The loop turns."""
        self._turned = self._clock()

    def look(self) -> None:
        """Ends the process if it must."""
        now = self._clock()
        asleep_s, blocked_s, self._ticked = now - self._ticked, now - self._turned, now
        if asleep_s > STOPPED_S:
            log.critical("this process was stopped for %.0f s: its work is others' now, so it ends", asleep_s)
        elif blocked_s > self._blocked_s:
            log.critical("the event loop has not turned for %.0f s: the process ends", blocked_s)
            faulthandler.dump_traceback(sys.stderr)
        else:
            return
        self._end(EXIT_CODE)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._over.wait(_TICK_S):
            self.look()
            try:
                loop.call_soon_threadsafe(self.turn)
            except RuntimeError:  # the loop is closed
                return
