"""Manifest of a checkpoint: names, sizes and digests of its files, and the controller's state.

A directory without a manifest that verifies is not a checkpoint. `services.learner.storage.checkpoints` writes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from services.common.errors import ConfigError, MillraceError
from services.common.jobs.folder import digest_of_document

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
EXPORT = "hf"
"""Subdirectory of a checkpoint with its weights in Hugging Face format, if they are exported."""
FORMAT = 2
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
CHECKPOINTS_DIR = "checkpoints"
"""Subdirectory of a job's folder with its checkpoints, a directory each."""


class CheckpointError(MillraceError):
    """A checkpoint cannot be written or does not verify; the message names the file."""


class CheckpointRefused(ConfigError):  # noqa: N818  names the outcome
    """An intact checkpoint of another job, or of a format that this release cannot read; the message names the differences."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A durable file of a checkpoint, with the digest of the bytes that its writer intended.

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
    """The controller's state beside the ranks' files: ledger, lineage, identity (JSON values)."""
    files: tuple[WrittenFile, ...]
    digest: str = ""
    """Of the manifest, and thereby of all files that it names."""

    @property
    def size(self) -> int:
        """Size of all files, bytes."""
        return sum(file.bytes for file in self.files)


def read_manifest(path: Path) -> Checkpoint:
    """The checkpoint of a verified manifest; its files are not checked.

    Raises:
        CheckpointError: the manifest is missing or damaged.
        CheckpointRefused: this release cannot read its format.
    """
    manifest = path / MANIFEST
    try:
        with manifest.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{manifest}: is larger than {MAX_MANIFEST_BYTES} bytes")
        document = json.loads(data)
        unknown_format = f"{manifest}: format {document.get('format')} is not known (this is format {FORMAT})"
        if document.get("format") != FORMAT and "xxh3" not in document:
            raise CheckpointRefused(unknown_format)
        digest = document.pop("xxh3")
        files = tuple(WrittenFile(name, int(e["bytes"]), str(e["xxh3"])) for name, e in document["files"].items())
        checkpoint = Checkpoint(path, int(document["step"]), dict(document["state"]), files, digest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{manifest}: {error}") from error
    if digest != digest_of_document(document) or data != dump_manifest(document):
        raise CheckpointError(f"{manifest}: its checksum differs")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in document["files"]):
        raise CheckpointError(f"{manifest}: names a file outside of its directory")
    if document["format"] != FORMAT:
        raise CheckpointRefused(unknown_format)
    return checkpoint


def manifest_document(step: int, state: dict[str, Any], files: Iterable[WrittenFile]) -> dict[str, Any]:
    """The content of a manifest, without its digest."""
    entries = {file.name: {"bytes": file.bytes, "xxh3": file.xxh3} for file in files}
    return {"format": FORMAT, "step": step, "state": state, "files": entries}


def manifest_digest(step: int, state: dict[str, Any], files: Iterable[WrittenFile]) -> str:
    """The digest of a manifest with this content."""
    return digest_of_document(manifest_document(step, state, files))


def newest_manifest(root: Path) -> Checkpoint | None:
    """The newest checkpoint in the directory whose manifest verifies, or None; changes no file."""
    return next(verified_checkpoints(root), None)


def verify_files(checkpoint: Checkpoint) -> None:
    """Checks every file against the manifest. Raises CheckpointError when one is missing, or does not match."""
    for entry in checkpoint.files:
        file = checkpoint.path / entry.name
        check_size(file, entry.bytes)
        if digest_of_file(file) != entry.xxh3:
            raise CheckpointError(f"{file}: its checksum differs from the manifest's")


def verified_checkpoints(root: Path) -> Iterator[Checkpoint]:
    """Checkpoints whose manifest verifies, newest first; their files are not checked."""
    for path in reversed(committed_checkpoints(root)):
        try:
            yield read_manifest(path)
        except CheckpointError as error:
            log.warning("passing over a damaged checkpoint: %s", error)


def committed_checkpoints(root: Path) -> list[Path]:
    """Directories of committed checkpoints, oldest first."""
    return sorted(path for path in root.glob("step-????????") if path.is_dir())


def digest_of_file(path: Path) -> str:
    """xxh3-128 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def check_size(file: Path, size: int) -> None:
    """Raises CheckpointError if there is no file of this size."""
    if not file.is_file() or file.stat().st_size != size:
        raise CheckpointError(f"{file}: missing, or not {size} bytes long")


def dump_manifest(document: dict[str, Any]) -> bytes:
    """The manifest with its digest, in its only valid encoding: any other byte is damage."""
    return json.dumps(document | {"xxh3": digest_of_document(document)}, indent=1, sort_keys=True).encode()
