"""Starts of a job's ranks without a step between: a file in the job's folder, so that agents which die with them count on."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

STARTS_FILE = "starts.json"
MOST = 8
"""More than one agent makes by itself before it gives a job up."""


def count_start(folder: Path, step: int) -> int:
    """Notes another start at this step; how many there were at it, this one included."""
    path = folder / STARTS_FILE
    try:
        known = json.loads(path.read_text())
        starts = int(known["starts"]) + 1 if known["step"] == step else 1
    except (OSError, ValueError, KeyError, TypeError):
        starts = 1
    with contextlib.suppress(OSError):  # a full disk is no reason not to start
        path.write_text(json.dumps({"step": step, "starts": starts}))
    return starts


def forget_starts(folder: Path) -> None:
    """The ranks were stopped in good order, or the job waits at a person's request."""
    (folder / STARTS_FILE).unlink(missing_ok=True)
