"""Failures in a row: they slow down the issue of tasks, and a long run of them fails the job. Pure.

good group ──► 0 failures: full speed          failed group ──► a longer pause before each task ──► stalled ──► the job fails
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MIN_FAILURES = 64
"""A job never fails for fewer failures in a row, however few its slots are."""
MIN_RUN_S = 60.0
"""Nor for a run that is shorter than this: the cause may be repaired."""
LONG_RUN_S = 600.0
"""A run that has lasted so long fails the job at MIN_FAILURES failures: groups may be slow."""
STALLED_S = 60.0
FEW = 8
"""Failures from which a run that has lasted STALLED_S is a stall."""
FIRST_PAUSE_S = 0.01
DOUBLES_EVERY = 8
SPREAD_S = 60.0
"""At the longest pause, the issue of as many tasks as fail the job takes this long."""


class FailureRun:
    """Training groups that failed since the last one that was sampled and judged in good order.

    A group all of whose checks exceeded their limit counts, though it is degenerate: with a verifier that hangs no step is possible.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`slots`: groups that may be active at a time; the bounds grow with them, so that each slot fails before the job does."""
        self.count = 0
        self.newest = ""
        """Why the newest of them failed."""
        self._clock = clock
        self._since = 0.0
        self._stalls_at = max(slots, MIN_FAILURES // 2)
        self._fails_at = max(3 * slots, MIN_FAILURES)

    def add(self, reason: str) -> None:
        """Adds one failed group."""
        if not self.count:
            self._since = self._clock()
        self.count += 1
        self.newest = reason

    def clear(self) -> None:
        """Ends the run: a group was judged in good order, or the job resumes after a pause."""
        self.count = 0

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next task is issued: grows with the run up to a bound; 0 without a failure."""
        if not self.count:
            return 0.0
        doublings = min(self.count / DOUBLES_EVERY, 64.0)
        return min(SPREAD_S / self._fails_at, FIRST_PAUSE_S * math.pow(2.0, doublings))

    @property
    def stalled(self) -> bool:
        """Whether these failures keep the job from making progress."""
        return self.count >= self._stalls_at or (self.count >= FEW and self._lasted_s >= STALLED_S)

    @property
    def hopeless(self) -> bool:
        """Whether the run is so long that no step is possible."""
        enough = self.count >= self._fails_at and self._lasted_s >= MIN_RUN_S
        return enough or (self.count >= MIN_FAILURES and self._lasted_s >= LONG_RUN_S)

    def __str__(self) -> str:
        return f"{self.count} groups failed in a row; the newest: {self.newest}"

    @property
    def _lasted_s(self) -> float:
        return self._clock() - self._since if self.count else 0.0
