"""Manifest of a checkpoint: which files of which sizes and digests it has, and what the head needs beside them.

A directory without a manifest that verifies is no checkpoint. `services.learner.storage.checkpoints` writes them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from services.common.errors import ConfigError, MillraceError

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
EXPORT = "hf"
"""Directory of the weights in Hugging Face format, where they are exported."""
FORMAT = 2
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
CHECKPOINTS_DIR = "checkpoints"
"""Of a job's folder: its checkpoints, a directory each."""


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


def read_manifest(path: Path) -> Checkpoint:
    """What a checkpoint's manifest says; its files are not looked at.

    Raises:
        CheckpointError: the manifest is missing or damaged.
        CheckpointRefused: it is of a format that this release cannot read.
    """
    manifest = path / MANIFEST
    try:
        with manifest.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{manifest}: is larger than {MAX_MANIFEST_BYTES} bytes")
        document = json.loads(data)
        if document.get("format") != FORMAT and "xxh3" not in document:
            raise CheckpointRefused(
                f"{manifest}: format {document.get('format')} is not known (this is format {FORMAT})"
            )
        digest = document.pop("xxh3")
        files = tuple(WrittenFile(name, int(e["bytes"]), str(e["xxh3"])) for name, e in document["files"].items())
        checkpoint = Checkpoint(path, int(document["step"]), dict(document["state"]), files, digest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{manifest}: {error}") from error
    if digest != _digest_of(document) or data != dump_manifest(document):
        raise CheckpointError(f"{manifest}: its checksum differs")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in document["files"]):
        raise CheckpointError(f"{manifest}: names a file outside of its directory")
    if document["format"] != FORMAT:
        raise CheckpointRefused(f"{manifest}: format {document['format']} is not known (this is format {FORMAT})")
    return checkpoint


def manifest_document(step: int, state: dict[str, Any], files: Iterable[WrittenFile]) -> dict[str, Any]:
    """What a manifest says of these, without its digest."""
    entries = {file.name: {"bytes": file.bytes, "xxh3": file.xxh3} for file in files}
    return {"format": FORMAT, "step": step, "state": state, "files": entries}


def manifest_digest(step: int, state: dict[str, Any], files: Iterable[WrittenFile]) -> str:
    """Of the manifest that will be written of these."""
    return _digest_of(manifest_document(step, state, files))


def newest_manifest(root: Path) -> Checkpoint | None:
    """The newest checkpoint in the directory whose manifest verifies, or None; nothing is made or changed."""
    return next(manifests(root), None)


def verify_files(checkpoint: Checkpoint) -> None:
    """Checks every file against the manifest.

    Raises:
        CheckpointError: one is missing, or does not match.
    """
    for entry in checkpoint.files:
        file = checkpoint.path / entry.name
        check_size(file, entry.bytes)
        if digest_of_file(file) != entry.xxh3:
            raise CheckpointError(f"{file}: its checksum differs from the manifest's")


def manifests(root: Path) -> Iterator[Checkpoint]:
    """Checkpoints whose manifest verifies, newest first; their files are not looked at."""
    for path in reversed(finished(root)):
        try:
            yield read_manifest(path)
        except CheckpointError as error:
            log.warning("passing over a damaged checkpoint: %s", error)


def finished(root: Path) -> list[Path]:
    """Directories of checkpoints that were committed, oldest first."""
    return sorted(path for path in root.glob("step-????????") if path.is_dir())


def digest_of_file(path: Path) -> str:
    """xxh3-128 of a file, hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(8 * 1024 * 1024):
            digest.update(block)
    return digest.hexdigest()


def check_size(file: Path, size: int) -> None:
    """Raises CheckpointError when there is no file of this size."""
    if not file.is_file() or file.stat().st_size != size:
        raise CheckpointError(f"{file}: missing, or not {size} bytes long")


def _digest_of(document: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def dump_manifest(document: dict[str, Any]) -> bytes:
    """The manifest's one spelling, with its digest: any byte that differs is damage."""
    return json.dumps(document | {"xxh3": _digest_of(document)}, indent=1, sort_keys=True).encode()
