"""Whether processes stand still: stopped by a signal, or using no processor time at all.

A process that does not answer may be busy (it loads a model, its machine is overloaded) or hang. Together with a missing heartbeat this
tells the two apart soon; one that computes without ever answering needs a longer limit of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

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


def process_of(pid: int) -> list[psutil.Process]:
    """The process alone; empty when it is gone."""
    try:
        return [psutil.Process(pid)]
    except psutil.Error:
        return []


def family(pid: int) -> list[psutil.Process]:
    """A process and everything below it that has not ended; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [relative for relative in (process, *process.children(recursive=True)) if _runs(relative)]
    except psutil.Error:
        return []


def kill(processes: Iterable[psutil.Process]) -> None:
    """Ends them at once; those that are gone already are passed over."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Lets the kernel send this process `number` when the thread that started it ends. Linux only; elsewhere it does nothing.

    Allocates nothing worth a lock, so it may stand between fork and exec.

    Args:
        number: the signal.
        parent: the parent's process id, where it was noted before the fork; None asks for it now.
    """
    if _LIBC is None:
        return
    parent = os.getppid() if parent is None else parent
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the signal was armed
        os._exit(1)


def adopt_orphans() -> bool:
    """Makes this process the parent of its descendants' orphans, so that it can find and end them; False where the system cannot."""
    return _LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def child_pids(pid: int) -> list[int]:
    """Process ids of a process's children, ended ones that nobody has reaped among them; empty when it is gone."""
    lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
    found: list[int] = []
    for file in lists:
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, file.read_text().split())
    if not lists:  # a kernel without these lists
        with contextlib.suppress(psutil.Error):
            found = [child.pid for child in psutil.Process(pid).children()]
    return found
