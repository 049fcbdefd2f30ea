"""The pulse of one child: asked for a sign of life every period.

no answer for two periods, and it stands still  ──► it hangs
no answer for BUSY_S, though it computes        ──► it hangs
answers that it is not well, several in a row   ──► it is not healthy
"""

from __future__ import annotations

import time

from services.cli.asker import Asker, Probe
from services.common import vitals
from services.common.vitals import Vitals, process_of

UNHEALTHY_IN_A_ROW = 3
_LOOK_S = 0.5


class Pulse:
    """Of one process, from its readiness to its end."""

    def __init__(self, pid: int, probe: Probe) -> None:
        """Begins to ask."""
        self._pid = pid
        self._asker = Asker(pid, probe, vitals.PERIOD_S)
        self._excused_at = 0.0
        self._vitals = Vitals()

    def stop(self) -> None:
        """Asks no more."""
        self._asker.stop()

    def trouble(self) -> str | None:
        """Why the process should be killed, or None."""
        now = time.monotonic()
        if self._vitals.due(_LOOK_S) and not self._vitals.look(process_of(self._pid)):
            self._excused_at = now
        if self._asker.in_a_row >= UNHEALTHY_IN_A_ROW:
            return f"is not healthy ({self._asker.complaint})"
        silent_s = now - max(self._asker.answered_at, self._excused_at)
        hang = self._vitals.hang(silent_s, 2 * vitals.PERIOD_S)
        return f"hangs: no answer for {hang}" if hang else None
