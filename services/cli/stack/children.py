"""Child processes that cannot outlive their parent: own process group, a log file, a death signal from the kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from services.common.service.processes import die_with_parent, family, kill


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


def signal_group(pid: int, number: signal.Signals) -> bool:
    """Signals the process group that `pid` leads; False when nothing of it is left."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        return False
    return True


def is_same(pid: int, created: float) -> bool:
    """Whether the process that had this id and creation time (Unix seconds) is still there, and not another that got its id."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < 0.1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def created_at(pid: int) -> float:
    """When a process was created, Unix seconds; 0 when it is gone."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def kill_tree(pid: int) -> None:
    """Kills a process, its descendants, and its process group, at once."""
    doomed = family(pid)
    signal_group(pid, signal.SIGKILL)
    kill(doomed)


def reap_orphans(mine: Iterable[int]) -> list[int]:
    """Reaps this process's ended children other than `mine`, so that none stays as a zombie (after `adopt_orphans`); never waits."""
    known, reaped = set(mine), []
    while hasattr(os, "waitid"):  # not on macOS before Python 3.13, where there are no adopted orphans either
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has no children
            break
        if ended is None or ended.si_pid in known:  # whoever started it asks for its end, and those behind it are next
            break
        os.waitpid(ended.si_pid, 0)
        reaped.append(ended.si_pid)
    return reaped


def kill_orphans(mine: Iterable[int]) -> list[int]:
    """Kills and reaps this process's children other than `mine`: what dead children left behind (after `adopt_orphans`)."""
    known = set(mine)
    orphans = [child for child in psutil.Process().children() if child.pid not in known]
    for orphan in orphans:
        kill_tree(orphan.pid)
    for orphan in orphans:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(orphan.pid, 0)
    return [orphan.pid for orphan in orphans]
