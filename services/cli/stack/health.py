"""The pulse of one child: asked for a sign of life every period.

no answer for two periods, and it stands still  ──► it hangs
no answer for BUSY_S, though it computes        ──► it hangs
answers that it is not well, several in a row   ──► it is not healthy
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx

from services.common.errors import DeadlineExceeded
from services.common.service import watchdog
from services.common.service.process_tree import process_of
from services.common.service.watchdog import Vitals

UNHEALTHY_IN_A_ROW = 3
_LOOK_S = 0.5


class Pulse:
    """Of one process, from its readiness to its end."""

    def __init__(self, pid: int, probe: Probe) -> None:
        """Begins to ask."""
        self._pid = pid
        self._asker = Asker(pid, probe, watchdog.PERIOD_S)
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
        hang = self._vitals.hang(silent_s, 2 * watchdog.PERIOD_S)
        return f"hangs: no answer for {hang}" if hang else None


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


READY_TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 4.0


def ready_probe(url: str) -> Probe:
    """Well when GET answers 200; no answer counts as not ready."""

    def probe(_pid: int) -> str | None:
        try:
            return _trouble(httpx.get(url, timeout=READY_TIMEOUT_S, trust_env=False))
        except httpx.HTTPError as error:
            return f"{url} does not answer: {type(error).__name__}"

    return probe


def health_probe(url: str) -> Probe:
    """Unwell only when it says so; DeadlineExceeded when it says nothing."""

    def probe(_pid: int) -> str | None:
        try:
            return _trouble(httpx.get(url, timeout=HEALTH_TIMEOUT_S, trust_env=False))
        except httpx.HTTPError as error:
            raise DeadlineExceeded(f"{url} does not answer: {type(error).__name__}") from error

    return probe


def _trouble(response: httpx.Response) -> str | None:
    return None if response.status_code == httpx.codes.OK else f"{response.status_code}: {response.text.strip()[:200]}"
