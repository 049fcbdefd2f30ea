"""A wall clock that the harness can move, for the Python services: `time.time` plus what a file says. The monotonic clock stays right."""

from __future__ import annotations

import time
from pathlib import Path

_LOOK_S = 0.05


def offset_file(folder: Path, service: str) -> Path:
    """Holds the offset of a service's clock, seconds as text; no file: none."""
    return folder / f"clock-{service}"


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
                offset = float(path.read_text())
            except (FileNotFoundError, ValueError):
                offset = 0.0
        return real() + offset

    time.time = shifted
