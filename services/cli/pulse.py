"""The pulse of one child: asked for a sign of life every period, from a thread of its own, so that one that hangs holds up nobody.

no answer for two periods, and it stands still  ──► it hangs
no answer for BUSY_S, though it computes        ──► it hangs
answers that it is not well, several in a row   ──► it is not healthy
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from services.common import vitals
from services.common.errors import DeadlineExceeded
from services.common.vitals import Vitals, process_of

UNHEALTHY_IN_A_ROW = 3
_LOOK_S = 0.5

Probe = Callable[[int], str | None]
"""Given the process id, answers None when all is well, else why not. Raises DeadlineExceeded when the process does not answer."""


class Pulse:
    """Of one process, from its readiness to its end."""

    def __init__(self, pid: int, probe: Probe) -> None:
        """Begins to ask."""
        self._pid, self._probe = pid, probe
        self._answered = time.monotonic()
        self._unwell = 0
        self._complaint = ""
        self._vitals = Vitals()
        self._next_look = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._ask, name=f"pulse {pid}", daemon=True).start()

    def stop(self) -> None:
        """Asks no more."""
        self._over.set()

    def trouble(self) -> str | None:
        """Why the process should be killed, or None."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            if not self._vitals.look(process_of(self._pid)):
                self._answered = now
        if self._unwell >= UNHEALTHY_IN_A_ROW:
            return f"is not healthy ({self._complaint})"
        hang = self._vitals.hang(now - self._answered, 2 * vitals.PERIOD_S)
        return f"hangs: no answer for {hang}" if hang else None

    def _ask(self) -> None:
        """Asks until told to stop. A probe has a deadline of its own."""
        while not self._over.is_set():
            began = time.monotonic()
            try:
                complaint = self._probe(self._pid)
            except DeadlineExceeded:
                pass
            else:
                self._answered = time.monotonic()
                self._complaint = complaint or ""
                self._unwell = 0 if complaint is None else self._unwell + 1
            self._over.wait(max(0.0, began + vitals.PERIOD_S - time.monotonic()))
