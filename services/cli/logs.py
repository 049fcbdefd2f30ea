"""A job's log lines from all services of a home, merged by time.

<home>/logs/<process>.log[.1] ──► JSON lines with `job_id` ──► filter ──► sorted by `at`
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_S = 0.5
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STAMPS = frozenset({"at", "level", "service", "logger", "job_id", "message", "error"})

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which lines count."""

    job_id: str
    level: str = "INFO"
    """The least one."""
    service: str | None = None
    """`learner`, `rollout` …; None takes all, but for the gateway's reads, which every look at the job adds to."""

    def takes(self, line: Line) -> bool:
        """Whether this line is one."""
        if line.get("job_id") != self.job_id or _rank(line.get("level")) < _rank(self.level):
            return False
        if self.service is None:
            return not (str(line.get("logger", "")).endswith(".access") and str(line.get("message")).startswith("GET "))
        return line.get("service") == self.service


@dataclass(slots=True)
class _Tail:
    """One log file, read as it grows and begun again when another takes its place."""

    path: Path
    inode: int = 0
    offset: int = 0
    rest: bytes = field(default=b"")

    def read(self) -> Iterator[bytes]:
        """Whole lines that came since the last call."""
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
    """Reads a home's logs, first from their beginning and then what is new."""

    def __init__(self, folder: Path, wanted: Filter) -> None:
        """Reads nothing yet."""
        self._folder = folder
        self._wanted = wanted
        self._tails: dict[Path, _Tail] = {}

    def read(self) -> list[Line]:
        """Lines that came since the last call, oldest first."""
        for path in [*self._folder.glob("*.log"), *([] if self._tails else self._folder.glob("*.log.1"))]:
            self._tails.setdefault(path, _Tail(path))
        lines = (parse_line(raw) for tail in self._tails.values() for raw in tail.read() if self._mentions(raw))
        return sorted(
            (line for line in lines if line and self._wanted.takes(line)), key=lambda line: str(line.get("at"))
        )

    def follow(self) -> Iterator[Line]:
        """Lines from the beginning on, for ever."""
        while True:
            yield from self.read()
            time.sleep(POLL_S)

    def _mentions(self, raw: bytes) -> bool:
        """Spares most lines the parsing."""
        return self._wanted.job_id.encode() in raw


def parse_line(raw: bytes) -> Line | None:
    """A structured line, or None for what a library printed as it liked."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def format_line(line: Line) -> str:
    """One line for people; an error's traceback follows, indented.

    Example: `13:59:49.578 INFO    rollout  the engine is up after 44.1 s`
    """
    at = str(line.get("at", "")).partition("T")[2].rstrip("Z")
    more = " ".join(f"{name}={value}" for name, value in line.items() if name not in _STAMPS)
    first, *others = str(line.get("message", "")).splitlines() or [""]
    text = f"{at} {line.get('level', ''):7} {line.get('service', ''):8} {first}"
    below = "".join(f"\n    {part}" for part in [*others, *str(line.get("error", "")).splitlines()])
    return f"{text}{f'  [{more}]' if more else ''}{below}"


def _rank(level: object) -> int:
    return logging.getLevelNamesMapping().get(str(level).upper(), logging.INFO)
