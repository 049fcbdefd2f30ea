"""Checkpoints: a directory is complete, or it does not count.

    step-00000010.tmp/  ── every rank writes, hashes, fsyncs ──► manifest (sizes, xxh3-128) ──► rename to step-00000010/ ──► LATEST

The newest directory whose manifest and files verify counts. A damaged one is skipped, with a warning that names the file.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from services.common.checkpoints import manifest
from services.common.checkpoints.manifest import Checkpoint, CheckpointError, WrittenFile
from services.common.durable import fsync_directory, write_durably
from services.common.errors import MillraceError
from services.learner.storage.folder import require_space

log = logging.getLogger(__name__)

LATEST = "LATEST"
FREE_SPACE_FACTOR = 1.2
"""Free space that a new checkpoint needs, in sizes of the last one."""


class CheckpointStore:
    """The checkpoints of one job, in one directory. Rank 0's head writes it; the ranks write files into `begin`'s directory."""

    def __init__(self, root: Path, *, keep: int, guard: Callable[[], None] = lambda: None) -> None:
        """Creates the directory. `guard` is called before each write; it raises when this process may not write any more."""
        root.mkdir(parents=True, exist_ok=True)
        self._root, self._keep, self._guard = root, keep, guard

    def begin(self, step: int) -> Path:
        """An empty directory for the ranks' files; it does not count before `commit`. Uncommitted directories are removed.

        Raises:
            OSError: ENOSPC, when less is free than the last checkpoint's size times FREE_SPACE_FACTOR.
        """
        self._guard()
        for unfinished in self._root.glob("step-*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        last = next(self.manifests(), None)
        if last is not None:
            require_space(self._root, int(last.size * FREE_SPACE_FACTOR))
        path = self._unfinished(step)
        path.mkdir()
        return path

    def discard(self, step: int) -> None:
        """Removes a checkpoint that will not be committed."""
        self._guard()
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def commit(self, step: int, state: dict[str, Any], files: Iterable[WrittenFile]) -> Path:
        """Makes the directory of `begin` durable and current, then removes all but the `keep` newest.

        Raises:
            CheckpointError: a file is missing, or differs in size from its writer's report.
        """
        self._guard()
        unfinished = self._unfinished(step)
        known = sorted(files, key=lambda file: file.name)
        for file in known:
            manifest.check_size(unfinished / file.name, file.bytes)
        document = manifest.manifest_document(step, state, known)
        write_durably(unfinished / manifest.MANIFEST, manifest.dump_manifest(document))
        for folder in {(unfinished / file.name).parent for file in known} | {unfinished}:
            fsync_directory(folder)
        self._guard()
        final = self._root / f"step-{step:08d}"
        # A damaged one of the same step, which recovery skipped, or one of an older lineage.
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        fsync_directory(self._root)
        write_durably(self._root / LATEST, final.name.encode())
        self._prune()
        return final

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint of which every file verifies, or None. Reads all of its files.

        Raises:
            CheckpointRefused: it is of a format that this release cannot read.
        """
        for checkpoint in self.manifests():
            try:
                manifest.verify_files(checkpoint)
            except CheckpointError as error:
                log.warning("passing over a damaged checkpoint: %s", error)
            else:
                return checkpoint
        return None

    def manifests(self) -> Iterator[Checkpoint]:
        """Checkpoints whose manifest verifies, newest first; their files are not read."""
        return manifest.verified_checkpoints(self._root)

    def _unfinished(self, step: int) -> Path:
        return self._root / f"step-{step:08d}.tmp"

    def _prune(self) -> None:
        for path in manifest.committed_checkpoints(self._root)[: -self._keep]:
            try:
                shutil.rmtree(path)
            except OSError:
                log.exception("cannot remove the old checkpoint %s", path)


def verify_checkpoints(folder: Path) -> tuple[dict[int, Checkpoint], dict[Path, str]]:
    """The job's checkpoints of which every file verifies, by step; and for each other one, which recovery skips, the reason."""
    found: dict[int, Checkpoint] = {}
    damaged: dict[Path, str] = {}
    for path in manifest.committed_checkpoints(folder / manifest.CHECKPOINTS_DIR):
        try:
            checkpoint = manifest.read_manifest(path)
            manifest.verify_files(checkpoint)
        except (MillraceError, OSError) as error:
            if path.is_dir():  # else it was pruned, or replaced, while it was read
                damaged[path] = f"a checkpoint that cannot be used: {error}"
        else:
            found[checkpoint.step] = checkpoint
    return found, damaged
