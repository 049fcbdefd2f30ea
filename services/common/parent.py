"""A child that must not outlive its parent says so to the kernel itself, first thing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
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
