"""Deleted jobs: their folders on the way out, and a mark that stays for a week, so that nothing brings one back.

    jobs/<job> ── renamed, at once ──► jobs/.deleted/<job>/<random> ── removed, soon ──► jobs/.deleted/<job>/  (empty: the mark)

The mark is there before the folder goes. A process that still writes for the job finds no folder, and makes none (`JobFolder.save`);
whoever rebuilds records from folders passes over it. A crash in between leaves the rest here, for the next sweep.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from services.common.durable import fsync_directory

log = logging.getLogger(__name__)

FOLDER = ".deleted"
MARK_KEPT_S = 7 * 24 * 3600.0
"""Longer than a process that was stopped, or a Redis that is put back to an older state, stays away."""


def is_deleted(job_folder: Path) -> bool:
    """Whether the job whose folder this is, or was, has been deleted."""
    return (job_folder.parent / FOLDER / job_folder.name).is_dir()


class DeletedJobs:
    """The deleted jobs of one home; synchronous, so call it from a thread where a loop must not wait for a disk."""

    def __init__(self, jobs_dir: Path) -> None:
        """Makes nothing yet."""
        self._jobs_dir = jobs_dir
        self._place = jobs_dir / FOLDER

    def take(self, job_id: str) -> None:
        """Marks the job as deleted and takes its folder out of the way, durably. Once more takes what has come back meanwhile.

        Raises:
            OSError: it cannot be renamed.
        """
        place = self._place / job_id
        if not place.is_dir():
            place.mkdir(parents=True)
            fsync_directory(self._place)
        with suppress(FileNotFoundError):
            (self._jobs_dir / job_id).rename(place / secrets.token_hex(4))
            fsync_directory(place)
            fsync_directory(self._jobs_dir)

    def empty(self, job_id: str) -> None:
        """Removes what was taken; the mark stays. What cannot be removed is told in the log, and tried again by the next sweep."""
        for taken in self._taken(job_id):
            try:
                taken.unlink() if taken.is_symlink() else shutil.rmtree(taken)
            except FileNotFoundError:  # another gateway is at it, too
                continue
            except OSError as error:
                log.warning("%s cannot be removed: %s", taken, error)

    def knows(self, job_id: str) -> bool:
        """Whether the job was deleted, not long ago."""
        return is_deleted(self._jobs_dir / job_id)

    def marked(self) -> list[str]:
        """The ids of all jobs that have a mark."""
        return sorted(place.name for place in self._place.glob("*") if place.is_dir())

    def unfinished(self, job_id: str) -> bool:
        """Whether something of a deleted job is still there, or there again."""
        return os.path.lexists(self._jobs_dir / job_id) or bool(self._taken(job_id))

    def forget_old(self, now: float | None = None) -> None:
        """Removes the marks that have done their time."""
        oldest = (time.time() if now is None else now) - MARK_KEPT_S
        for job_id in self.marked():
            place = self._place / job_id
            with suppress(OSError):  # it is not empty, or gone
                if place.stat().st_mtime < oldest:
                    place.rmdir()

    def _taken(self, job_id: str) -> list[Path]:
        try:
            return list((self._place / job_id).iterdir())
        except FileNotFoundError:
            return []
