"""Child processes that cannot outlive their parent: own process group, a log file, a death signal from the kernel."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_child(
    argv: Sequence[str], *, log_path: Path, env: dict[str, str] | None = None, cores: frozenset[int] = frozenset()
) -> subprocess.Popen[bytes]:
    """Starts a program in a process group of its own, its output appended to `log_path`.

    On Linux the kernel sends it SIGTERM when the thread that called this ends: call it from the main thread.

    Args:
        argv: the program and its arguments.
        log_path: gets stdout and stderr; its directory is made.
        env: the whole environment; None hands on this process's.
        cores: CPU cores it may run on; empty for all.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=_before_exec(os.getpid(), cores),  # noqa: PLW1509  nothing is allocated or locked in it
        )


def _before_exec(parent: int, cores: frozenset[int]) -> Callable[[], None]:
    def prepare() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:  # it died before the signal was armed
                os._exit(1)
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    return prepare


def adopt_orphans() -> bool:
    """Makes this process the parent of its descendants' orphans, so that it can find and end them; False where the system cannot."""
    return _LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def signal_group(pid: int, number: signal.Signals) -> bool:
    """Signals the process group that `pid` leads; False when nothing of it is left."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        return False
    return True
