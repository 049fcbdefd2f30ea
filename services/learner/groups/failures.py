"""Failures in a row: how they slow the issuing of tasks down, and when they mean that no step is possible. Pure.

good group ──► 0 failures: full speed          failed group ──► a longer pause before each task ──► stalled ──► the job fails
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LEAST = 64
"""A job never fails for fewer failures in a row, however few its slots are."""
LEAST_S = 60.0
"""Nor for a run of them that is shorter than this: what broke may be mended."""
MOST_S = 600.0
"""A run that has lasted so long needs no more than LEAST failures: groups may be slow."""
STALLED_S = 60.0
FEW = 8
"""Failures after which a run that has lasted STALLED_S is a stall."""

FIRST_PAUSE_S = 0.01
DOUBLES_EVERY = 8
SPREAD_S = 60.0
"""At the longest pause, the tasks of as many groups as fail the job take so long to issue."""


class FailureRun:
    """The training groups that failed since the last one that was judged as it should be.

    One whose every check went beyond its limit counts, though it is degenerate: a verifier that hangs makes no step either.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        """None yet. `slots`: groups that may be active at a time, so that each place of theirs has failed before it counts."""
        self.count = 0
        self.newest = ""
        """Why the newest of them failed."""
        self._clock = clock
        self._since = 0.0
        self._stalls_at = max(slots, LEAST // 2)
        self._fails_at = max(3 * slots, LEAST)

    def add(self, reason: str) -> None:
        """Another group failed."""
        if not self.count:
            self._since = self._clock()
        self.count += 1
        self.newest = reason

    def clear(self) -> None:
        """A group came that was sampled and judged as it should be, or the job begins anew after a pause."""
        self.count = 0

    @property
    def pause_s(self) -> float:
        """Seconds to wait before another task is issued: grows with the run up to a bound, 0 without one."""
        if not self.count:
            return 0.0
        doublings = min(self.count / DOUBLES_EVERY, 64.0)
        return min(SPREAD_S / self._fails_at, FIRST_PAUSE_S * math.pow(2.0, doublings))

    @property
    def stalled(self) -> bool:
        """Whether the job makes no progress for these failures."""
        return self.count >= self._stalls_at or (self.count >= FEW and self._lasted_s >= STALLED_S)

    @property
    def hopeless(self) -> bool:
        """Whether the run has gone on for so long that no step is possible."""
        enough = self.count >= self._fails_at and self._lasted_s >= LEAST_S
        return enough or (self.count >= LEAST and self._lasted_s >= MOST_S)

    def __str__(self) -> str:
        """The run in words."""
        return f"{self.count} groups failed in a row; the newest: {self.newest}"

    @property
    def _lasted_s(self) -> float:
        return self._clock() - self._since if self.count else 0.0
