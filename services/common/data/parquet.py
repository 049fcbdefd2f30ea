"""Rows of a parquet file: only the columns that tasks need, unpacked a few rows at a time, so that a zip bomb is noticed early.

footer ──► columns, row groups ──► scan: every row once, in order
                               └─► row: by its index, from the row group's rows that `RowGroups` keeps
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from services.common.data.bounds import MAX_ROW_VALUES, DataBounds
from services.common.data.content import Content, ContentFile
from services.common.data.row_groups import BATCH_ROWS, READ_AHEAD_BYTES, RowGroups
from services.common.data.rows import COLUMNS, PROMPT_COLUMNS, LazyRow
from services.common.errors import DataError

_VALUE_BYTES = 8
_MAX_ROWS = 2**40
_MAX_NAMED_COLUMNS = 20


class ParquetRows:
    """The rows of a parquet file."""

    def __init__(self, content: Content, bounds: DataBounds, own: Mapping[str, str]) -> None:
        """Reads the footer; `own`: columns of other names than the usual (`DataSourceSpec.own_columns`).

        Raises DataError unless it is parquet with the columns of a task, and not too large.
        """
        import pyarrow as pa
        from pyarrow import parquet

        self._bounds = bounds
        try:
            file = pa.PythonFile(ContentFile(content), mode="r")
            self._file = parquet.ParquetFile(file, buffer_size=READ_AHEAD_BYTES, pre_buffer=False)
            names = self._file.schema_arrow.names
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(error) from error
        named = ", ".join(name[:80] for name in names[:_MAX_NAMED_COLUMNS])
        for setting, column in own.items():
            if column not in names:
                raise DataError(f"has no column `{column}`, which {setting} names; its columns: {named}")
        if "prompt_key" not in own and not any(name in names for name in PROMPT_COLUMNS):
            hint = "prompt_key names another; its columns"
            raise DataError(f"has no column `prompt` (nor `question` and `answer`; {hint}: {named})")
        self._columns = [name for name in dict.fromkeys((*COLUMNS, *own.values())) if name in names]
        for name in self._columns:
            if names.count(name) > 1:
                raise DataError(f"has more than one column `{name}`")
        fields = [self._file.schema_arrow.field(name) for name in self._columns]
        self._schema = pa.schema([field.with_type(_plain(field.type)) for field in fields])
        metadata = self._file.metadata
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if min(sizes, default=0) < 0 or sum(sizes) > _MAX_ROWS:
            raise _unreadable(ValueError("its row groups have impossible sizes"))
        unpacked = self._unpacked_bytes()
        bounds.check_file(unpacked, "unpacks to")
        self._groups = RowGroups(sizes, unpacked, self._batches)
        self._limit: int | None = None

    def __len__(self) -> int:
        """Rows of the file, as many as `scan` was limited to at the most."""
        rows = self._groups.rows
        return rows if self._limit is None else min(self._limit, rows)

    def scan(self, limit: int | None, until: float | None) -> Iterator[tuple[int, LazyRow]]:
        """Number (from 1) and content of each row, `limit` at the most, until `until`. Raises DataError for a bad file."""
        self._limit = limit
        count, size = 0, 0
        for full in self._batches(range(self._groups.count)):
            batch = full.slice(0, len(self) - count)
            size += batch.nbytes
            self._bounds.check_file(size, "unpacks to")
            for item in self._rows(batch, count + 1):
                if until is not None and time.monotonic() > until:
                    return
                yield item
            count += batch.num_rows
            if count == limit:
                return
        if count != len(self):
            raise _unreadable(ValueError(f"it has {count} rows, and its footer says {len(self)}"))

    def row(self, index: int) -> tuple[int, LazyRow]:
        """Number and content of one row, 0 ≤ index < len. Raises DataError for a bad file."""
        rows, at = self._groups.find(index)
        return index + 1, partial(self._row, rows, at)

    def expect(self, indices: Sequence[int]) -> None:
        """Names the rows that are read next, in their order, so that a row group is unpacked once for many of them."""
        self._groups.expect(indices)

    def _batches(self, groups: Sequence[int]) -> Iterator[Any]:
        """Record batches of these row groups, in order, without dictionaries. Raises DataError for a bad file."""
        import pyarrow as pa

        try:
            for full in self._file.iter_batches(
                BATCH_ROWS, row_groups=list(groups), columns=self._columns, use_threads=False
            ):
                batch = full.select(self._columns)
                yield batch.cast(self._schema) if batch.schema.types != self._schema.types else batch
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(error) from error

    def _rows(self, batch: Any, first: int) -> Iterator[tuple[int, LazyRow]]:  # noqa: ANN401  pyarrow is untyped
        """The batch's rows: converted together where that is certainly cheap, else one by one."""
        rows: list[dict[str, Any]] | None = None
        if batch.nbytes <= self._bounds.max_row_bytes and _count_values(batch) <= MAX_ROW_VALUES:
            with contextlib.suppress(Exception):  # the row that causes it raises it again
                rows = batch.to_pylist()
        for index in range(batch.num_rows):
            yield first + index, partial(self._row, batch, index) if rows is None else partial(rows.__getitem__, index)

    def _row(self, rows: Any, index: int) -> dict[str, Any]:  # noqa: ANN401
        row = rows.slice(index, 1)
        self._bounds.check_row(row.nbytes)
        if (count := _count_values(row)) > MAX_ROW_VALUES:
            raise DataError(f"has {count} values; at most {MAX_ROW_VALUES} are taken")
        return dict(row.to_pylist()[0])

    def _unpacked_bytes(self) -> int:
        """Of the columns that are read, from the footer; a null has no byte there, but takes memory while it is read."""
        metadata, wanted = self._file.metadata, set(self._columns)
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        chunks = (group.column(number) for group in groups for number in range(group.num_columns))
        read = (chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in wanted)
        return sum(max(chunk.total_uncompressed_size, chunk.num_values * _VALUE_BYTES) for chunk in read)


def _plain(kind: Any) -> Any:  # noqa: ANN401
    """The type without dictionaries: with them, each row counts the bytes of the whole dictionary."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        return (pa.list_ if types.is_list(kind) else pa.large_list)(kind.value_field.with_type(_plain(kind.value_type)))
    return kind


def _count_values(rows: Any) -> int:  # noqa: ANN401
    """Values of the rows, nested ones included."""
    return sum(_nested_values(chunk) for column in rows.columns for chunk in getattr(column, "chunks", [column]))


def _nested_values(array: Any) -> int:  # noqa: ANN401
    from pyarrow import types

    inner: list[Any] = []
    if types.is_map(array.type):
        inner = [array.keys, array.items]
    elif types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        inner = [array.flatten()]
    elif types.is_struct(array.type):
        inner = array.flatten()
    return len(array) + sum(map(_nested_values, inner))


def _unreadable(error: Exception) -> DataError:
    return DataError(f"is not a readable parquet file: {' '.join(str(error).split())[:300]}")


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A parquet file with a column for each name in any of the rows, in order of appearance."""
    import pyarrow as pa
    from pyarrow import parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    data = io.BytesIO()
    parquet.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), data, compression="zstd")
    return data.getvalue()
