"""Log reader: the log lines about one job from all services of a home, merged by time.

<home>/logs/<process>.log[.1] ──► JSON lines with `job_id` ──► filter ──► sorted by `at`
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_INTERVAL_S = 0.5
_STANDARD_FIELDS = frozenset({"at", "level", "service", "logger", "job_id", "message", "error"})

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Filter:
    """Selection of log lines."""

    job_id: str
    level: str = "INFO"
    """The least level that is selected."""
    service: str | None = None
    """`learner`, `rollout` …; None selects all but the gateway's reads: every read of the job adds to those."""

    def takes(self, line: Line) -> bool:
        """Whether the line is selected."""
        if line.get("job_id") != self.job_id or _rank(line.get("level")) < _rank(self.level):
            return False
        if self.service is None:
            return not (str(line.get("logger", "")).endswith(".access") and str(line.get("message")).startswith("GET "))
        return line.get("service") == self.service


@dataclass(slots=True)
class _Tail:
    """One log file, read as it grows, and from its beginning when another file replaces it."""

    path: Path
    inode: int = 0
    offset: int = 0
    rest: bytes = b""

    def read(self) -> Iterator[bytes]:
        """Complete lines since the last call."""
        try:
            with self.path.open("rb") as file:
                inode = self.path.stat().st_ino
                if inode != self.inode or file.seek(0, 2) < self.offset:
                    self.inode, self.offset, self.rest = inode, 0, b""
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        yield from lines


class LogReader:
    """Reads a home's logs: all lines at the first call, new lines at later calls."""

    def __init__(self, folder: Path, selection: Filter) -> None:
        self._folder, self._selection = folder, selection
        self._tails: dict[Path, _Tail] = {}

    def read(self) -> list[Line]:
        """Lines since the last call, oldest first."""
        for path in [*self._folder.glob("*.log"), *([] if self._tails else self._folder.glob("*.log.1"))]:
            self._tails.setdefault(path, _Tail(path))
        job_id = self._selection.job_id.encode()  # most lines do not mention it, and need not be parsed
        lines = (parse_line(raw) for tail in self._tails.values() for raw in tail.read() if job_id in raw)
        selected = (line for line in lines if line and self._selection.takes(line))
        return sorted(selected, key=lambda line: str(line.get("at")))

    def follow(self) -> Iterator[Line]:
        """Lines from the beginning on, without end."""
        while True:
            yield from self.read()
            time.sleep(POLL_INTERVAL_S)


def parse_line(raw: bytes) -> Line | None:
    """A structured line, or None for other output, for example a library's."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def format_line(line: Line) -> str:
    """One line for people; the further lines of the message and an error's traceback follow, indented.

    Example: `13:59:49.578 INFO    rollout  the engine is up after 44.1 s`
    """
    at = str(line.get("at", "")).partition("T")[2].rstrip("Z")
    fields = " ".join(f"{name}={value}" for name, value in line.items() if name not in _STANDARD_FIELDS)
    first, *others = str(line.get("message", "")).splitlines() or [""]
    text = f"{at} {line.get('level', ''):7} {line.get('service', ''):8} {first}"
    below = "".join(f"\n    {part}" for part in [*others, *str(line.get("error", "")).splitlines()])
    return f"{text}{f'  [{fields}]' if fields else ''}{below}"


def _rank(level: object) -> int:
    return logging.getLevelNamesMapping().get(str(level).upper(), logging.INFO)
