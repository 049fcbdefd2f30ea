"""Deleted jobs: folders under removal, and marks that stay for a week, so that no process brings a deleted job back.

    jobs/<job> ── renamed, at once ──► jobs/.deleted/<job>/<random> ── removed, soon ──► jobs/.deleted/<job>/  (empty: the mark)

The mark exists before the folder is moved. A process that still writes for the job finds no folder and makes none (`JobFolder.save`);
records are not rebuilt from a marked job. What a crash leaves here is removed by the next sweep (`Retention.sweep`).
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
"""Longer than a process stays stopped, and than a Redis backup is old when it is restored."""


def is_deleted(job_folder: Path) -> bool:
    """Whether the job of this folder has been deleted."""
    return (job_folder.parent / FOLDER / job_folder.name).is_dir()


class DeletedJobs:
    """The deleted jobs of one home. Synchronous: call it from a thread where an event loop must not wait for a disk."""

    def __init__(self, jobs_dir: Path) -> None:
        self._jobs_dir, self._folder = jobs_dir, jobs_dir / FOLDER

    def move_away(self, job_id: str) -> None:
        """Marks the job as deleted and moves its folder away, durably. A repeated call moves a folder that was made again meanwhile.

        Raises:
            OSError: the folder cannot be renamed.
        """
        mark = self._folder / job_id
        if not mark.is_dir():
            mark.mkdir(parents=True)
            fsync_directory(self._folder)
        with suppress(FileNotFoundError):
            (self._jobs_dir / job_id).rename(mark / secrets.token_hex(4))
            fsync_directory(mark)
            fsync_directory(self._jobs_dir)

    def remove_files(self, job_id: str) -> None:
        """Removes the folders that were moved; the mark stays. A failure is logged, and the next sweep tries again."""
        for moved in self._moved(job_id):
            try:
                moved.unlink() if moved.is_symlink() else shutil.rmtree(moved)
            except FileNotFoundError:  # another gateway removes it, too
                continue
            except OSError as error:
                log.warning("%s cannot be removed: %s", moved, error)

    def has_mark(self, job_id: str) -> bool:
        """Whether the job has a mark."""
        return is_deleted(self._jobs_dir / job_id)

    def marked(self) -> list[str]:
        """The ids of all jobs that have a mark."""
        return sorted(mark.name for mark in self._folder.glob("*") if mark.is_dir())

    def unfinished(self, job_id: str) -> bool:
        """Whether files of a deleted job are still there, or there again."""
        return os.path.lexists(self._jobs_dir / job_id) or bool(self._moved(job_id))

    def forget_old(self, now: float | None = None) -> None:
        """Removes the marks that are older than `MARK_KEPT_S`."""
        oldest = (time.time() if now is None else now) - MARK_KEPT_S
        for job_id in self.marked():
            mark = self._folder / job_id
            with suppress(OSError):  # not empty, or gone
                if mark.stat().st_mtime < oldest:
                    mark.rmdir()

    def _moved(self, job_id: str) -> list[Path]:
        try:
            return list((self._folder / job_id).iterdir())
        except FileNotFoundError:
            return []
