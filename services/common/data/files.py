"""Dataset files: parquet and jsonl, read row by row within bounded memory, however large the file is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from services.common.data.bounds import MAX_TASKS, DataBounds
from services.common.data.content import Content
from services.common.data.jsonl import JsonlRows
from services.common.data.parquet import ParquetRows
from services.common.data.record import TaskRecord, prepare
from services.common.data.rows import LazyRow, read_row, with_usual_columns
from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec

READ_BYTES_PER_S = 300_000_000
"""Speed at which files are certainly read and hashed: where the time is short, the time for that is kept."""


class FileSource:
    """The tasks of one file. Opening it checks every row, or as many as the time allows; the others are checked when they are read."""

    def __init__(
        self,
        path: Path,
        spec: DataSourceSpec,
        *,
        field: str,
        bounds: DataBounds,
        until: float | None,
        whole: bool = True,
    ) -> None:
        """Checks rows until `until`, monotonic seconds (None: all); unless the `whole` file is read, reading it ends then, too.

        Raises DataError with field, file and row.
        """
        self._path, self._spec, self._field, self._bounds = path, spec, field, bounds
        self.checked = 0
        """Rows that were checked: all, or the first."""
        self.data_sources: set[str] = set()
        """Of the rows that were checked."""
        try:
            content = Content(path, bounds, until=None if whole else until)
            if until is not None and not whole:
                until -= min(content.size / READ_BYTES_PER_S, max(0.0, until - time.monotonic()) / 2)
            self._own = spec.own_columns
            self._rows: ParquetRows | JsonlRows = (
                ParquetRows(content, bounds, self._own) if path.suffix == ".parquet" else JsonlRows(content, bounds)
            )
            self._check_rows(until)
            # Settings that are newer than a recorded fingerprint are in it only where they are set.
            left_out = {"source", "seed", "config"} | ({"prompt_key", "answer_key"} - self._own.keys())
            self.fingerprint = content.finish(spec.model_dump_json(exclude=left_out).encode())
            """Of content and settings; empty when the time was over before the end of the file."""
            self.is_complete = content.is_complete
            """Whether the whole file was read."""
            self._check_count()
        except DataError as error:
            raise DataError(f"{path}: {error}", field=field) from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TaskRecord:
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of a dataset of {len(self)}")
        try:
            return self._record(*self._rows.row(index))
        except DataError as error:
            raise DataError(f"{self._path}: {error}", field=self._field) from error

    def expect(self, indices: Sequence[int]) -> None:
        """Names the tasks that are read next, in their order: a file that is larger than the memory is read faster."""
        if isinstance(self._rows, ParquetRows):
            self._rows.expect(indices)

    def _check_rows(self, until: float | None) -> None:
        try:
            for number, row in self._rows.scan(self._spec.size, until):
                record = self._record(number, row)
                self.checked += 1
                self.data_sources.add(record.data_source)
        except MemoryError as error:
            raise DataError(str(error) or "takes more memory than there is") from error

    def _check_count(self) -> None:
        if self.is_complete and not len(self):
            raise DataError("has no rows")
        if len(self) > MAX_TASKS:
            raise DataError(f"has {len(self)} rows; at most {MAX_TASKS} are taken: set size")

    def _record(self, number: int, row: LazyRow) -> TaskRecord:
        """The record of a row, checked. Raises DataError, which names the row, whatever is wrong with it."""
        try:
            usual = with_usual_columns(row(), self._own)
            record = prepare(read_row(usual, data_source=self._spec.data_source), self._spec)
            return self._bounds.check(record)
        except Exception as error:  # the row is at fault for every exception of a library
            raise DataError(f"row {number}: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, DataError | ValueError | RecursionError) else f"{type(error).__name__}: {text}"
