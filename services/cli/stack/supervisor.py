"""Supervisor of a table of processes: starts them, restarts those that fail, and ends all of them in order.

table ──► start ──► ready? ──► watch ──┬─ died, hangs, unhealthy, late ──► back off ──► start again ──► … ──► lost: again every minute
                                       └─ SIGINT, SIGTERM ──► drain stage 0, 1, 2 … ──► kill the rest

A process that fails again and again is lost. It never ends the stack: the other processes continue, the cause is reported, and the process
is started again every minute. Only a wrong setting, found before all were ready for the first time, ends the stack, so that the user
reads the error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from services.cli.logs import parse_line
from services.cli.stack import children
from services.cli.stack.health import HealthMonitor, Probe, Prober
from services.cli.stack.segments import Segment, SegmentWatch
from services.common.errors import MillraceError
from services.common.service.process_tree import (
    adopt_orphans,
    created_at,
    family,
    kill_orphans,
    kill_tree,
    reap_orphans,
)
from services.common.service.stack_state import ProcessState
from services.common.service.watchdog import Vitals

POLL_INTERVAL_S = 0.1
SAMPLE_INTERVAL_S = 0.5
"""Interval of readiness probes, of samples of the vitals, and of scans for shared memory."""
BACK_OFF_S: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits before the restarts after quick deaths in a row; after more quick deaths than waits, the process is lost."""
QUICK_DEATH_S = 20.0
"""A death is quick before readiness, and within this time after the start."""
LOST_RETRY_S = 60.0
"""Wait before the next start of a lost process."""
KILL_MARGIN_S = 15.0
CAUSE_BYTES = 64 * 1024
"""Size of the end of a log in which the supervisor searches the cause of a death."""
CAUSE_CHARS = 400
LOG_LIMIT_BYTES = 64 * 1024 * 1024
CONFIG_ERROR_CODE = 2
"""Exit code of a service with wrong settings; a restart cannot help."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the table."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    """Its whole environment."""
    stage: int
    """Processes of a lower stage start later and drain earlier than those of a higher one."""
    ready: Probe
    healthy: Probe
    start_timeout_s: float
    drain_timeout_s: float
    port: int | None = None
    cores: frozenset[int] = frozenset()
    temporary: Path | None = None
    """Its own TMPDIR: emptied before each start, removed after its end."""


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    log_from: int = 0
    """Offset in bytes of the newest process's output in the log."""
    created: float = 0.0
    started: float = 0.0
    restarts: int = 0
    quick_deaths: int = 0
    restart_at: float = 0.0
    prober: Prober | None = None
    """Readiness probes, until it is ready."""
    vitals: Vitals = field(default_factory=Vitals)
    """Sampled until it is ready."""
    monitor: HealthMonitor | None = None
    """Health probes, from its readiness on."""
    lost: str = ""
    """Cause, while the stack runs without it; else empty."""

    @property
    def ready(self) -> bool:
        return self.monitor is not None


class WrongSettingError(MillraceError):
    """A process refused to start because of a setting; the message names the process and its log."""


