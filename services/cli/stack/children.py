"""Child processes that cannot outlive their parent: each has its own process group, a log file, and a death signal from the kernel."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from services.common.service.process_tree import die_with_parent


def free_port() -> int:
    """A TCP port of the loopback interface that was free at the time of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_child(
    argv: Sequence[str], *, log_path: Path, env: dict[str, str] | None = None, cores: frozenset[int] = frozenset()
) -> subprocess.Popen[bytes]:
    """Starts a program in a process group of its own, its output appended to `log_path`, whose directory is created.

    On Linux the kernel sends it SIGTERM when the thread that called this ends: call it from the main thread.
    `env`: the whole environment; None passes this process's environment on. `cores`: CPU cores it may run on; empty for all.
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
            preexec_fn=partial(_prepare_child, os.getpid(), cores),  # noqa: PLW1509  nothing is allocated or locked in it
        )


def _prepare_child(parent: int, cores: frozenset[int]) -> None:
    die_with_parent(signal.SIGTERM, parent)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
