"""Rows of a parquet file: only the columns that tasks need, unpacked a few rows at a time, so that a zip bomb is noticed early."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from services.common.data.bounds import MAX_ROW_VALUES, DataBounds
from services.common.data.rows import COLUMNS, PROMPT_COLUMNS, LazyRow
from services.common.errors import DataError

_BATCH_ROWS = 64
"""Unpacked at once; a few bytes of a dictionary may expand to megabytes in each row."""
_CHUNK_BYTES = 64 * 1024 * 1024
_CHUNK_BATCHES = 64
_VALUE_BYTES = 8
_MAX_NAMED_COLUMNS = 20


class ParquetRows:
    """The rows of a parquet file."""

    def __init__(self, content: bytes, bounds: DataBounds) -> None:
        """Reads the footer. Raises DataError unless it is parquet with the columns of a task, and not too large."""
        import pyarrow as pa
        from pyarrow import parquet

        self._bounds = bounds
        try:
            self._file = parquet.ParquetFile(pa.BufferReader(content))
            names = self._file.schema_arrow.names
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(error) from error
        if not any(name in names for name in PROMPT_COLUMNS):
            named = ", ".join(name[:80] for name in names[:_MAX_NAMED_COLUMNS])
            raise DataError(f"has no column `prompt` (nor `question` and `answer`); its columns: {named}")
        self._columns = [name for name in COLUMNS if name in names]
        for name in self._columns:
            if names.count(name) > 1:
                raise DataError(f"has more than one column `{name}`")
        fields = [self._file.schema_arrow.field(name) for name in self._columns]
        self._schema = pa.schema([field.with_type(_plain(field.type)) for field in fields])
        self._table: Any = self._schema.empty_table()
        bounds.check_file(self._unpacked_bytes(), "unpacks to")

    def __len__(self) -> int:
        """Rows read by `scan`."""
        return int(self._table.num_rows)

    def scan(self, limit: int | None) -> Iterator[tuple[int, LazyRow]]:
        """Number (from 1) and content of each row, `limit` at the most. Raises DataError for a bad file."""
        import pyarrow as pa

        count, size, parts = 0, 0, []
        batches: list[Any] = []
        try:
            for full in self._file.iter_batches(_BATCH_ROWS, columns=self._columns):
                batch = (full if limit is None else full.slice(0, limit - count)).select(self._columns)
                if batch.schema.types != self._schema.types:  # it has dictionaries
                    batch = batch.cast(self._schema)
                size += batch.nbytes
                self._bounds.check_file(size, "unpacks to")
                batches.append(batch)
                yield from self._rows(batch, count + 1)
                count += batch.num_rows
                if len(batches) >= _CHUNK_BATCHES or sum(part.nbytes for part in batches) > _CHUNK_BYTES:
                    parts.append(pa.Table.from_batches(batches).combine_chunks())
                    batches = []
                if count == limit:
                    break
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(error) from error
        if batches:
            parts.append(pa.Table.from_batches(batches))
        self._table = pa.concat_tables(parts) if parts else self._table
        del self._file

    def read(self, index: int) -> dict[str, Any]:
        """One row."""
        return self._row(self._table, index)

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
