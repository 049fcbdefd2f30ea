"""Lock on `<job folder>/lock`: one head at a time writes the files of a job. It ends with the process that holds it.

Redis refuses the writes of an older head (`services.common.redis.fencing`); this lock protects journal and checkpoints, too. A head
takes it after its incarnation: the older head's next write to Redis then fails, so it ends and releases the lock. A head that hangs
does not write, and is killed.
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
from typing import Self

from services.common.errors import MillraceError
from services.learner.storage.folder import LOCK_FILE

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Longer than the time between a head's SIGTERM and its SIGKILL."""
POLL_INTERVAL_S = 0.1


class FolderTaken(MillraceError):  # noqa: N818  what has happened
    """Another process writes the job's folder, and did not release it in time; names the folder and the process."""


class FolderLock:
    """The right to write a job's folder, until `release` or the end of the process. Use it as a context manager."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        _held.add(self)

    @classmethod
    def take(cls, folder: Path, wait_s: float = TIMEOUT_S, *, kill_after_s: float | None = None) -> Self:
        """Waits for the lock, takes it and writes its holder into the file. It blocks: call it in a thread where a loop must run on.

        After `kill_after_s` seconds it kills a process of this machine that still holds the lock: only for a caller that has replaced it.

        Raises:
            FolderTaken: another process still held it after `wait_s` seconds.
            OSError: the file cannot be created.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOCK_FILE
        # Programs that are executed do not inherit the handle; for forks see `_release_in_child`.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle, path, wait_s, kill_after_s)
        except BaseException:
            os.close(handle)
            raise
        return cls(handle)

    def release(self) -> None:
        """Releases the lock; a second call does nothing."""
        if self in _held:
            _held.remove(self)
            os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_held: set[FolderLock] = set()


def _lock(handle: int, path: Path, wait_s: float, kill_after_s: float | None) -> None:
    began, logged = time.monotonic(), False
    while not _locked(handle):
        holder, waited_s = path.read_text() or "a process that did not say its name", time.monotonic() - began
        if waited_s > wait_s:
            raise FolderTaken(f"{path.parent} is still written by {holder}, after {wait_s:.0f} s")
        if not logged:
            log.warning("waiting until %s lets go of %s", holder, path.parent)
            logged = True
        if kill_after_s is not None and waited_s > kill_after_s:
            _kill(holder, path)
        time.sleep(POLL_INTERVAL_S)
    os.ftruncate(handle, 0)
    try:
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:  # the lock holds on a full disk, too
        log.warning("%s cannot be written: %s", path, error)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _kill(holder: str, path: Path) -> None:
    """Kills another process of this machine, if it really has the file open: process ids are reused."""
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
    except OSError:  # the process has ended, or is another user's
        return False


def _release_in_child() -> None:
    """Closes a forked child's copies of the handles, which would keep the locks after the parent's death."""
    while _held:
        next(iter(_held)).release()


os.register_at_fork(after_in_child=_release_in_child)
