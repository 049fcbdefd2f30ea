"""Content of a dataset file: read in pieces, with the digest of all its bytes, and never held in memory as a whole.

open ──► pieces, in order, each hashed ──► finish: the rest is hashed ──► read at any offset, while the file stays as it was
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from services.common.data.bounds import DataBounds
from services.common.errors import DataError

PIECE_BYTES = 1024 * 1024
MIN_READ_BYTES = 64 * PIECE_BYTES
"""Read in any case, even when no time is left."""


class Content:
    """The bytes of one file. The object keeps the file open: a file that replaces it by a rename changes nothing."""

    def __init__(self, path: Path, bounds: DataBounds, *, until: float | None = None) -> None:
        """Opens the file, which is read until `until`, monotonic seconds (None: all). Raises DataError when too large or unreadable."""
        self.path, self._until = path, until
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._state = self._stat()
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}") from error
        self.size = self._state[0]
        bounds.check_file(self.size)
        self._digest, self._hashed = hashlib.blake2b(digest_size=16), 0

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def hashed_bytes(self) -> int:
        """Bytes that were read in order."""
        return self._hashed

    @property
    def is_complete(self) -> bool:
        """Whether every byte was read."""
        return self._hashed == self.size

    def pieces(self) -> Iterator[bytes]:
        """The bytes that were not read yet, in order; ends early when the time is over. Raises DataError when the file has shrunk."""
        while self._hashed < self.size and not self._is_late():
            piece = self._pread(min(PIECE_BYTES, self.size - self._hashed), self._hashed)
            if not piece:
                raise DataError("became shorter while it was read")
            self._digest.update(piece)
            self._hashed += len(piece)
            yield piece

    def finish(self, suffix: bytes) -> str:
        """Digest of the whole content and of a suffix; an empty text when the time was over before the end."""
        for _ in self.pieces():
            pass
        if not self.is_complete:
            return ""
        digest = self._digest.copy()
        digest.update(suffix)
        return digest.hexdigest()

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`; fewer only at the end of the content. Raises DataError when the file has changed."""
        self.check_unchanged()
        parts, end = [], min(offset + count, self.size)
        while offset < end and (part := self._pread(end - offset, offset)):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def check_unchanged(self) -> None:
        """Raises DataError if the bytes are no longer those that were hashed. A file that only grew, or was touched, is accepted."""
        state = self._stat()
        if state == self._state:
            return
        again, offset = hashlib.blake2b(digest_size=16), 0
        while offset < self._hashed and (piece := self._pread(min(PIECE_BYTES, self._hashed - offset), offset)):
            again.update(piece)
            offset += len(piece)
        if again.digest() != self._digest.digest():
            raise DataError("has changed since it was opened: write a new file instead")
        self._state = state

    def _pread(self, count: int, offset: int) -> bytes:
        try:
            return os.pread(self._descriptor, count, offset)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}") from error

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _is_late(self) -> bool:
        return self._until is not None and self._hashed >= MIN_READ_BYTES and time.monotonic() > self._until


class ContentFile:
    """The content as a file for pyarrow and `io`: `read`, `seek`, `tell`. Bytes are read where they lie, without the digest."""

    def __init__(self, content: Content) -> None:
        self._content, self._offset = content, 0
        self.closed = False

    def read(self, count: int = -1) -> bytes:
        """Up to `count` bytes from here; negative: all that remain."""
        data = self._content.read(self._offset, self._content.size if count < 0 else count)
        self._offset += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to an offset from the start, from here or from the end; returns the place."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._content.size}[whence]
        self._offset = base + offset
        return self._offset

    def tell(self) -> int:
        """The place in the file."""
        return self._offset

    def readable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """Never."""
        return False

    def seekable(self) -> bool:
        """Always."""
        return True

    def flush(self) -> None:
        """Nothing is to be written."""

    def close(self) -> None:
        """Nothing is to be closed: the content owns the file."""
        self.closed = True
