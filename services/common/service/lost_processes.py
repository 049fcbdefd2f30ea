"""Lost processes: those of a local stack that its supervisor cannot keep alive and records in `<home>/up.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from services.common.service.process_tree import is_same

UP_FILE = "up.json"


@dataclass(frozen=True, slots=True)
class LostProcess:
    """A process that the supervisor cannot keep alive; it is started again every minute.

    Example: LostProcess("rollout-0", "ended with code 1: RuntimeError: no memory", 1795348800.0)
    """

    name: str
    cause: str
    at: float
    """Unix seconds of the record."""


def lost_processes(home: Path) -> list[LostProcess]:
    """Lost processes by name; none where no supervisor runs, or its record cannot be read (then nothing is known)."""
    path = home / UP_FILE
    try:
        record, at = json.loads(path.read_text()), path.stat().st_mtime
        if not is_same(int(record["pid"]), float(record["created"])):
            return []
        return [LostProcess(str(name), str(cause), at) for name, cause in sorted(dict(record["lost"]).items())]
    except (OSError, ValueError, KeyError, TypeError):
        return []
