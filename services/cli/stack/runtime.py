"""Directories of a home outside of it, for what is temporary: one for files and sockets, one in shared memory; and what was left in them.

record names ──► make ──► processes use them ──► remove ──► forget the record
   │                            └─ everything is killed ──► the next `up` (or `down`) reads the record, and removes
   └─ <home>/runtime.json

Only what carries the home's name, or what the record names, is removed, only if it is this user's, and never while a process holds its
lock. A copy of a home is not the home that made the record: the original's directories stay.
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
from services.common.config.private_folder import is_own, prefix_of
from services.common.durable import write_durably

FILE = "runtime.json"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the directory made there is private
LONGEST_PREFIX = 31
"""Bytes of the path below which a process's own directory and its sockets' names still find room in 107."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a running stack has outside its home.

    Example: Runtime(Path("/tmp/millrace-77ab01c2-5f0c3a91"), Path("/dev/shm/millrace-77ab01c2-5f0c3a91"))
    """

    temporary: Path
    """For TMPDIR: short, mode 0700."""
    shared: Path | None
    """In shared memory, mode 0700; None where the system has none."""

    def temporary_of(self, process: str) -> Path:
        """The TMPDIR of one process of the table, emptied whenever it starts."""
        return self.temporary / process


@dataclass(frozen=True, slots=True)
class _Record:
    home: int
    """Inode of the home that these belong to."""
    folders: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()


_RECORD = TypeAdapter(_Record)


@contextmanager
def runtime_of(home: Path) -> Iterator[Runtime]:
    """New directories for a stack, after what an earlier one left is removed; they go with everything in them at the end.

    Hold the home's lock (`only_one`). While the stack runs they are locked: neither another `up` nor systemd's cleaner of old temporary
    files touches them.
    """
    remove_left(home)
    bases = [_temporary_base(), *([SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else [])]
    # Not by the home's name alone: another user could have made a directory of that name first.
    folders = [base / f"{prefix_of(home)}{secrets.token_hex(4)}" for base in bases]
    _write(home, _Record(_inode(home), tuple(map(str, folders))))
    try:
        with ExitStack() as held:
            for folder in folders:
                folder.mkdir(mode=0o700)  # an error if somebody was there first
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                held.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield Runtime(folders[0], folders[1] if len(folders) > 1 else None)
    finally:
        remove_left(home)


def remember_segments(home: Path, segments: tuple[Segment, ...]) -> None:
    """Notes the segments of shared memory that the home's processes use now, in place of those noted before."""
    record = _read(home)
    if record is not None and record.segments != segments:
        _write(home, replace(record, segments=segments))


def remove_left(home: Path) -> list[str]:
    """Removes what the record names, and the record; the paths of what was there. Call it when nothing of the home runs any more."""
    record = _read(home) or _Record(0)
    named = {Path(name) for name in record.folders}
    ours = {folder for base in (_temporary_base(), SHARED_MEMORY) for folder in base.glob(f"{prefix_of(home)}*")}
    staged = set((home / "stage").glob("*"))  # of servers that `up` did not start, too
    removed = [str(folder) for folder in sorted(named | ours | staged) if _remove(folder)]
    removed += remove_segments(record.segments)
    for half in home.glob(f".{FILE}.*"):
        half.unlink(missing_ok=True)
    (home / FILE).unlink(missing_ok=True)
    return removed


def _remove(folder: Path) -> bool:
    if not is_own(folder):
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
    """The system's directory for temporary files; /tmp when its path is too long for the sockets below it."""
    base = Path(tempfile.gettempdir())
    short = Path("/tmp")  # noqa: S108  the directory made there is private
    return short if len(os.fsencode(base)) > LONGEST_PREFIX and os.access(short, os.W_OK | os.X_OK) else base


def _inode(home: Path) -> int:
    return home.stat().st_ino


def _read(home: Path) -> _Record | None:
    with suppress(OSError, ValidationError):
        record = _RECORD.validate_json((home / FILE).read_bytes())
        return record if record.home == _inode(home) else None
    return None


def _write(home: Path, record: _Record) -> None:
    write_durably(home / FILE, json.dumps(asdict(record), indent=1).encode())
