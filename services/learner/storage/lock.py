"""One head at a time writes the files of a job: a lock on `<job folder>/lock`, which dies with the process that holds it.

Redis refuses what an older head sends (`services.common.redis.fencing`); this keeps it from journal and checkpoints, too. A head takes it
after its incarnation: the older one then hears at its next write to Redis that its time is over, ends, and lets go. One that stands
still hears nothing, and is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import signal
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from services.common.errors import MillraceError
from services.learner.storage.folder import LOCK_FILE

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""Longer than a head that was told to end has until it is killed."""
LOOK_AGAIN_S = 0.1


class FolderTaken(MillraceError):  # noqa: N818  what has happened
    """Another process writes the job's folder, and did not let go in time; names the folder and the process."""


class FolderLock:
    """The right to write a job's folder, until `release` or the end of the process. Use it as a context manager."""

    def __init__(self, handle: int) -> None:
        """For `take`."""
        self._handle = handle
        _held.add(self)

    @classmethod
    def take(cls, folder: Path, wait_s: float = WAIT_S, *, kill_after_s: float | None = None) -> Self:
        """Waits for the lock, takes it, and writes into its file who has it: call it from a thread where a loop must not wait.

        Args:
            folder: the job's.
            wait_s: for so long.
            kill_after_s: a process of this machine that has it still is then killed. For a caller who knows that it has been replaced.

        Raises:
            FolderTaken: another process still had it after `wait_s` seconds.
            OSError: the file cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOCK_FILE
        handle = os.open(
            path, os.O_RDWR | os.O_CREAT, 0o644
        )  # not inherited by what is executed; see `_forget` for forks
        try:
            _lock(handle, path, wait_s, kill_after_s)
        except BaseException:
            os.close(handle)
            raise
        return cls(handle)

    def release(self) -> None:
        """Lets the next one write."""
        if self in _held:
            _held.remove(self)
            os.close(self._handle)

    def __enter__(self) -> Self:
        """It is taken already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases it."""
        self.release()


_held: set[FolderLock] = set()


def _lock(handle: int, path: Path, wait_s: float, kill_after_s: float | None) -> None:
    began, told = time.monotonic(), False
    while not _locked(handle):
        holder, waited_s = path.read_text() or "a process that did not say its name", time.monotonic() - began
        if waited_s > wait_s:
            raise FolderTaken(f"{path.parent} is still written by {holder}, after {wait_s:.0f} s")
        if not told:
            log.warning("waiting until %s lets go of %s", holder, path.parent)
            told = True
        if kill_after_s is not None and waited_s > kill_after_s:
            _kill(holder, path)
        time.sleep(LOOK_AGAIN_S)
    os.ftruncate(handle, 0)
    try:
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:  # on a full disk the lock holds all the same
        log.warning("%s cannot be written: %s", path, error)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _kill(holder: str, path: Path) -> None:
    """Ends it, when it is another process of this machine: one that really has the file open, for numbers of processes come again."""
    named = re.fullmatch(r"process (\d+) on (.+)", holder)
    if named is None or named[2] != socket.gethostname() or int(named[1]) == os.getpid():
        return
    if not _has_open(int(named[1]), path):
        return
    log.warning("%s was replaced and does not end: it is killed", holder)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(named[1]), signal.SIGKILL)


def _has_open(pid: int, path: Path) -> bool:
    try:
        return any(handle.samefile(path) for handle in Path(f"/proc/{pid}/fd").iterdir() if handle.exists())
    except OSError:  # it has ended, or is somebody else's
        return False


def _forget() -> None:
    """In a forked child: its copies of the handles would keep the locks beyond the parent's death."""
    while _held:
        next(iter(_held)).release()


os.register_at_fork(after_in_child=_forget)
