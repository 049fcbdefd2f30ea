"""Dataset files: parquet and jsonl, held in memory within bounds; a row becomes a record when it is read."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from services.common.data.bounds import DataBounds
from services.common.data.jsonl import JsonlRows
from services.common.data.parquet import ParquetRows
from services.common.data.record import TaskRecord, prepare
from services.common.data.rows import read_row
from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec


class FileSource:
    """The tasks of one file. Opening it checks every row, or as many as the time allows."""

    def __init__(
        self, path: Path, spec: DataSourceSpec, *, field: str, bounds: DataBounds, until: float | None
    ) -> None:
        """Checks rows until `until`, monotonic seconds (None: all). Raises DataError with field, file and row."""
        self._spec, self._bounds = spec, bounds
        self.checked = 0
        """Rows that were checked: all, or the first."""
        self.data_sources: set[str] = set()
        """Of the rows that were checked."""
        try:
            content = _read(path, bounds)
            digest = hashlib.blake2b(content, digest_size=16)
            digest.update(spec.model_dump_json(exclude={"source", "seed", "config"}).encode())
            self.fingerprint = digest.hexdigest()
            kind: type[ParquetRows | JsonlRows] = ParquetRows if path.suffix == ".parquet" else JsonlRows
            self._rows = kind(content, bounds)
            del content
            self._check_rows(until)
        except DataError as error:
            raise DataError(f"{path}: {error}", field=field) from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TaskRecord:
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of a dataset of {len(self)}")
        return self._record(self._rows.read(index))

    def _check_rows(self, until: float | None) -> None:
        try:
            for number, row in self._rows.scan(self._spec.size):
                if until is not None and time.monotonic() > until:
                    continue
                try:
                    record = self._bounds.check(self._record(row()))
                except Exception as error:  # the row is at fault for every exception of a library
                    raise DataError(f"row {number}: {_describe(error)}") from error
                self.checked += 1
                self.data_sources.add(record.data_source)
        except MemoryError as error:
            raise DataError(str(error) or "takes more memory than there is") from error
        if not len(self):
            raise DataError("has no rows")

    def _record(self, row: dict[str, Any]) -> TaskRecord:
        return prepare(read_row(row, data_source=self._spec.data_source), self._spec)


def _read(path: Path, bounds: DataBounds) -> bytes:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            bounds.check_file(size)
            return file.read(size)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from error


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, DataError | ValueError | RecursionError) else f"{type(error).__name__}: {text}"
