"""Asks one process the same thing again and again, from a thread of its own, so that one that does not answer holds up nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from services.common.errors import DeadlineExceeded

Probe = Callable[[int], str | None]
"""Given the process id, answers None when all is well, else why not. Raises DeadlineExceeded when the process does not answer."""


class Asker:
    """Of one process and one probe; asks until `stop`."""

    def __init__(self, pid: int, probe: Probe, every_s: float) -> None:
        """Begins to ask; `every_s`: seconds from one asking to the next. A probe has a deadline of its own."""
        self.answered_at = time.monotonic()
        """When it answered last; until it has, when it was asked first."""
        self.complaint: str | None = "it was not asked yet"
        """The newest answer."""
        self.in_a_row = 0
        """Complaints since all was well."""
        self.pid = pid
        self._probe, self._every_s = probe, every_s
        self._over = threading.Event()
        threading.Thread(target=self._ask, name=f"asker {pid}", daemon=True).start()

    def stop(self) -> None:
        """Asks no more."""
        self._over.set()

    def _ask(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            try:
                complaint = self._probe(self.pid)
            except DeadlineExceeded:
                pass
            else:
                self.answered_at = time.monotonic()
                self.complaint = complaint
                self.in_a_row = 0 if complaint is None else self.in_a_row + 1
            self._over.wait(max(0.0, began + self._every_s - time.monotonic()))
