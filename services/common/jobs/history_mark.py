"""Mark of a job's history: the length of `history.jsonl` at some time, and the digest of those bytes.

The file only grows, so a mark stays valid for good: one that does not match shows that lines were cut off or replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import xxhash

_CHUNK_BYTES = 1 << 20


class HistoryMark(NamedTuple):
    """Example: HistoryMark(81_920, "0f…")."""

    bytes: int
    """Whole lines only."""
    xxh3: str
    """xxh3-128 of those bytes, hexadecimal."""


class HistoryReader:
    """Incremental reader of the file: each mark reads only the new bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes, self._digest = 0, xxhash.xxh3_128()

    def mark(self) -> HistoryMark:
        """The mark of all whole lines in the file; of none where there is no file. Raises OSError."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._bytes)
                data = file.read()
        except FileNotFoundError:
            data = b""
        self._add(data[: data.rfind(b"\n") + 1])
        return HistoryMark(self._bytes, self._digest.hexdigest())

    def holds(self, mark: HistoryMark) -> bool:
        """Whether the file still begins with the marked bytes; fast for marks from oldest to newest. Raises OSError."""
        if mark.bytes < self._bytes:
            self._bytes, self._digest = 0, xxhash.xxh3_128()
        with self._path.open("rb") as file:
            file.seek(self._bytes)
            while self._bytes < mark.bytes and (data := file.read(min(_CHUNK_BYTES, mark.bytes - self._bytes))):
                self._add(data)
        return self._bytes == mark.bytes and self._digest.hexdigest() == mark.xxh3

    def _add(self, data: bytes) -> None:
        self._digest.update(data)
        self._bytes += len(data)
