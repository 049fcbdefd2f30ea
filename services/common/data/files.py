"""Dataset files: parquet and jsonl, held in memory as they lie on disk; a row becomes a record when it is asked for."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

from services.common.data.record import TaskRecord, prepare
from services.common.data.rows import PROMPT_COLUMNS, read_row
from services.common.errors import DataError
from services.common.spec import DataSourceSpec

COLUMNS = ("prompt", "data_source", "reward_model", "ground_truth", "extra_info", "question", "answer")
_BATCH_ROWS = 4096


class Rows(Protocol):
    """The rows of one file."""

    def __len__(self) -> int:
        """Number of rows."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All rows in order; DataError or ValueError at a broken one."""

    def number(self, index: int) -> int:
        """What a person would call the row at `index`, from 1."""

    def read(self, index: int) -> dict[str, Any]:
        """The row at `index`."""


class FileSource:
    """The tasks of one file. Every row is checked when it is opened."""

    def __init__(self, path: Path, spec: DataSourceSpec, *, field: str) -> None:
        """Reads and checks the file.

        Raises:
            DataError: names the field, the file and the row.
        """
        self._where = f"{field}: {path}"
        self._spec = spec
        try:
            content = path.read_bytes()
        except OSError as error:
            self._wrong(f"cannot be read: {error.strerror}")
        digest = hashlib.blake2b(content, digest_size=16)
        digest.update(spec.model_dump_json(exclude={"source", "seed", "config"}).encode())
        self.fingerprint = digest.hexdigest()
        parquet = path.suffix == ".parquet"
        self._rows: Rows = ParquetRows(content, self._where) if parquet else JsonlRows(content)
        self._size = min(len(self._rows), spec.size or len(self._rows))
        if not self._size:
            self._wrong("has no rows")
        self._check()

    def __len__(self) -> int:
        """Number of tasks."""
        return self._size

    def __getitem__(self, index: int) -> TaskRecord:
        """The task at `index`."""
        if not 0 <= index < self._size:
            raise IndexError(f"task {index} of a dataset of {self._size}")
        return self._record(self._rows.read(index))

    def _check(self) -> None:
        rows = iter(self._rows)
        for index in range(self._size):
            try:
                self._record(next(rows))
            except (DataError, ValueError, RecursionError) as error:
                self._wrong(f"row {self._rows.number(index)}: {error}")

    def _record(self, row: dict[str, Any]) -> TaskRecord:
        return prepare(read_row(row, data_source=self._spec.data_source), self._spec)

    def _wrong(self, what: str) -> NoReturn:
        raise DataError(f"{self._where}: {what}")


class JsonlRows:
    """One JSON object a line; empty lines are skipped, and a row's number is its line's."""

    def __init__(self, content: bytes) -> None:
        """Finds the lines."""
        lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        self._lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]

    def __len__(self) -> int:
        """Number of lines that are not empty."""
        return len(self._lines)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All rows in order."""
        return (self.read(index) for index in range(len(self)))

    def number(self, index: int) -> int:
        """The line's number."""
        return self._lines[index][0]

    def read(self, index: int) -> dict[str, Any]:
        """The line, parsed."""
        row = json.loads(self._lines[index][1], parse_constant=_no_constant)
        if isinstance(row, dict):
            return row
        raise DataError(f"must be a JSON object, not {type(row).__name__}")


class ParquetRows:
    """A parquet file's rows; only the columns that tasks are made of are read."""

    def __init__(self, content: bytes, where: str) -> None:
        """Reads the columns.

        Raises:
            DataError: not parquet, or without the columns that a task needs.
        """
        import pyarrow as pa
        from pyarrow import parquet

        try:
            file = parquet.ParquetFile(io.BytesIO(content))
            names = file.schema_arrow.names
            self._table = file.read(columns=[name for name in COLUMNS if name in names])
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{where}: is not a readable parquet file: {error}") from error
        if not any(name in names for name in PROMPT_COLUMNS):
            raise DataError(
                f"{where}: has no column `prompt` (nor `question` and `answer`); its columns: {', '.join(names)}"
            )

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All rows in order."""
        for batch in self._table.to_batches(max_chunksize=_BATCH_ROWS):
            yield from batch.to_pylist()

    def number(self, index: int) -> int:
        """Rows count from 1."""
        return index + 1

    def read(self, index: int) -> dict[str, Any]:
        """One row."""
        row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
