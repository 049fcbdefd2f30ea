"""Mark of a job's history: how long `history.jsonl` was, and the digest of it up to there.

The file only ever grows, so a mark stays true of it for good: one that is not says that lines were cut off, or written anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import xxhash

_PIECE_BYTES = 1 << 20


class HistoryMark(NamedTuple):
    """Example: HistoryMark(81_920, "0f…")."""

    bytes: int
    """Whole lines only."""
    xxh3: str
    """xxh3-128 of those bytes, hexadecimal."""


class HistoryReader:
    """Follows the file: each mark reads only what is new."""

    def __init__(self, path: Path) -> None:
        """Nothing is read yet."""
        self._path = path
        self._bytes = 0
        self._digest = xxhash.xxh3_128()

    def mark(self) -> HistoryMark:
        """Of all whole lines that the file has; of a file that is not there, of none.

        Raises:
            OSError: it cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._bytes)
                data = file.read()
        except FileNotFoundError:
            data = b""
        self._take(data[: data.rfind(b"\n") + 1])
        return HistoryMark(self._bytes, self._digest.hexdigest())

    def holds(self, mark: HistoryMark) -> bool:
        """Whether the file still begins with what was marked; marks are asked for in the order in which they were made.

        Raises:
            OSError: it cannot be read.
        """
        if mark.bytes < self._bytes:
            self._bytes, self._digest = 0, xxhash.xxh3_128()
        with self._path.open("rb") as file:
            file.seek(self._bytes)
            while self._bytes < mark.bytes and (data := file.read(min(_PIECE_BYTES, mark.bytes - self._bytes))):
                self._take(data)
        return self._bytes == mark.bytes and self._digest.hexdigest() == mark.xxh3

    def _take(self, data: bytes) -> None:
        self._digest.update(data)
        self._bytes += len(data)
