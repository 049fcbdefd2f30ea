"""Starts a table of processes, restarts what dies, and takes them all down in order.

table ──► start ──► ready? ──► watch ──┬─ died, hangs, unhealthy ──► back off ──► start again ──► … ──► give up
                                       └─ SIGINT, SIGTERM ──► drain stage 0, 1, 2 … ──► kill what is left

What cannot be kept alive ends the stack, unless others do the same work (rollout servers): then those go on, and it is tried again later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.cli import children
from services.cli.asker import Asker, Probe
from services.cli.pulse import Pulse
from services.cli.state import ProcessState
from services.common.errors import MillraceError
from services.common.vitals import Vitals, family

POLL_S = 0.1
LOOK_S = 0.5
BACK_OFF_S: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits before the restarts that follow quick deaths in a row; after as many, the supervisor gives up."""
QUICK_S = 20.0
"""A process that dies before it was ready, or sooner than this after its start, died quickly."""
LOST_RETRY_S = 60.0
"""Wait before another try of a process that the stack can do without for now."""
KILL_MARGIN_S = 15.0
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


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
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
    was_ready: bool = False
    lost: str = ""
    """Why the stack goes on without it; empty while it need not."""

    @property
    def ready(self) -> bool:
        """Whether it has said so; its pulse is followed since."""
        return self.pulse is not None

    @property
    def service(self) -> str:
        """What it does: `rollout-0` and `rollout-1` do the same."""
        return self.spec.name.partition("-")[0]


class GaveUp(MillraceError):  # noqa: N818  it is what happened
    """A process could not be kept alive; the message names it and its log."""


class Supervisor:
    """Runs the table until it is asked to stop. Lives in the main thread."""

    def __init__(
        self,
        table: Sequence[ProcessSpec],
        logs: Path,
        *,
        say: Callable[[str], None],
        changed: Callable[[bool, dict[str, ProcessState], dict[str, str]], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            table: the processes.
            logs: folder of their logs, `<name>.log`.
            say: told what happened, for people.
            changed: told whether all are ready, the processes, and why the stack goes on without some, whenever one of these changes.
        """
        self._table = [_Child(spec, logs / f"{spec.name}.log") for spec in table]
        self._say = say
        self._changed = changed
        self._stops = 0

    def run(self) -> None:
        """Starts everything, keeps it alive until SIGINT, SIGTERM or SIGHUP, then drains it; a second signal kills what is left.

        Raises:
            GaveUp: a process died too often or too soon, or did not become ready; the others were drained.
        """
        children.adopt_orphans()
        handlers = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            for stage in sorted({child.spec.stage for child in self._table}, reverse=True):
                self._start_stage(stage)
            if not self._stops:
                self._say("ready")
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
        while not self._stops and not all(child.ready or child.lost for child in members):
            self._watch(begun)
            time.sleep(POLL_S)

    def _start(self, child: _Child) -> None:
        if child.log_path.exists() and child.log_path.stat().st_size > LOG_LIMIT_BYTES:
            child.log_path.replace(child.log_path.with_suffix(".log.1"))
        child.process = children.start_child(
            child.spec.argv, env=child.spec.env, log_path=child.log_path, cores=child.spec.cores
        )
        child.created = children.created_at(child.process.pid)
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
                self._bury(child, _describe_exit(code), may_restart=code != CONFIG_ERROR_CODE)
            else:
                self._probe(child)
        children.reap_orphans(self._pids())

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
            self._bury(child, what, may_restart=child.restarts > 0)

    def _welcome(self, child: _Child, pid: int) -> None:
        """It is ready."""
        child.was_ready = True
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

    def _bury(self, child: _Child, what: str, *, may_restart: bool = True) -> None:
        """Ends what is left of a process and decides when it starts again.

        Raises:
            GaveUp: it will not.
        """
        if child.process is None:
            return
        quick = not child.ready or time.monotonic() - child.started < QUICK_S
        child.quick_deaths = child.quick_deaths + 1 if quick else 0
        self._end(child)
        wait_s, alone = LOST_RETRY_S, ""
        if may_restart and child.quick_deaths <= len(BACK_OFF_S):
            wait_s = BACK_OFF_S[max(0, child.quick_deaths - 1)]
        elif self._can_do_without(child):
            child.lost, alone = what, ", the others go on meanwhile"
        else:
            raise GaveUp(f"{child.spec.name} {what}; gave up on it. {_last_words(child.log_path)}")
        child.restart_at = time.monotonic() + wait_s
        self._say(f"{child.spec.name} {what}; starting it again in {wait_s:g} s{alone} (log: {child.log_path})")
        self._tell()

    def _can_do_without(self, child: _Child) -> bool:
        """Whether it did its work once, and others of the table do the same."""
        others = [other for other in self._table if other is not child and other.service == child.service]
        return child.was_ready and any(not other.lost for other in others)

    def _end(self, child: _Child) -> None:
        if child.process is None:
            return
        self._ask_no_more(child)
        children.kill_tree(child.process.pid)
        child.process.wait()
        child.process = None
        children.kill_orphans(self._pids())

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
                    self._say(f"{child.spec.name} did not drain in time: killed")
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
        self._changed(all(child.ready or child.lost for child in self._table), states, lost)


def _is_running(child: _Child) -> bool:
    return child.process is not None and child.process.poll() is None


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _last_words(path: Path, size: int = 600) -> str:
    """The end of a log, for an error message."""
    try:
        with path.open("rb") as file:
            file.seek(-min(size, os.fstat(file.fileno()).st_size), os.SEEK_END)
            text = file.read().decode(errors="replace").strip()
    except OSError:
        text = ""
    return f"Its log ({path}) ends:\n{text}" if text else f"Its log is {path}."
