"""Heartbeat of the ranks and of the weights' process: a thread of each writes a small file; the agent of its machine kills what hangs.

rank ── every BEAT_S ──► <folder>/<name>: "<pid> <beats>" ──► agent ── no beat and no CPU time ──► SIGKILL ──► torchelastic restarts
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from services.common.service import watchdog
from services.common.service.process_tree import family, kill
from services.common.service.watchdog import Vitals

log = logging.getLogger(__name__)

HEARTBEAT_DIR_VARIABLE = "MILLRACE_BEATS"
"""Environment variable that names the folder to the ranks."""
BEAT_S = 1.0
CHECK_INTERVAL_S = 1.0


def beat_forever(folder: Path, name: str, pid: int) -> None:
    """Writes the heartbeat of a process, such as "rank 0", from a daemon thread, until the process ends."""
    file = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def beat() -> None:
        for count in itertools.count():
            with contextlib.suppress(OSError):
                os.pwrite(file, f"{pid:10d} {count:12d}".encode(), 0)  # in place: works on a full disk, too
            time.sleep(BEAT_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


@dataclass(slots=True)
class _Beat:
    """The newest heartbeat of one process, and the agent's time of its arrival: the processes' clocks do not matter."""

    pid: int
    text: str
    at: float
    vitals: Vitals = field(default_factory=Vitals)


class RanksWatchdog:
    """Watchdog of this machine's ranks, their weights' process and the process that starts them; call `check` every CHECK_INTERVAL_S."""

    def __init__(self, folder: Path) -> None:
        """`folder`: empty, on a file system that never blocks."""
        self._folder = folder
        self._beats: dict[str, _Beat] = {}
        self._others = Vitals()
        """Of torchelastic, ranks without heartbeats yet, and what ranks have started."""

    def check(self, launcher: int) -> list[str]:
        """Kills processes that hang and reports them. `launcher`: process id of torchelastic, with which its ranks end."""
        relatives = {process.pid: process for process in family(launcher)}
        hung = [report for path in sorted(self._folder.iterdir()) if (report := self._check_one(path, relatives))]
        beating = {beat.pid for beat in self._beats.values()}
        self._others.sample(process for pid, process in relatives.items() if pid not in beating)
        if not hung and self._others.stopped_too_long(CHECK_INTERVAL_S):
            hung.append(f"torchelastic hangs: {self._others.still()}")
            kill(relatives.values())
        return hung

    def _check_one(self, path: Path, relatives: dict[int, psutil.Process]) -> str | None:
        try:
            text = path.read_text()
            pid = int(text.split()[0])
        except (OSError, ValueError, IndexError):
            return None
        beat, now = self._beats.get(path.name), time.monotonic()
        if beat is None or beat.pid != pid:
            beat = self._beats[path.name] = _Beat(pid, text, now)
        if pid not in relatives:
            return None  # it has ended: torchelastic knows
        if not beat.vitals.sample([relatives[pid]]) or beat.text != text:
            beat.text, beat.at = text, now
        hang = beat.vitals.hang(now - beat.at, watchdog.max_silence_s(CHECK_INTERVAL_S))
        if hang is None:
            return None
        kill([relatives[pid]])
        return f"{path.name} hangs: no heartbeat for {hang}"
