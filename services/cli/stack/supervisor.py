"""Starts a table of processes, restarts what dies, and takes them all down in order.

table ──► start ──► ready? ──► watch ──┬─ died, hangs, unhealthy, late ──► back off ──► start again ──► … ──► lost: again every minute
                                       └─ SIGINT, SIGTERM ──► drain stage 0, 1, 2 … ──► kill what is left

What cannot be kept alive is lost, and never ends the stack: the others go on, its cause is told, and it is tried again every minute. Only a
wrong setting, found before all was ready for the first time, ends it: a person reads that.
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
from services.cli.stack.health import Asker, Probe, Pulse
from services.cli.stack.segments import Segment, SegmentWatch
from services.cli.stack.state import ProcessState
from services.common.errors import MillraceError
from services.common.service.process_tree import (
    adopt_orphans,
    created_at,
    family,
    kill_orphans,
    kill_tree,
    reap_orphans,
)
from services.common.service.watchdog import Vitals

POLL_S = 0.1
LOOK_S = 0.5
BACK_OFF_S: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits before the restarts that follow quick deaths in a row; after as many, the process is lost."""
QUICK_S = 20.0
"""A process that dies before it was ready, or sooner than this after its start, died quickly."""
LOST_RETRY_S = 60.0
"""Wait before another try of a process that is lost."""
KILL_MARGIN_S = 15.0
CAUSE_BYTES = 64 * 1024
"""Of the end of a log, where the cause of a death is looked for."""
CAUSE_CHARS = 400
LOG_LIMIT_BYTES = 64 * 1024 * 1024
CONFIG_ERROR_CODE = 2
"""What a service ends with when its settings are wrong: starting it again cannot help."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One row of the table."""

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
    """Its TMPDIR, which it has for itself: emptied before each start, removed after its end."""


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    log_from: int = 0
    """Where the log of its newest process begins, bytes."""
    created: float = 0.0
    started: float = 0.0
    restarts: int = 0
    quick_deaths: int = 0
    restart_at: float = 0.0
    asker: Asker | None = None
    """Until it is ready, with its vitals."""
    vitals: Vitals = field(default_factory=Vitals)
    pulse: Pulse | None = None
    """From its readiness on."""
    lost: str = ""
    """Why the stack goes on without it; empty while it need not."""

    @property
    def ready(self) -> bool:
        """Whether it has said so; its pulse is followed since."""
        return self.pulse is not None


class GaveUp(MillraceError):  # noqa: N818  it is what happened
    """A process refused to start over a setting; the message names it and its log."""


