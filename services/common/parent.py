"""Parents and children as the kernel has them: a child that dies with its parent, a parent that adopts orphans, who is whose child."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Lets the kernel send this process `number` when the thread that started it ends. Linux only; elsewhere it does nothing.

    Allocates nothing worth a lock, so it may stand between fork and exec.

    Args:
        number: the signal.
        parent: the parent's process id, where it was noted before the fork; None asks for it now.
    """
    if _LIBC is None:
        return
    parent = os.getppid() if parent is None else parent
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the signal was armed
        os._exit(1)


def adopt_orphans() -> bool:
    """Makes this process the parent of its descendants' orphans, so that it can find and end them; False where the system cannot."""
    return _LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def child_pids(pid: int) -> list[int]:
    """Process ids of a process's children, ended ones that nobody has reaped among them; empty when it is gone."""
    lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
    found: list[int] = []
    for file in lists:
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, file.read_text().split())
    if not lists:  # a kernel without these lists
        with contextlib.suppress(psutil.Error):
            found = [child.pid for child in psutil.Process(pid).children()]
    return found
