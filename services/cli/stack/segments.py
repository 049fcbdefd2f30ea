"""POSIX shared memory of a stack's processes: vLLM and PyTorch choose random names below /dev/shm, which say nothing of whose they are.

A segment belongs to whoever has it mapped. The supervisor looks for new names often, notes which of its processes map them, and removes
those of a process that was killed; a record of all lies in the home, for the next start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  only looked at
PATIENCE = 20
"""Looks after which a name that none of the stack's processes maps is taken for somebody else's."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of shared memory. Name and inode together: the name may be taken again by others."""

    name: str
    inode: int

    @property
    def path(self) -> Path:
        """Where it lies."""
        return SHARED_MEMORY / self.name

    def is_there(self) -> bool:
        """Whether it still is this file, and this user's."""
        with suppress(OSError):
            facts = self.path.lstat()
            return facts.st_ino == self.inode and facts.st_uid == os.getuid()
        return False


class SegmentWatch:
    """Follows which of the stack's processes use which segments; looking costs one directory listing while nothing is new."""

    def __init__(self) -> None:
        """Knows none."""
        self._owners: dict[Segment, str] = {}
        self._looks: dict[Segment, int] = {}

    @property
    def known(self) -> tuple[Segment, ...]:
        """The segments of the stack, as of the last look."""
        return tuple(sorted(self._owners, key=lambda segment: segment.name))

    def look(self, families: Callable[[], Mapping[str, list[psutil.Process]]]) -> None:
        """Takes note of new segments.

        Args:
            families: gives the living processes of each row of the table; only asked when something is new.
        """
        present = _present()
        for gone in (self._owners.keys() | self._looks.keys()) - present:
            self._owners.pop(gone, None)
            self._looks.pop(gone, None)
        new = {segment for segment in present - self._owners.keys() if self._looks.get(segment, 0) < PATIENCE}
        if not new:
            return
        for name, processes in families().items():
            mapped = mapped_by(processes)
            for segment in new:
                if segment.inode in mapped:
                    self._owners[segment] = name
                    self._looks.pop(segment, None)
        for segment in new - self._owners.keys():
            self._looks[segment] = self._looks.get(segment, 0) + 1

    def end(self, name: str, families: Callable[[], Mapping[str, list[psutil.Process]]]) -> list[str]:
        """Removes what the processes of a row left, unless a living one maps it; call it when those are dead."""
        mine = {segment for segment, owner in self._owners.items() if owner == name}
        if not mine:
            return []
        for segment in mine:
            del self._owners[segment]
        used = mapped_by(process for family in families().values() for process in family)
        return remove_segments(segment for segment in mine if segment.inode not in used)


def mapped_by(processes: Iterable[psutil.Process]) -> set[int]:
    """Inodes of the segments that these processes have mapped; processes that are gone are passed over.

    Not their names: a semaphore is mapped under a first name, which glibc takes away when it gives it the one that it keeps.
    """
    found = set()
    prefix = f"{SHARED_MEMORY}/"
    for process in processes:
        with (
            suppress(OSError),
            Path(f"/proc/{process.pid}/maps").open(encoding="utf-8", errors="surrogateescape") as lines,
        ):
            for line in lines:
                if prefix in line:
                    found.add(int(line.split(maxsplit=5)[4]))
    return found


def remove_segments(segments: Iterable[Segment]) -> list[str]:
    """Removes those that are still there, and this user's; their paths."""
    removed = []
    for segment in segments:
        if segment.is_there():
            segment.path.unlink(missing_ok=True)
            removed.append(str(segment.path))
    return removed


def _present() -> set[Segment]:
    """The files of this user in shared memory."""
    found, user = set(), os.getuid()
    with suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if facts.st_uid == user and entry.is_file(follow_symlinks=False):
                    found.add(Segment(entry.name, facts.st_ino))
    return found
