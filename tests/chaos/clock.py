"""A wall clock that the harness can move, for the Python services: `time.time` plus what a file says. The monotonic clock stays right."""

from __future__ import annotations

import time
from pathlib import Path

_LOOK_S = 0.05


def offset_file(folder: Path, service: str) -> Path:
    """Holds the offset of a service's clock, seconds as text; no file: none."""
    return folder / f"clock-{service}"


def seen_file(folder: Path, service: str) -> Path:
    """Holds the offset that the service's clock has now, as the service itself says."""
    return folder / f"clock-{service}.seen"


def install(service: str, folder: Path) -> None:
    """Replaces `time.time` in this process."""
    path, real = offset_file(folder, service), time.time
    looked_at, offset = -1.0, 0.0

    def shifted() -> float:
        nonlocal looked_at, offset
        now = time.monotonic()
        if now - looked_at > _LOOK_S:
            looked_at = now
            try:
                wanted = float(path.read_text())
            except (FileNotFoundError, ValueError):
                wanted = 0.0
            if wanted != offset:
                seen_file(folder, service).write_text(str(wanted))
            offset = wanted
        return real() + offset

    time.time = shifted
