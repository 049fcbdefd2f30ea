"""Dataset files: parquet and jsonl, held in memory within bounds; a row becomes a record when it is asked for."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

from services.common.data.bounds import DataBounds
from services.common.data.jsonl import JsonlRows
from services.common.data.parquet import ParquetRows
from services.common.data.record import TaskRecord, prepare
from services.common.data.rows import LazyRow, read_row
from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec


class Rows(Protocol):
    """The rows of one file."""

    def __len__(self) -> int:
        """Rows that were found."""

    def scan(self, limit: int | None) -> Iterator[tuple[int, LazyRow]]:
        """Finds the rows, once: what a person would call each (its line, or its number from 1), and its content."""

    def read(self, index: int) -> dict[str, Any]:
        """The row at `index`."""


class FileSource:
    """The tasks of one file. Every row is checked when it is opened, or as many as the time allows."""

    def __init__(
        self,
        path: Path,
        spec: DataSourceSpec,
        *,
        field: str,
        bounds: DataBounds | None = None,
        until: float | None = None,
    ) -> None:
        """Reads and checks the file.

        Args:
            path: of the file; its ending tells its form.
            spec: how it is read.
            field: of the spec, for the errors.
            bounds: what may be read.
            until: when to stop checking rows, monotonic seconds; None checks all.

        Raises:
            DataError: names the field, the file and the row.
        """
        self._field, self._path = field, path
        self._spec = spec
        self._bounds = bounds or DataBounds()
        self.checked = 0
        """Rows that were checked: all, or the first."""
        self.data_sources: set[str] = set()
        """Of the rows that were checked."""
        content = self._content(path)
        digest = hashlib.blake2b(content, digest_size=16)
        digest.update(spec.model_dump_json(exclude={"source", "seed", "config"}).encode())
        self.fingerprint = digest.hexdigest()
        kind: type[ParquetRows | JsonlRows] = ParquetRows if path.suffix == ".parquet" else JsonlRows
        try:
            self._rows: Rows = kind(content, self._bounds)
        except DataError as error:
            self._wrong(str(error))
        del content
        self._check(until)

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self._rows)

    def __getitem__(self, index: int) -> TaskRecord:
        """The task at `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of a dataset of {len(self)}")
        return self._record(self._rows.read(index))

    def _content(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                self._bounds.check_file(size)
                return file.read(size)
        except OSError as error:
            self._wrong(f"cannot be read: {error.strerror}")
        except DataError as error:
            self._wrong(str(error))

    def _check(self, until: float | None) -> None:
        rows = self._rows.scan(self._spec.size)
        while (found := self._next(rows)) is not None:
            number, row = found
            if until is not None and time.monotonic() > until:
                continue
            try:
                record = self._bounds.check(self._record(row()))
            except Exception as error:  # noqa: BLE001  whatever a library raises over a row is the row's fault
                self._wrong(f"row {number}: {_line(error)}")
            self.checked += 1
            self.data_sources.add(record.data_source)
        if not len(self):
            self._wrong("has no rows")

    def _next(self, rows: Iterator[tuple[int, LazyRow]]) -> tuple[int, LazyRow] | None:
        try:
            return next(rows, None)
        except (DataError, MemoryError) as error:
            self._wrong(str(error) or "takes more memory than there is")

    def _record(self, row: dict[str, Any]) -> TaskRecord:
        return prepare(read_row(row, data_source=self._spec.data_source), self._spec)

    def _wrong(self, what: str) -> NoReturn:
        raise DataError(f"{self._path}: {what}", field=self._field)


def _line(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    return said if isinstance(error, DataError | ValueError | RecursionError) else f"{type(error).__name__}: {said}"
