"""Process tree: a process, its descendants and its orphans; finds and kills them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import psutil


def process_of(pid: int) -> list[psutil.Process]:
    """The process alone; empty when it is gone."""
    try:
        return [psutil.Process(pid)]
    except psutil.Error:
        return []


def family(root: int | psutil.Process) -> list[psutil.Process]:
    """A process and its descendants that have not ended; empty when it is gone."""
    try:
        process = psutil.Process(root) if isinstance(root, int) else root
        return [member for member in (process, *process.children(recursive=True)) if is_running(member)]
    except psutil.Error:
        return []


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kills the processes (SIGKILL); skips those that are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def is_running(process: psutil.Process | int) -> bool:
    """Whether the process, or the one with this id, runs; a zombie does not."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_same(pid: int, created: float) -> bool:
    """Whether the process with this id and creation time (Unix seconds) still runs, and not another that got its id."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < 0.1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def created_at(pid: int) -> float:
    """Creation time of a process, Unix seconds; 0 when it is gone."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def kill_group(pid: int) -> None:
    """Kills a process and the process group that it leads."""
    for send in (os.killpg, os.kill):  # the process too: it may not have made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            send(pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kills a process, its descendants, and its process group."""
    doomed = descendants(pid)
    kill_group(pid)
    for each in doomed:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Makes the kernel send this process the signal `number` when the thread that started it ends. Linux only; elsewhere it does nothing.

    It needs no lock, so it may run between fork and exec. `parent`: the parent's process id, read before the fork; None reads it now.
    """
    if _LIBC is None:
        return
    parent = os.getppid() if parent is None else parent
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the signal was armed
        os._exit(1)


def end_process(status: int) -> NoReturn:
    """Ends this process at once, with its logs written: no thread is waited for, and no destructor runs."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def adopt_orphans() -> bool:
    """Makes this process the subreaper of its descendants' orphans, so that it can find and kill them; False where the system cannot."""
    return _LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def child_pids(pid: int) -> list[int]:
    """Process ids of a process's children, zombies included; empty when it is gone."""
    lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
    found: list[int] = []
    for file in lists:
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, file.read_text().split())
    if not lists:  # a kernel without these lists
        with contextlib.suppress(psutil.Error):
            found = [child.pid for child in psutil.Process(pid).children()]
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of what is below a process. It costs as much as there is of it, and not a walk over the machine's processes."""
    found = child_pids(pid)
    for each in found:
        found.extend(child_pids(each))
    return found


def reap_orphans(mine: Iterable[int]) -> list[int]:
    """Reaps this process's ended children other than `mine`, so that none stays a zombie (after `adopt_orphans`); does not wait."""
    known, reaped = set(mine), []
    while hasattr(os, "waitid"):  # not on macOS before Python 3.13, where there are no adopted orphans either
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has no children
            break
        if ended is None or ended.si_pid in known:  # its own starter reaps it, and those after it are next
            break
        os.waitpid(ended.si_pid, 0)
        reaped.append(ended.si_pid)
    return reaped


def kill_orphans(mine: Iterable[int]) -> set[int]:
    """Kills this process's children other than `mine`: the orphans of dead children (after `adopt_orphans`). Returns those to reap."""
    orphans = set(child_pids(os.getpid())) - set(mine)
    for pid in orphans:
        kill_tree(pid)
    return orphans
