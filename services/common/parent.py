"""A child that must not outlive its parent says so to the kernel itself, first thing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Lets the kernel send this process `number` when the thread that started it ends. Linux only; elsewhere it does nothing."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the signal was armed
        os.kill(os.getpid(), number)
