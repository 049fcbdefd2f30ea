"""Segments of POSIX shared memory of a stack's processes. vLLM and PyTorch choose random names below /dev/shm, without an owner in them.

A segment belongs to the processes that have it mapped. The supervisor lists new names often, records which of its processes map them, and
removes the segments of a killed process. A record of all segments lies in the home, for the next start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  only listed
MAX_UNOWNED_SCANS = 20
"""Number of scans after which a name that no process of the stack maps counts as another program's."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of shared memory, identified by name and inode: another program may reuse the name."""

    name: str
    inode: int

    @property
    def path(self) -> Path:
        """Path of the file."""
        return SHARED_MEMORY / self.name

    def is_there(self) -> bool:
        """Whether the same file still exists and belongs to this user."""
        with suppress(OSError):
            status = self.path.lstat()
            return status.st_ino == self.inode and status.st_uid == os.getuid()
        return False


class SegmentWatch:
    """Record of the segments that each row of the table uses. A scan without new segments costs one directory listing."""

    def __init__(self) -> None:
        self._owners: dict[Segment, str] = {}
        self._scans: dict[Segment, int] = {}
        """Scans in which no process of the stack has mapped the segment."""

    @property
    def known(self) -> tuple[Segment, ...]:
        """The segments of the stack at the last scan."""
        return tuple(sorted(self._owners, key=lambda segment: segment.name))

    def scan(self, families: Callable[[], Mapping[str, list[psutil.Process]]]) -> None:
        """Records new segments. `families` returns the living processes of each row; called only for new segments."""
        present = _list_segments()
        for gone in (self._owners.keys() | self._scans.keys()) - present:
            self._owners.pop(gone, None)
            self._scans.pop(gone, None)
        new = {segment for segment in present - self._owners.keys() if self._scans.get(segment, 0) < MAX_UNOWNED_SCANS}
        if not new:
            return
        for name, processes in families().items():
            mapped = mapped_by(processes)
            for segment in new:
                if segment.inode in mapped:
                    self._owners[segment] = name
                    self._scans.pop(segment, None)
        for segment in new - self._owners.keys():
            self._scans[segment] = self._scans.get(segment, 0) + 1

    def end(self, name: str, families: Callable[[], Mapping[str, list[psutil.Process]]]) -> list[str]:
        """Removes the segments of a row whose processes have ended, except those that a living process maps."""
        mine = {segment for segment, owner in self._owners.items() if owner == name}
        if not mine:
            return []
        for segment in mine:
            del self._owners[segment]
        used = mapped_by(process for family in families().values() for process in family)
        return remove_segments(segment for segment in mine if segment.inode not in used)


def mapped_by(processes: Iterable[psutil.Process]) -> set[int]:
    """Inodes of the segments that these processes have mapped; ended processes are skipped.

    Names do not identify a segment: glibc maps a semaphore under a temporary name, and then renames it.
    """
    found = set()
    prefix = f"{SHARED_MEMORY}/"
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps")
        with suppress(OSError), maps.open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                if prefix in line:
                    found.add(int(line.split(maxsplit=5)[4]))
    return found


def remove_segments(segments: Iterable[Segment]) -> list[str]:
    """Removes those that still exist and belong to this user; returns their paths."""
    removed = []
    for segment in segments:
        if segment.is_there():
            segment.path.unlink(missing_ok=True)
            removed.append(str(segment.path))
    return removed


def _list_segments() -> set[Segment]:
    """This user's files in shared memory."""
    found, user = set(), os.getuid()
    with suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == user and entry.is_file(follow_symlinks=False):
                    found.add(Segment(entry.name, status.st_ino))
    return found
