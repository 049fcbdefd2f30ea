"""Processes that tests watch."""

from __future__ import annotations

import psutil


def is_at_work(pid: int) -> bool:
    """Whether the process runs: it has not ended, also if nobody has yet waited for it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
