"""Watchdog: detects other processes that hang, from outside (`Vitals`), and an event loop that hangs, from a thread (`LoopGuard`).

A process that gives no sign of life may be busy (it loads a model, its machine is overloaded) or hang. It hangs when it also uses no
processor time; a process that computes without a sign of life has a longer limit.

A process exits when its event loop hangs, or when it was stopped for longer than its leases last. Docker does not restart an unhealthy
container, only one whose process has exited; and a process that wakes up after others have taken its work must not go on with it.
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
"""Period of the heartbeat: signs of life come at least as often."""
BUSY_S = 120.0
"""Processes without a sign of life for so long hang, even if they compute."""
IDLE_S = 4.0
"""Processes that use no processor time for so long stand still. Clocks tick every 10 ms, and even an idle service ticks more often."""


def max_silence_s(sample_interval_s: float) -> float:
    """The longest silence, in seconds, after which a check every `sample_interval_s` seconds still kills within two heartbeats."""
    return 2 * PERIOD_S - 2 * sample_interval_s


class Vitals:
    """Activity of a set of processes, sampled about once a second; they count as alive at first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cpu_s: dict[int, float] = {}
        self._stopped: set[int] = set()
        self._active_at = self._running_at = self._sampled_at = clock()

    def due(self, every_s: float) -> bool:
        """Whether the last sample is at least `every_s` seconds old."""
        return self._clock() - self._sampled_at >= every_s

    def sample(self, processes: Iterable[psutil.Process]) -> bool:
        """Samples the processor time and the status of the processes; those that are gone are left out.

        Returns whether the samples are regular. If not, the caller has been held up itself: what it believes to be late may not be, and
        all processes count as alive again.
        """
        now = self._clock()
        regular = now - self._sampled_at < IDLE_S
        self._sampled_at = now
        cpu_s, stopped, waits_for_a_core = {}, set(), False
        for process in processes:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    cpu_s[process.pid] = times.user + times.system
                    status = process.status()
                    waits_for_a_core |= status == psutil.STATUS_RUNNING
                    if status == psutil.STATUS_STOPPED:
                        stopped.add(process.pid)
            except psutil.Error:
                continue
        if cpu_s != self._cpu_s or waits_for_a_core or not regular:
            self._cpu_s, self._active_at = cpu_s, now
        if not (stopped & self._stopped) or not regular:
            self._running_at = now
        self._stopped = stopped
        return regular

    def stopped_s(self) -> float:
        """Seconds for which one of them has been stopped by a signal; 0 when none is."""
        return self._clock() - self._running_at if self._stopped else 0.0

    def stopped_too_long(self, sample_interval_s: float) -> bool:
        """Whether a signal has stopped one of them for so long that it counts as hanging; `sample_interval_s`: seconds between samples."""
        return self.stopped_s() > max_silence_s(sample_interval_s)

    def still(self) -> str | None:
        """A text for people on how they stand still; None while they do not."""
        idle = bool(self._cpu_s) and self._clock() - self._active_at >= IDLE_S
        if self._stopped and (idle or self.stopped_s() >= IDLE_S):
            return f"process {min(self._stopped)} is stopped"
        return "it uses no processor time" if idle else None

    def hang(self, silent_s: float, enough_s: float) -> str | None:
        """A text for people on how long they have given no sign of life and how they stand still, when they hang; else None.

        Processes that stand still hang after `enough_s` seconds of silence, those that compute after BUSY_S.
        """
        still = self.still()
        if silent_s < BUSY_S and (silent_s < enough_s or still is None):
            return None
        return f"{silent_s:.0f} s" + (f", and {still}" if still else "")


BLOCKED_S = 120.0
"""An event loop that runs no callback for so long hangs."""
STOPPED_S = LEASE_S
"""A process that was stopped for longer exits: others have its work."""
EXIT_CODE = 70
_POLL_INTERVAL_S = 1.0


class LoopGuard:
    """Watchdog of the running event loop, in a thread, from `start` to `stop`; `clock` and `end` are for tests."""

    def __init__(
        self,
        blocked_s: float = BLOCKED_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._blocked_s, self._clock, self._end = blocked_s, clock, end
        self._turned = self._polled = clock()
        self._over = threading.Event()

    def start(self) -> None:
        """Starts the thread; call it in the event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="loop-guard", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread."""
        self._over.set()

    def record_turn(self) -> None:
        """Records that the event loop runs callbacks."""
        self._turned = self._clock()

    def check(self) -> None:
        """Ends the process when the event loop is blocked, or when the process was stopped for too long."""
        now = self._clock()
        asleep_s, blocked_s, self._polled = now - self._polled, now - self._turned, now
        if asleep_s > STOPPED_S:
            log.critical("this process was stopped for %.0f s: its work is others' now, so it ends", asleep_s)
        elif blocked_s > self._blocked_s:
            log.critical("the event loop has not turned for %.0f s: the process ends", blocked_s)
            faulthandler.dump_traceback(sys.stderr)
        else:
            return
        self._end(EXIT_CODE)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._over.wait(_POLL_INTERVAL_S):
            self.check()
            try:
                loop.call_soon_threadsafe(self.record_turn)
            except RuntimeError:  # the loop is closed
                return