class Supervisor:
    """Runs the table until a signal stops it. It runs in the main thread."""

    def __init__(
        self,
        table: Sequence[ProcessSpec],
        logs: Path,
        *,
        say: Callable[[str], None],
        changed: Callable[[bool, dict[str, ProcessState], dict[str, str]], None],
        remember: Callable[[tuple[Segment, ...]], None] = lambda _: None,
    ) -> None:
        """Prepares the table; `run` starts it. The processes log to `<logs>/<name>.log`.

        `say`: receives each event, as text for people. `changed`: receives whether all are ready, the processes, and the
        cause of each lost process, whenever one of these changes. `remember`: receives the segments of shared memory that
        the processes use, after a scan that found other segments.
        """
        self._table = [_Child(spec, logs / f"{spec.name}.log") for spec in table]
        self._say, self._changed, self._remember = say, changed, remember
        self._segments = SegmentWatch()
        self._remembered: tuple[Segment, ...] = ()
        self._scanned_at = 0.0
        self._signals = 0
        """Stop signals received."""
        self._was_ready = False
        """Whether the whole stack has ever been ready."""

    def run(self) -> None:
        """Starts all processes, restarts them until SIGINT, SIGTERM or SIGHUP, then drains them; a second signal kills the rest.

        Raises WrongSettingError when a setting of a process is wrong, before all were ready for the first time; drains the others.
        """
        adopt_orphans()
        handlers = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            for stage in sorted({child.spec.stage for child in self._table}, reverse=True):
                self._start_stage(stage)
            if not self._signals:
                self._was_ready = True
                lost = [child.spec.name for child in self._table if child.lost]
                self._say(f"ready, without {', '.join(lost)}" if lost else "ready")
            while not self._signals:
                self._watch(self._table)
                time.sleep(POLL_INTERVAL_S)
        finally:
            self._drain()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._signals += 1

    def _start_stage(self, stage: int) -> None:
        members = [child for child in self._table if child.spec.stage == stage]
        for child in members:
            self._start(child)
        started = [child for child in self._table if child.spec.stage >= stage]
        while not self._signals and not all(self._is_settled(child) for child in members):
            self._watch(started)
            time.sleep(POLL_INTERVAL_S)

    def _is_settled(self, child: _Child) -> bool:
        """Whether it is ready, or lost in the lowest stage; the processes of lower stages need those of higher stages."""
        return child.ready or (bool(child.lost) and child.spec.stage == min(other.spec.stage for other in self._table))

    def _start(self, child: _Child) -> None:
        spec, log_path = child.spec, child.log_path
        if log_path.exists() and log_path.stat().st_size > LOG_LIMIT_BYTES:
            log_path.replace(log_path.with_suffix(".log.1"))
        if spec.temporary is not None:
            shutil.rmtree(spec.temporary, ignore_errors=True)
            spec.temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        child.log_from = log_path.stat().st_size if log_path.exists() else 0
        child.process = children.start_child(spec.argv, env=spec.env, log_path=log_path, cores=spec.cores)
        child.created = created_at(child.process.pid)
        child.started = time.monotonic()
        child.vitals = Vitals()
        child.prober = Prober(child.process.pid, spec.ready, SAMPLE_INTERVAL_S)
        self._report_state()

    def _watch(self, table: Sequence[_Child]) -> None:
        for child in table:
            if child.process is None:
                if time.monotonic() >= child.restart_at:
                    child.restarts += 1
                    self._start(child)
            elif (code := child.process.poll()) is not None:
                self._on_failure(child, _describe_exit(code, child), wrong_setting=code == CONFIG_ERROR_CODE)
            elif child.prober is not None:
                self._check_start(child, child.prober)
            elif child.monitor is not None and (fault := child.monitor.fault()):
                self._on_failure(child, fault)
        reap_orphans(self._pids())
        self._scan_segments()

    def _scan_segments(self) -> None:
        if time.monotonic() - self._scanned_at < SAMPLE_INTERVAL_S:
            return
        self._scanned_at = time.monotonic()
        self._segments.scan(self._families)
        if self._segments.known != self._remembered:
            self._remembered = self._segments.known
            self._remember(self._remembered)

    def _families(self) -> dict[str, list[psutil.Process]]:
        return {child.spec.name: family(child.process.pid) for child in self._table if child.process is not None}

    def _pids(self) -> list[int]:
        return [child.process.pid for child in self._table if child.process is not None]

    def _check_start(self, child: _Child, prober: Prober) -> None:
        """Checks readiness. While the process, or one below it, is stopped by a signal, it is not ready, whatever it answered before."""
        if child.vitals.due(SAMPLE_INTERVAL_S):
            child.vitals.sample(family(prober.pid))
        if child.vitals.stopped_too_long(SAMPLE_INTERVAL_S):
            self._on_failure(child, "hangs: it was stopped before it was ready")
        elif child.vitals.stopped_s():
            return
        elif prober.complaint is None:
            self._on_ready(child, prober.pid)
        elif time.monotonic() - child.started > child.spec.start_timeout_s:
            cause = f"was not ready within {child.spec.start_timeout_s:.0f} s ({prober.complaint})"
            self._on_failure(child, cause, late=True)

    def _on_ready(self, child: _Child, pid: int) -> None:
        child.lost = ""
        self._stop_probes(child)
        child.monitor = HealthMonitor(pid, child.spec.healthy)
        if child.restarts:
            self._say(f"{child.spec.name} is ready again, {time.monotonic() - child.started:.1f} s after its start")
        self._report_state()

    def _stop_probes(self, child: _Child) -> None:
        for probes in (child.prober, child.monitor):
            if probes is not None:
                probes.stop()
        child.prober = child.monitor = None

    def _on_failure(self, child: _Child, cause: str, *, wrong_setting: bool = False, late: bool = False) -> None:
        """Ends the rest of a failed process, and schedules its next start.

        `wrong_setting`: a restart cannot help; raises WrongSettingError if the stack has never been ready.
        `late`: it was not ready in time; the start of the stack no longer waits for it.
        """
        if child.process is None:
            return
        quick = not child.ready or time.monotonic() - child.started < QUICK_DEATH_S
        child.quick_deaths = child.quick_deaths + 1 if quick else 0
        self._end(child)
        if wrong_setting and not self._was_ready:
            raise WrongSettingError(f"{child.spec.name} {cause}; gave up on it. {_quote_log(child)}")
        hopeless = wrong_setting or child.quick_deaths > len(BACK_OFF_S)
        wait_s = LOST_RETRY_S if hopeless else BACK_OFF_S[max(0, child.quick_deaths - 1)]
        if hopeless or late or child.lost:
            child.lost = cause
        remark = ", the others go on meanwhile" if child.lost else ""
        child.restart_at = time.monotonic() + wait_s
        self._say(f"{child.spec.name} {cause}; starting it again in {wait_s:g} s{remark} (log: {child.log_path})")
        self._report_state()

    def _end(self, child: _Child) -> None:
        if child.process is None:
            return
        self._stop_probes(child)
        kill_tree(child.process.pid)
        child.process.wait()
        child.process = None
        for pid in kill_orphans(self._pids()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._segments.end(child.spec.name, self._families)
        if child.spec.temporary is not None:
            shutil.rmtree(child.spec.temporary, ignore_errors=True)

    def _drain(self) -> None:
        expected = max(self._signals, 1)  # a further signal ends the wait
        for stage in sorted({child.spec.stage for child in self._table}):
            members = [child for child in self._table if child.spec.stage == stage and child.process is not None]
            if members:
                self._say(f"draining {', '.join(child.spec.name for child in members)}")
            for child in members:
                if child.process is not None:
                    child.process.terminate()
            deadline = time.monotonic() + max((child.spec.drain_timeout_s for child in members), default=0.0)
            while time.monotonic() < deadline and self._signals <= expected and any(map(_is_running, members)):
                time.sleep(POLL_INTERVAL_S)
            for child in members:
                if _is_running(child):
                    in_time = time.monotonic() < deadline
                    self._say(f"{child.spec.name} {'drains no more' if in_time else 'did not drain in time'}: killed")
                self._end(child)

    def _report_state(self) -> None:
        alive = [(child, child.spec, child.process.pid) for child in self._table if child.process is not None]
        states = {
            spec.name: ProcessState(pid, child.created, spec.port, ready=child.ready, restarts=child.restarts)
            for child, spec, pid in alive
        }
        lost = {child.spec.name: child.lost for child in self._table if child.lost}
        self._changed(all(self._is_settled(child) for child in self._table), states, lost)


def _is_running(child: _Child) -> bool:
    return child.process is not None and child.process.poll() is None


def _describe_exit(code: int, child: _Child) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    cause = _find_cause(child)
    return f"ended with code {code}" + (f": {cause}" if cause else "")


def _quote_log(child: _Child, size: int = 600) -> str:
    text = _read_log_end(child, size)
    return f"Its log ({child.log_path}) ends:\n{text}" if text else f"Its log is {child.log_path}."


def _find_cause(child: _Child) -> str:
    """The newest error in the log of an ended process, else its last line; in one line."""
    lines = _read_log_end(child, CAUSE_BYTES).splitlines()
    for raw in reversed(lines):
        line = parse_line(raw.encode())
        if line is not None and line.get("level") in {"ERROR", "CRITICAL"}:
            trace = str(line.get("error", "")).strip().splitlines()
            return f"{line.get('message')}{f': {trace[-1]}' if trace else ''}"[:CAUSE_CHARS]
    return lines[-1][:CAUSE_CHARS] if lines else ""


def _read_log_end(child: _Child, size: int) -> str:
    """The last output of the newest process, at most `size` bytes."""
    try:
        with child.log_path.open("rb") as file:
            file.seek(max(child.log_from, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
