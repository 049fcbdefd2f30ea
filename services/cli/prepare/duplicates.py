"""Duplicates: the prompts that were taken, by digest, on the disk, so that memory does not grow with them."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path
from typing import NamedTuple

CACHE_KIB = 16 * 1024
"""Memory of the table."""


class First(NamedTuple):
    """The first row with a prompt."""

    file: str
    number: int
    same_answer: bool
    """Whether the later row has the same reference answer."""


class Prompts:
    """Digests of prompts, in a temporary file."""

    def __init__(self, path: Path) -> None:
        self._table = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}", "locking_mode=EXCLUSIVE"):
            self._table.execute(f"PRAGMA {pragma}")
        self._table.execute(
            "CREATE TABLE seen (prompt BLOB PRIMARY KEY, answer BLOB, file TEXT, number INT) WITHOUT ROWID"
        )
        self._table.execute("BEGIN")

    def add(self, prompt: bytes, answer: str, file: str, number: int) -> First | None:
        """Adds a prompt's digest; the first row that has it, if this one is not the first."""
        digest = hashlib.blake2b(answer.encode(errors="surrogatepass"), digest_size=8).digest()
        done = self._table.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?, ?)", (prompt, digest, file, number))
        if done.rowcount:
            return None
        row = self._table.execute("SELECT answer, file, number FROM seen WHERE prompt = ?", (prompt,)).fetchone()
        return First(row[1], row[2], row[0] == digest)

    def close(self) -> None:
        """Closes the table."""
        self._table.close()
