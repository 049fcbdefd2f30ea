"""Checkpoints: a directory that is there whole or not at all.

    step-00000010.tmp/  ── every rank writes, hashes, fsyncs ──► manifest (sizes, xxh3-128) ──► rename to step-00000010/ ──► LATEST

The newest directory whose manifest and files verify is the one that counts; a damaged one is passed over, with a warning that names
the file.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from services.common.durable import fsync_directory, write_durably
from services.common.errors import ConfigError, MillraceError
from services.learner.disk import require_space

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
LATEST = "LATEST"
EXPORT = "hf"
"""Directory of the weights in Hugging Face format, where they are exported."""
FORMAT = 2
ROOM = 1.2
"""Times the last checkpoint's size that must be free before a new one is begun."""


class CheckpointError(MillraceError):
    """A checkpoint cannot be written or does not verify; names the file."""


class CheckpointRefused(ConfigError):  # noqa: N818  what became of it
    """A sound checkpoint that does not belong to this job, or that this release cannot read; says what differs."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of a checkpoint, as whoever wrote it says: durable, and with the digest of the bytes that were meant.

    Example: WrittenFile("rank-00000.safetensors", 1073741824, "0f…")
    """

    name: str
    """Relative to the checkpoint's directory."""
    bytes: int
    xxh3: str
    """xxh3-128, hexadecimal."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest verifies."""

    path: Path
    step: int
    state: dict[str, Any]
    """What the head needs beside the ranks' files: ledger, lineage, identity (JSON values)."""
    files: tuple[WrittenFile, ...]
    digest: str = ""
    """Of the manifest, and so of all that it names."""

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.bytes for file in self.files)


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
            _check_size(unfinished / file.name, file.bytes)
        write_durably(unfinished / MANIFEST, _dump(_document(step, state, known)))
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
        return _manifests(self._root)

    def _unfinished(self, step: int) -> Path:
        return self._root / f"step-{step:08d}.tmp"

    def _prune(self) -> None:
        for path in _finished(self._root)[: -self._keep]:
            try:
                shutil.rmtree(path)
            except OSError:
                log.exception("cannot remove the old checkpoint %s", path)


def read_manifest(path: Path) -> Checkpoint:
    """What a checkpoint's manifest says; its files are not looked at.

    Raises:
        CheckpointError: the manifest is missing or damaged.
        CheckpointRefused: it is of a format that this release cannot read.
    """
    manifest = path / MANIFEST
    try:
        data = manifest.read_bytes()
        document = json.loads(data)
        if document.get("format") != FORMAT and "xxh3" not in document:
            raise CheckpointRefused(
                f"{manifest}: format {document.get('format')} is not known (this is format {FORMAT})"
            )
        digest = document.pop("xxh3")
        files = tuple(WrittenFile(name, int(e["bytes"]), str(e["xxh3"])) for name, e in document["files"].items())
        checkpoint = Checkpoint(path, int(document["step"]), dict(document["state"]), files, digest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest}: {error}") from error
    if digest != _digest_of(document) or data != _dump(document):
        raise CheckpointError(f"{manifest}: its checksum differs")
    if document["format"] != FORMAT:
        raise CheckpointRefused(f"{manifest}: format {document['format']} is not known (this is format {FORMAT})")
    return checkpoint


def manifest_digest(step: int, state: dict[str, Any], files: Iterable[WrittenFile]) -> str:
    """Of the manifest that `CheckpointStore.commit` will write of these."""
    return _digest_of(_document(step, state, files))


def newest_manifest(root: Path) -> Checkpoint | None:
    """The newest checkpoint in the directory whose manifest verifies, or None; nothing is made or changed."""
    return next(_manifests(root), None)


def verify_files(checkpoint: Checkpoint) -> None:
    """Checks every file against the manifest.

    Raises:
        CheckpointError: one is missing, or does not match.
    """
    for entry in checkpoint.files:
        file = checkpoint.path / entry.name
        _check_size(file, entry.bytes)
        if digest_of_file(file) != entry.xxh3:
            raise CheckpointError(f"{file}: its checksum differs from the manifest's")


def _manifests(root: Path) -> Iterator[Checkpoint]:
    for path in reversed(_finished(root)):
        try:
            yield read_manifest(path)
        except CheckpointError as error:
            log.warning("passing over a damaged checkpoint: %s", error)


def _finished(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("step-????????") if path.is_dir())


def digest_of_file(path: Path) -> str:
    """xxh3-128 of a file, hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(8 * 1024 * 1024):
            digest.update(block)
    return digest.hexdigest()


def _check_size(file: Path, size: int) -> None:
    if not file.is_file() or file.stat().st_size != size:
        raise CheckpointError(f"{file}: missing, or not {size} bytes long")


def _document(step: int, state: dict[str, Any], files: Iterable[WrittenFile]) -> dict[str, Any]:
    entries = {file.name: {"bytes": file.bytes, "xxh3": file.xxh3} for file in files}
    return {"format": FORMAT, "step": step, "state": state, "files": entries}


def _digest_of(document: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def _dump(document: dict[str, Any]) -> bytes:
    """The manifest's one spelling: any byte that differs is damage."""
    return json.dumps(document | {"xxh3": _digest_of(document)}, indent=1, sort_keys=True).encode()
