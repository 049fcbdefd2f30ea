"""Child processes that cannot outlive their parent: own process group, a log file, a death signal from the kernel."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from services.common.service.process_tree import die_with_parent


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
        die_with_parent(signal.SIGTERM, parent)
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    return prepare
