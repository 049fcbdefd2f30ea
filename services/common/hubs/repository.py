"""Repository of a hub at one commit: its files, and the protocol that every hub follows."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.common.errors import HubError
from services.common.spec.reference import Reference

_CHUNK = 16 * 1024**2
_QUERY = re.compile(r"\?[^\s'\")]+")
_MAX_MESSAGE_CHARS = 300
_DISK = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.EFBIG,
        errno.ENOENT,
        errno.EMFILE,
    }
)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. Example: HubFile("config.json", 659, blob="f84cb4c97182890fc1dbdeaf1a6a468fd27b4fff")."""

    path: str
    size: int
    """Bytes."""
    sha256: str = ""
    """Of its content; empty where the hub does not say."""
    blob: str = ""
    """Git's object id of its content; empty where the hub does not say, or git has only a pointer."""


@dataclass(frozen=True, slots=True)
class Repository:
    """The files that a hub lists at one commit: all of a model's, or those that a data file is searched among."""

    reference: Reference
    """Resolved: its revision is the commit."""
    files: tuple[HubFile, ...]


class Hub(Protocol):
    """A hub. Its methods raise HubRefused where another try does not help, else HubError."""

    endpoint: str

    def look_up(self, reference: Reference) -> Repository:
        """The repository; its revision is resolved here, once."""

    def download(self, reference: Reference, file: HubFile, part: Path) -> None:
        """Downloads a file of a resolved reference to `part`; what is there already of it is not fetched again."""


def require_content(path: Path, file: HubFile, beat: Callable[[], None]) -> None:
    """Compares a downloaded file with what the hub lists; calls `beat` while it reads. Raises HubError, and removes the file."""
    size = path.stat().st_size
    digests = {"sha256": hashlib.sha256()} if file.sha256 else {}
    if file.blob and not file.sha256:
        digests["blob"] = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as opened:
        while digests and (chunk := opened.read(_CHUNK)):
            for digest in digests.values():
                digest.update(chunk)
            beat()
    wrong = [name for name, digest in digests.items() if digest.hexdigest() != getattr(file, name)]
    if size != file.size or wrong:
        path.unlink()
        found = f"its {wrong[0]} differs" if wrong else f"it has {size} bytes of {file.size}"
        raise HubError(f"{file.path} is not what the hub lists: {found}")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def beat_of(partial: Path) -> Callable[[], None]:
    """A function that shows the parent, by a file's time, that the child works although no byte comes."""
    path, last = partial / "beat", [0.0]

    def beat() -> None:
        if time.monotonic() - last[0] > 1.0:
            last[0] = time.monotonic()
            path.touch()

    return beat


def is_of_disk(error: OSError) -> bool:
    """Whether the system's error is one of files, not of the network."""
    return error.errno in _DISK


def brief(error: BaseException) -> str:
    """The first line of a library's error, bounded; queries of addresses, which may hold signatures, are left out."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return _QUERY.sub("?…", text)[:_MAX_MESSAGE_CHARS]
