"""Checkpoints: a directory that is there whole or not at all.

    step-00000010.tmp/  ── every rank writes, hashes, fsyncs ──► manifest (sizes, xxh3-128) ──► rename to step-00000010/ ──► LATEST

The newest directory whose manifest and files verify is the one that counts; a damaged one is passed over, with a warning that names
the file.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from services.common.checkpoints.manifest import (
    CHECKPOINTS_DIR,
    MANIFEST,
    Checkpoint,
    CheckpointError,
    WrittenFile,
    check_size,
    dump_manifest,
    finished,
    manifest_document,
    manifests,
    read_manifest,
    verify_files,
)
from services.common.durable import fsync_directory, write_durably
from services.common.errors import MillraceError
from services.learner.storage.folder import require_space

log = logging.getLogger(__name__)

LATEST = "LATEST"
ROOM = 1.2
"""Times the last checkpoint's size that must be free before a new one is begun."""


class CheckpointStore:
    """The checkpoints of one job, in one directory. Written by rank 0's head; the ranks write files into `begin`'s directory."""

    def __init__(self, root: Path, *, keep: int, guard: Callable[[], None] = lambda: None) -> None:
        """Opens (and makes) the directory. `guard`: asked before each write; raises when this process may not write any more."""
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._keep = keep
        self._guard = guard

    def begin(self, step: int) -> Path:
        """An empty directory that ranks write into; nothing of it counts before `commit`. What was never committed is removed.

        Raises:
            OSError: ENOSPC, when less is free than the last checkpoint's size times ROOM.
        """
        self._guard()
        for unfinished in self._root.glob("step-*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        last = next(self.manifests(), None)
        if last is not None:
            require_space(self._root, int(last.size * ROOM))
        path = self._unfinished(step)
        path.mkdir()
        return path

    def discard(self, step: int) -> None:
        """Gives the room of a checkpoint back that will not be committed."""
        self._guard()
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def commit(self, step: int, state: dict[str, Any], files: Iterable[WrittenFile]) -> Path:
        """Makes the directory of `begin` durable and current, then removes what is older than `keep`.

        Raises:
            CheckpointError: a file is not in the directory, or not as long as whoever wrote it says.
        """
        self._guard()
        unfinished = self._unfinished(step)
        known = sorted(files, key=lambda file: file.name)
        for file in known:
            check_size(unfinished / file.name, file.bytes)
        write_durably(unfinished / MANIFEST, dump_manifest(manifest_document(step, state, known)))
        for folder in {(unfinished / file.name).parent for file in known} | {unfinished}:
            fsync_directory(folder)
        self._guard()
        final = self._root / f"step-{step:08d}"
        shutil.rmtree(
            final, ignore_errors=True
        )  # a damaged one of the same step, which recovery passed over, or an older lineage's
        unfinished.rename(final)
        fsync_directory(self._root)
        write_durably(self._root / LATEST, final.name.encode())
        self._prune()
        return final

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint of which every file verifies, or None. Reads all of it.

        Raises:
            CheckpointRefused: it is of a format that this release cannot read.
        """
        for checkpoint in self.manifests():
            try:
                verify_files(checkpoint)
            except CheckpointError as error:
                log.warning("passing over a damaged checkpoint: %s", error)
            else:
                return checkpoint
        return None

    def manifests(self) -> Iterator[Checkpoint]:
        """Checkpoints whose manifest verifies, newest first; their files are not looked at."""
        return manifests(self._root)

    def _unfinished(self, step: int) -> Path:
        return self._root / f"step-{step:08d}.tmp"

    def _prune(self) -> None:
        for path in finished(self._root)[: -self._keep]:
            try:
                shutil.rmtree(path)
            except OSError:
                log.exception("cannot remove the old checkpoint %s", path)


def sound_checkpoints(folder: Path) -> tuple[dict[int, Checkpoint], dict[Path, str]]:
    """The checkpoints of which every file verifies, by step; and why each other one cannot be used: recovery passes those over."""
    found: dict[int, Checkpoint] = {}
    damaged: dict[Path, str] = {}
    for path in finished_checkpoints(folder):
        try:
            checkpoint = read_manifest(path)
            verify_files(checkpoint)
        except (MillraceError, OSError) as error:
            if path.is_dir():  # else it was pruned, or replaced, while it was read
                damaged[path] = f"a checkpoint that cannot be used: {error}"
        else:
            found[checkpoint.step] = checkpoint
    return found, damaged


def finished_checkpoints(folder: Path) -> list[Path]:
    """The directories of all that were committed, oldest first."""
    return sorted((folder / CHECKPOINTS_DIR).glob("step-????????"))
