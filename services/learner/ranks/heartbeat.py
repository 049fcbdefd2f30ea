"""The pulse of the ranks: each beats through a small file, from a thread; the agent of its machine kills the one that hangs.

rank ── every BEAT_S ──► <folder>/<rank>: "<pid> <beats>" ──► agent ── no beat, and it stands still ──► SIGKILL ──► torchelastic restarts
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

FOLDER = "MILLRACE_BEATS"
"""Environment variable that names the folder to the ranks."""
BEAT_S = 1.0
LOOK_S = 1.0


def beat_forever(folder: Path, rank: int, pid: int) -> None:
    """Beats from a daemon thread, to the end of the process."""
    file = os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def beat() -> None:
        for count in itertools.count():
            with contextlib.suppress(OSError):
                os.pwrite(file, f"{pid:10d} {count:12d}".encode(), 0)  # in place: a full disk stops no heart
            time.sleep(BEAT_S)

    threading.Thread(target=beat, name="pulse", daemon=True).start()


@dataclass(slots=True)
class _Heard:
    """The newest beat of one rank, and when this machine's agent heard it first: clocks of the ranks do not matter."""

    text: str
    at: float
    vitals: Vitals = field(default_factory=Vitals)


class RanksWatch:
    """The ranks of this machine, and the process that starts them; call `look` every LOOK_S."""

    def __init__(self, folder: Path) -> None:
        """An empty folder, of a file system that never makes anybody wait."""
        self._folder = folder
        self._heard: dict[str, _Heard] = {}
        self._all = Vitals()

    def look(self, launcher: int) -> list[str]:
        """Kills what hangs; returns what it was. `launcher`: process id of torchelastic, whose end is its ranks' end."""
        relatives = {process.pid: process for process in family(launcher)}
        self._all.look(relatives.values())
        hung = [trouble for path in sorted(self._folder.iterdir()) if (trouble := self._rank(path, relatives))]
        if not hung and self._all.stopped_too_long(LOOK_S):  # torchelastic, or a rank that does not beat yet
            hung.append(f"torchelastic hangs: {self._all.still()}")
            kill(relatives.values())
        return hung

    def _rank(self, path: Path, relatives: dict[int, psutil.Process]) -> str | None:
        try:
            text = path.read_text()
            pid = int(text.split()[0])
        except (OSError, ValueError, IndexError):
            return None
        heard, now = self._heard.get(path.name), time.monotonic()
        if heard is None or heard.text.split()[0] != str(pid):
            heard = self._heard[path.name] = _Heard(text, now)
        if pid not in relatives:
            return None  # it has ended: torchelastic knows
        if not heard.vitals.look([relatives[pid]]) or heard.text != text:
            heard.text, heard.at = text, now
        hang = heard.vitals.hang(now - heard.at, watchdog.two_beats(LOOK_S))
        if hang is None:
            return None
        kill([relatives[pid]])
        return f"rank {path.name} hangs: no heartbeat for {hang}"