class Supervisor:
    """Runs the table until it is asked to stop. Lives in the main thread."""

    def __init__(
        self,
        table: Sequence[ProcessSpec],
        logs: Path,
        *,
        say: Callable[[str], None],
        changed: Callable[[bool, dict[str, ProcessState], dict[str, str]], None],
        remember: Callable[[tuple[Segment, ...]], None] = lambda _: None,
    ) -> None:
        """Starts nothing yet.

        Args:
            table: the processes.
            logs: folder of their logs, `<name>.log`.
            say: told what happened, for people.
            changed: told whether all are ready, the processes, and why the stack goes on without some, whenever one of these changes.
            remember: told which segments of shared memory the processes use, after a look that found other ones.
        """
        self._table = [_Child(spec, logs / f"{spec.name}.log") for spec in table]
        self._say = say
        self._changed = changed
        self._remember = remember
        self._segments = SegmentWatch()
        self._remembered: tuple[Segment, ...] = ()
        self._looked = 0.0
        self._stops = 0
        self._was_ready = False
        """Whether the whole stack has ever been ready."""

    def run(self) -> None:
        """Starts everything, keeps it alive until SIGINT, SIGTERM or SIGHUP, then drains it; a second signal kills what is left.

        Raises:
            GaveUp: a setting of a process is wrong, before all were ready for the first time; the others were drained.
        """
        adopt_orphans()
        handlers = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            for stage in sorted({child.spec.stage for child in self._table}, reverse=True):
                self._start_stage(stage)
            if not self._stops:
                self._was_ready = True
                lost = [child.spec.name for child in self._table if child.lost]
                self._say(f"ready, without {', '.join(lost)}" if lost else "ready")
            while not self._stops:
                self._watch(self._table)
                time.sleep(POLL_S)
        finally:
            self._drain()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stops += 1

    def _start_stage(self, stage: int) -> None:
        members = [child for child in self._table if child.spec.stage == stage]
        for child in members:
            self._start(child)
        begun = [child for child in self._table if child.spec.stage >= stage]
        while not self._stops and not all(self._need_not_wait(child) for child in members):
            self._watch(begun)
            time.sleep(POLL_S)

    def _need_not_wait(self, child: _Child) -> bool:
        """Whether it is ready, or the stack is, without it: nobody can do without what others start after."""
        return child.ready or (bool(child.lost) and child.spec.stage == min(other.spec.stage for other in self._table))

    def _start(self, child: _Child) -> None:
        if child.log_path.exists() and child.log_path.stat().st_size > LOG_LIMIT_BYTES:
            child.log_path.replace(child.log_path.with_suffix(".log.1"))
        if child.spec.temporary is not None:
            shutil.rmtree(child.spec.temporary, ignore_errors=True)
            child.spec.temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        child.log_from = child.log_path.stat().st_size if child.log_path.exists() else 0
        child.process = children.start_child(
            child.spec.argv, env=child.spec.env, log_path=child.log_path, cores=child.spec.cores
        )
        child.created = created_at(child.process.pid)
        child.started = time.monotonic()
        child.vitals = Vitals()
        child.asker = Asker(child.process.pid, child.spec.ready, LOOK_S)
        self._tell()

    def _watch(self, table: Sequence[_Child]) -> None:
        for child in table:
            if child.process is None:
                if time.monotonic() >= child.restart_at:
                    child.restarts += 1
                    self._start(child)
                continue
            code = child.process.poll()
            if code is not None:
                self._bury(child, _describe_exit(code, child), wrong_setting=code == CONFIG_ERROR_CODE)
            else:
                self._probe(child)
        reap_orphans(self._pids())
        self._look_at_segments()

    def _look_at_segments(self) -> None:
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        self._segments.look(self._families)
        if self._segments.known != self._remembered:
            self._remembered = self._segments.known
            self._remember(self._remembered)

    def _families(self) -> dict[str, list[psutil.Process]]:
        return {child.spec.name: family(child.process.pid) for child in self._table if child.process is not None}

    def _pids(self) -> list[int]:
        return [child.process.pid for child in self._table if child.process is not None]

    def _probe(self, child: _Child) -> None:
        if child.asker is not None:
            self._await(child, child.asker)
        elif child.pulse is not None and (trouble := child.pulse.trouble()):
            self._bury(child, trouble)

    def _await(self, child: _Child, asker: Asker) -> None:
        """Looks whether it is ready. While it, or a process below it, is stopped by a signal, it is not, whatever it answered before."""
        if child.vitals.due(LOOK_S):
            child.vitals.look(family(asker.pid))
        if child.vitals.stopped_too_long(LOOK_S):
            self._bury(child, "hangs: it was stopped before it was ready")
        elif child.vitals.stopped_s():
            return
        elif asker.complaint is None:
            self._welcome(child, asker.pid)
        elif time.monotonic() - child.started > child.spec.start_timeout_s:
            what = f"was not ready within {child.spec.start_timeout_s:.0f} s ({asker.complaint})"
            self._bury(child, what, late=True)

    def _welcome(self, child: _Child, pid: int) -> None:
        """It is ready."""
        child.lost = ""
        self._ask_no_more(child)
        child.pulse = Pulse(pid, child.spec.healthy)
        if child.restarts:
            self._say(f"{child.spec.name} is ready again, {time.monotonic() - child.started:.1f} s after its start")
        self._tell()

    def _ask_no_more(self, child: _Child) -> None:
        for asking in (child.asker, child.pulse):
            if asking is not None:
                asking.stop()
        child.asker = child.pulse = None

    def _bury(self, child: _Child, what: str, *, wrong_setting: bool = False, late: bool = False) -> None:
        """Ends what is left of a process and decides when it starts again.

        Args:
            child: the process.
            what: happened to it, for people.
            wrong_setting: starting it again will not help.
            late: it was not ready in time; nobody waits for it any more.

        Raises:
            GaveUp: it will not, and the stack has never been ready.
        """
        if child.process is None:
            return
        quick = not child.ready or time.monotonic() - child.started < QUICK_S
        child.quick_deaths = child.quick_deaths + 1 if quick else 0
        self._end(child)
        if wrong_setting and not self._was_ready:
            raise GaveUp(f"{child.spec.name} {what}; gave up on it. {_last_words(child)}")
        hopeless = wrong_setting or child.quick_deaths > len(BACK_OFF_S)
        wait_s = LOST_RETRY_S if hopeless else BACK_OFF_S[max(0, child.quick_deaths - 1)]
        if hopeless or late or child.lost:
            child.lost = what
        alone = ", the others go on meanwhile" if child.lost else ""
        child.restart_at = time.monotonic() + wait_s
        self._say(f"{child.spec.name} {what}; starting it again in {wait_s:g} s{alone} (log: {child.log_path})")
        self._tell()

    def _end(self, child: _Child) -> None:
        if child.process is None:
            return
        self._ask_no_more(child)
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
        asked = self._stops
        for stage in sorted({child.spec.stage for child in self._table}):
            members = [child for child in self._table if child.spec.stage == stage and child.process is not None]
            if members:
                self._say(f"draining {', '.join(child.spec.name for child in members)}")
            for child in members:
                if child.process is not None:
                    child.process.terminate()
            deadline = time.monotonic() + max((child.spec.drain_timeout_s for child in members), default=0.0)
            while time.monotonic() < deadline and self._stops <= max(asked, 1) and any(map(_is_running, members)):
                time.sleep(POLL_S)
            for child in members:
                if _is_running(child):
                    in_time = time.monotonic() < deadline
                    self._say(f"{child.spec.name} {'drains no more' if in_time else 'did not drain in time'}: killed")
                self._end(child)

    def _tell(self) -> None:
        states = {
            child.spec.name: ProcessState(
                child.process.pid, child.created, child.spec.port, ready=child.ready, restarts=child.restarts
            )
            for child in self._table
            if child.process is not None
        }
        lost = {child.spec.name: child.lost for child in self._table if child.lost}
        self._changed(all(self._need_not_wait(child) for child in self._table), states, lost)


def _is_running(child: _Child) -> bool:
    return child.process is not None and child.process.poll() is None


def _describe_exit(code: int, child: _Child) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    said = _last_line(child)
    return f"ended with code {code}" + (f": {said}" if said else "")


def _last_words(child: _Child, size: int = 600) -> str:
    """The end of a log, for an error message."""
    text = _end_of_log(child, size)
    return f"Its log ({child.log_path}) ends:\n{text}" if text else f"Its log is {child.log_path}."


def _last_line(child: _Child) -> str:
    """What a process that ended said last of it: its newest error, or else its last line; in one line."""
    lines = _end_of_log(child, CAUSE_BYTES).splitlines()
    for raw in reversed(lines):
        line = parse_line(raw.encode())
        if line is not None and line.get("level") in {"ERROR", "CRITICAL"}:
            trace = str(line.get("error", "")).strip().splitlines()
            return f"{line.get('message')}{f': {trace[-1]}' if trace else ''}"[:CAUSE_CHARS]
    return lines[-1][:CAUSE_CHARS] if lines else ""


def _end_of_log(child: _Child, size: int) -> str:
    """What its newest process has written, at most so many bytes of it."""
    try:
        with child.log_path.open("rb") as file:
            file.seek(max(child.log_from, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
