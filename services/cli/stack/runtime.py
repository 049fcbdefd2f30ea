"""Runtime directories of a home, outside of it: one for temporary files and sockets, one in shared memory; and their removal.

write record ──► create ──► processes use them ──► remove ──► remove record
   │                            └─ all are killed ──► the next `up` (or `down`) reads the record, and removes
   └─ <home>/runtime.json

Only directories with the home's prefix, or in the record, are removed; only if they belong to this user, and never while a process holds
their lock. A copy of a home does not match the inode in its record: the original's directories stay.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.cli.stack.segments import Segment, remove_segments
from services.common.config.private_folder import home_prefix, is_own_directory
from services.common.durable import write_durably

FILE = "runtime.json"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the directory made there is private
LONGEST_PREFIX = 31
"""Maximum bytes of the path of the base directory; with a process's own directory and a socket's name it stays within 107 bytes."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Directories of a running stack outside its home, e.g. `millrace-77ab01c2-5f0c3a91` in /tmp and in /dev/shm."""

    temporary: Path
    """For TMPDIR; a short path, mode 0700."""
    shared: Path | None
    """In shared memory, mode 0700; None where the system has none."""

    def temporary_of(self, process: str) -> Path:
        """The TMPDIR of one process of the table; the supervisor empties it before each start of the process."""
        return self.temporary / process


@dataclass(frozen=True, slots=True)
class _Record:
    home: int
    """Inode of the home that the directories and segments belong to."""
    folders: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()


_RECORD = TypeAdapter(_Record)


@contextmanager
def runtime_of(home: Path) -> Iterator[Runtime]:
    """New directories for a stack. An earlier stack's directories are removed before, and these with their content at the end.

    The caller holds the home's lock (`home_lock`). The directories are locked while the stack runs, so that neither another `up` nor
    systemd-tmpfiles removes them.
    """
    remove_leftovers(home)
    bases = [_temporary_base(), *([SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else [])]
    # The random suffix is needed: another user could create a directory with the home's prefix first.
    folders = [base / f"{home_prefix(home)}{secrets.token_hex(4)}" for base in bases]
    _write(home, _Record(home.stat().st_ino, tuple(map(str, folders))))
    try:
        with ExitStack() as locks:
            for folder in folders:
                folder.mkdir(mode=0o700)  # raises if the directory exists
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                locks.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield Runtime(folders[0], folders[1] if len(folders) > 1 else None)
    finally:
        remove_leftovers(home)


def remember_segments(home: Path, segments: tuple[Segment, ...]) -> None:
    """Replaces the record's segments by those that the home's processes use now."""
    record = _read(home)
    if record is not None and record.segments != segments:
        _write(home, replace(record, segments=segments))


def remove_leftovers(home: Path) -> list[str]:
    """Removes the home's directories, segments and record, after its last process has ended; returns the removed paths."""
    record = _read(home) or _Record(0)
    recorded = {Path(name) for name in record.folders}
    prefixed = {folder for base in (_temporary_base(), SHARED_MEMORY) for folder in base.glob(f"{home_prefix(home)}*")}
    staged = set((home / "stage").glob("*"))  # also of servers that `up` did not start
    removed = [str(folder) for folder in sorted(recorded | prefixed | staged) if _remove(folder)]
    removed += remove_segments(record.segments)
    for unfinished in home.glob(f".{FILE}.*"):
        unfinished.unlink(missing_ok=True)
    (home / FILE).unlink(missing_ok=True)
    return removed


def _remove(folder: Path) -> bool:
    if not is_own_directory(folder):
        return False
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _temporary_base() -> Path:
    """The system's directory for temporary files; /tmp when its path is too long for sockets below it."""
    base = Path(tempfile.gettempdir())
    short = Path("/tmp")  # noqa: S108  the directory made there is private
    return short if len(os.fsencode(base)) > LONGEST_PREFIX and os.access(short, os.W_OK | os.X_OK) else base


def _read(home: Path) -> _Record | None:
    with suppress(OSError, ValidationError):
        record = _RECORD.validate_json((home / FILE).read_bytes())
        return record if record.home == home.stat().st_ino else None
    return None


def _write(home: Path, record: _Record) -> None:
    write_durably(home / FILE, json.dumps(asdict(record), indent=1).encode())
