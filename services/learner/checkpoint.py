"""Checkpoints: a directory that is there whole or not at all.

    step-00000010.tmp/  ── every rank writes, fsync ──► manifest (sizes, xxh3-128) ──► rename to step-00000010/ ──► LATEST

The newest directory whose manifest verifies is the one that counts; a damaged one is passed over, with a warning that names the file.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from services.common.errors import MillraceError
from services.learner.journal import fsync_directory

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
LATEST = "LATEST"
FORMAT = 1


class CheckpointError(MillraceError):
    """A checkpoint cannot be written or does not verify; names the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    step: int
    state: dict[str, Any]
    """What the head needs beside the ranks' files: ledger, lineage, data position (JSON values)."""


class CheckpointStore:
    """The checkpoints of one job, in one directory. Written by rank 0; the other ranks write files into `begin`'s directory."""

    def __init__(self, root: Path, *, keep: int) -> None:
        """Opens (and makes) the directory."""
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._keep = keep

    def begin(self, step: int) -> Path:
        """An empty directory that ranks write into; nothing of it counts before `commit`."""
        path = self._root / f"step-{step:08d}.tmp"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Makes the directory of `begin` durable and current, then removes what is older than `keep`."""
        unfinished = self._root / f"step-{step:08d}.tmp"
        files = {str(path.relative_to(unfinished)): path for path in sorted(unfinished.rglob("*")) if path.is_file()}
        entries = {name: {"bytes": path.stat().st_size, "xxh3": _digest(path)} for name, path in files.items()}
        for path in files.values():
            _fsync_file(path)
        manifest = {"format": FORMAT, "step": step, "state": state, "files": entries}
        _write_durably(unfinished / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
        for folder in {path.parent for path in files.values()} | {unfinished}:
            fsync_directory(folder)
        final = self._root / f"step-{step:08d}"
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step, which recovery passed over
        unfinished.rename(final)
        fsync_directory(self._root)
        _write_durably(self._root / f"{LATEST}.tmp", final.name)
        (self._root / f"{LATEST}.tmp").rename(self._root / LATEST)
        fsync_directory(self._root)
        self._prune()
        return final

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, or None."""
        for path in reversed(self._finished()):
            try:
                return verify(path)
            except CheckpointError as error:
                log.warning("passing over a damaged checkpoint: %s", error)
        return None

    def _finished(self) -> list[Path]:
        return sorted(path for path in self._root.glob("step-????????") if path.is_dir())

    def _prune(self) -> None:
        for path in self._finished()[: -self._keep]:
            try:
                shutil.rmtree(path)
            except OSError:
                log.exception("cannot remove the old checkpoint %s", path)


def verify(path: Path) -> Checkpoint:
    """Reads a checkpoint's manifest and checks every file against it.

    Raises:
        CheckpointError: the manifest or a file is missing, or does not match.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        step, state, files = int(manifest["step"]), dict(manifest["state"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from error
    for name, entry in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{file}: missing, or not {entry['bytes']} bytes long")
        if _digest(file) != entry["xxh3"]:
            raise CheckpointError(f"{file}: its checksum differs from the manifest's")
    return Checkpoint(path, step, state)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(8 * 1024 * 1024):
            digest.update(block)
    return digest.hexdigest()


def _fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
