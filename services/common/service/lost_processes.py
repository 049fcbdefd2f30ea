"""Processes of a home's stack that its supervisor cannot keep alive, as it notes them in `<home>/up.json` for others to tell."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import psutil

UP_FILE = "up.json"


@dataclass(frozen=True, slots=True)
class LostProcess:
    """One of them; it is tried again every minute.

    Example: LostProcess("rollout-0", "ended with code 1: RuntimeError: no memory", 1795348800.0)
    """

    name: str
    cause: str
    at: float
    """Unix seconds of the note."""


def lost_processes(home: Path) -> list[LostProcess]:
    """By name; none where no supervisor runs, or its note cannot be read (then nothing is known)."""
    path = home / UP_FILE
    try:
        note, at = json.loads(path.read_text()), path.stat().st_mtime
        if abs(psutil.Process(int(note["pid"])).create_time() - float(note["created"])) > 0.1:
            return []
        return [LostProcess(str(name), str(cause), at) for name, cause in sorted(dict(note["lost"]).items())]
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return []
