"""Rows of a parquet file: only the columns that tasks are made of, unpacked a few rows at a time, so that a bomb is noticed early."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from services.common.data.bounds import MAX_ROW_VALUES, DataBounds
from services.common.data.rows import COLUMNS, PROMPT_COLUMNS, LazyRow
from services.common.errors import DataError

_BATCH_ROWS = 64
"""Unpacked at once; a few bytes of dictionary may stand for megabytes in each row."""
_CHUNK_BYTES = 64 * 1024 * 1024
_CHUNK_BATCHES = 64
_VALUE_BYTES = 8
_MAX_NAMED = 20


class ParquetRows:
    """The rows of a parquet file."""

    def __init__(self, content: bytes, bounds: DataBounds) -> None:
        """Reads the footer; `scan` reads the rows.

        Raises:
            DataError: not parquet, without the columns that a task needs, or more than may be unpacked.
        """
        import pyarrow as pa
        from pyarrow import parquet

        self._bounds = bounds
        try:
            self._file = parquet.ParquetFile(pa.BufferReader(content))
            names = self._file.schema_arrow.names
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(error) from error
        if not any(name in names for name in PROMPT_COLUMNS):
            named = ", ".join(name[:80] for name in names[:_MAX_NAMED])
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
        """Rows that `scan` has read."""
        return int(self._table.num_rows)

    def scan(self, limit: int | None) -> Iterator[tuple[int, LazyRow]]:
        """Number (from 1) and content of each row, `limit` at the most.

        Raises:
            DataError: the file is damaged, or unpacks to more than it may.
        """
        import pyarrow as pa

        count, size, parts = 0, 0, []
        batches: list[Any] = []
        try:
            for whole in self._file.iter_batches(_BATCH_ROWS, columns=self._columns):
                batch = (whole if limit is None else whole.slice(0, limit - count)).select(self._columns)
                if batch.schema.types != self._schema.types:  # there are dictionaries
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
        """The batch's rows: made at once where that is surely cheap, else each by itself."""
        made: list[dict[str, Any]] | None = None
        if batch.nbytes <= self._bounds.max_row_bytes and _values(batch) <= MAX_ROW_VALUES:
            try:
                made = batch.to_pylist()
            except Exception:  # noqa: BLE001  raised again by the row that it is about
                made = None
        for index in range(batch.num_rows):
            lazy = partial(self._row, batch, index) if made is None else partial(made.__getitem__, index)
            yield first + index, lazy

    def _row(self, rows: Any, index: int) -> dict[str, Any]:  # noqa: ANN401
        one = rows.slice(index, 1)
        self._bounds.check_row(one.nbytes)
        if (values := _values(one)) > MAX_ROW_VALUES:
            raise DataError(f"has {values} values; at most {MAX_ROW_VALUES} are taken")
        row: dict[str, Any] = one.to_pylist()[0]
        return row

    def _unpacked_bytes(self) -> int:
        """Of the columns that are read, as the footer has it; a null has no byte there, and takes some while it is read."""
        metadata, wanted = self._file.metadata, set(self._columns)
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        chunks = (group.column(number) for group in groups for number in range(group.num_columns))
        read = (chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in wanted)
        return sum(max(chunk.total_uncompressed_size, chunk.num_values * _VALUE_BYTES) for chunk in read)


def _plain(kind: Any) -> Any:  # noqa: ANN401
    """The type without dictionaries, which make a row look as large as all of them."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        return (pa.list_ if types.is_list(kind) else pa.large_list)(kind.value_field.with_type(_plain(kind.value_type)))
    return kind


def _values(rows: Any) -> int:  # noqa: ANN401
    """Values within the rows, those of lists counted."""
    columns = [chunk for column in rows.columns for chunk in getattr(column, "chunks", [column])]
    return sum(_nested_values(column) for column in columns)


def _nested_values(array: Any) -> int:  # noqa: ANN401
    from pyarrow import types

    if types.is_map(array.type):
        return len(array) + _nested_values(array.keys) + _nested_values(array.items)
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        return len(array) + _nested_values(array.flatten())
    if types.is_struct(array.type):
        return len(array) + sum(_nested_values(field) for field in array.flatten())
    return len(array)


def _unreadable(error: Exception) -> DataError:
    return DataError(f"is not a readable parquet file: {' '.join(str(error).split())[:300]}")
