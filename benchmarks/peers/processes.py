"""Processes that are measured: their memory, their time limit, and their end."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil

from services.common.errors import MillraceError
from services.common.service.process_tree import family, kill_tree

ROOT = Path(__file__).parents[2]
SAMPLE_S = 1.0


class SideError(MillraceError):
    """One side of the comparison failed; the message ends with the last line of its log."""


class PeakMemory:
    """The largest sum of the resident memory of a process and its descendants; a page that two share counts twice."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, sum(map(_resident, family(self._pid))))


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


class Child:
    """A measured process: its standard output by lines, its errors in a log. It is killed on exit, or when its time is over."""

    def __init__(self, command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str]) -> None:
        self._log, self._limit_s = log, limit_s
        self._overdue = False
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment}, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        kill_tree(self.pid)
        self._process.communicate()

    def lines(self) -> Iterator[str]:
        """Lines of its output until it ends. Raises SideError unless it ends well, and in time."""
        for line in self._process.stdout or ():
            yield line.rstrip("\n")
        if self._process.wait() != 0:
            ended = (
                f"took more than {self._limit_s:.0f} s" if self._overdue else f"ended with {self._process.returncode}"
            )
            raise SideError(f"{self._log.stem} {ended}: {last_line(self._log)}")

    def _end(self) -> None:
        self._overdue = True
        kill_tree(self.pid)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    if not log.exists():
        return f"there is no {log.name}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"{log} is empty"


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables of the processes that are started within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
