"""Health of one child: a probe requests a sign of life every period.

no answer for two periods, and it uses no processor time  ──► it hangs
no answer for BUSY_S, though it computes                  ──► it hangs
several answers in a row that it is not healthy           ──► it is not healthy
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
READY_TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 4.0
_SAMPLE_INTERVAL_S = 0.5

Probe = Callable[[int], str | None]
"""Receives the process id. Returns None when the process is well, else the reason. Raises DeadlineExceeded when it does not answer."""


class Prober:
    """Thread that probes one process periodically until `stop`. A probe has its own deadline."""

    def __init__(self, pid: int, probe: Probe, interval_s: float) -> None:
        self.answered_at = time.monotonic()
        """Time of the last answer; before the first answer, time of the first probe."""
        self.complaint: str | None = "it was not asked yet"
        """The newest answer, or why there was none."""
        self.complaints_in_a_row = 0
        """Since the last answer that all was well."""
        self.pid = pid
        self._probe, self._interval_s = probe, interval_s
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"prober {pid}", daemon=True).start()

    def stop(self) -> None:
        """Stops the probes."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            started = time.monotonic()
            try:
                complaint = self._probe(self.pid)
            except DeadlineExceeded as error:
                self.complaint = str(error)
            else:
                self.answered_at = time.monotonic()
                self.complaint = complaint
                self.complaints_in_a_row = 0 if complaint is None else self.complaints_in_a_row + 1
            self._stopped.wait(max(0.0, started + self._interval_s - time.monotonic()))


class HealthMonitor:
    """Health of one process, from its readiness to its end."""

    def __init__(self, pid: int, probe: Probe) -> None:
        self._pid = pid
        self._prober = Prober(pid, probe, watchdog.PERIOD_S)
        self._excused_at = 0.0
        """Time of the last irregular sample: this process was delayed itself, so silence before it does not count."""
        self._vitals = Vitals()

    def stop(self) -> None:
        """Stops the probes."""
        self._prober.stop()

    def fault(self) -> str | None:
        """The reason to kill the process, or None."""
        now = time.monotonic()
        if self._vitals.due(_SAMPLE_INTERVAL_S) and not self._vitals.sample(process_of(self._pid)):
            self._excused_at = now
        if self._prober.complaints_in_a_row >= UNHEALTHY_IN_A_ROW:
            return f"is not healthy ({self._prober.complaint})"
        silent_s = now - max(self._prober.answered_at, self._excused_at)
        hang = self._vitals.hang(silent_s, 2 * watchdog.PERIOD_S)
        return f"hangs: no answer for {hang}" if hang else None


def http_probe(url: str, timeout_s: float) -> Probe:
    """A probe that a process passes when GET of this URL returns 200."""

    def probe(_pid: int) -> str | None:
        try:
            # Without certificates, which plain HTTP does not need: loading them takes tens of milliseconds, and memory that stays.
            response = httpx.get(url, timeout=timeout_s, trust_env=False, verify=False)  # noqa: S501
        except httpx.HTTPError as error:
            raise DeadlineExceeded(f"{url} does not answer: {type(error).__name__}") from error
        well = response.status_code == httpx.codes.OK
        return None if well else f"{response.status_code}: {response.text.strip()[:200]}"

    return probe
