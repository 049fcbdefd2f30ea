"""Rows of the input, in chunks of bounded size: the same chunks whatever reads them, so that the output does not depend on that.

.jsonl ──► lines            ┐
.json ──► array elements    ├──► Chunk: numbered rows as JSON, or a record batch ──► workers
.csv ──► records            │
.parquet, .arrow ──► batches ┘
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.common.data.bounds import DataBounds
from services.common.data.content import Content, ContentFile
from services.common.data.jsonl import lines_of
from services.common.data.row_groups import READ_AHEAD_BYTES
from services.common.errors import ConfigError, DataError

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv")
_SAVED = "state.json"
"""File of a folder that `Dataset.save_to_disk` wrote."""
CHUNK_ROWS = 512
CHUNK_BYTES = 4 * 1024 * 1024
"""A chunk ends with the row that exceeds it."""


class Form(StrEnum):
    """What a chunk's rows are."""

    JSON = "json"
    """JSON of each row."""
    CELLS = "cells"
    """JSON of each row: the names in the header, and the row's cells."""
    BATCH = "batch"
    """One record batch in Arrow's stream format."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one file that follow each other."""

    file: str
    """Its name."""
    numbers: list[int]
    """Of the rows, from 1; in a jsonl file those of the lines."""
    rows: list[bytes]
    form: Form
    done_bytes: int
    """Of the input that was read so far."""


def input_files(name: str) -> list[Path]:
    """The file, or the files of a folder, in the order of their names; of one that `datasets` saved, the tables. Raises ConfigError."""
    path = Path(name)
    suffixes = (".arrow",) if (path / _SAVED).is_file() else SUFFIXES
    files = sorted(file for file in path.iterdir() if file.suffix in suffixes) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} has no file that ends in {', '.join(SUFFIXES)}", field="input")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ConfigError(f"{file} must end in one of {', '.join(SUFFIXES)}", field="input")
        if not file.is_file():
            raise ConfigError(f"{file} is not there", field="input")
    return files


def read_chunks(files: list[Path], bounds: DataBounds) -> Iterator[Chunk]:
    """The rows of these files. Raises DataError, which names the file, and the row where one is broken beyond which nothing can be read."""
    before = 0
    for file in files:
        try:
            content = Content(file, bounds)
            kind = {".jsonl": _lines, ".json": _elements, ".csv": _records, ".parquet": _batches, ".arrow": _tables}[
                file.suffix
            ]
            yield from kind(file.name, content, bounds, before)
        except DataError as error:
            raise DataError(f"{file}: {error}", field="input") from error
        before += content.size


def _lines(name: str, content: Content, bounds: DataBounds, before: int) -> Iterator[Chunk]:
    """A line that is too long is cut, so that it is set aside by the check of its size."""
    lines = lines_of(content.pieces(), 0, 1, bounds.max_row_bytes + 1)
    yield from _gather(name, ((line.number, line.text) for line in lines), content, before)


def _elements(name: str, content: Content, bounds: DataBounds, before: int) -> Iterator[Chunk]:  # noqa: ARG001  as _lines
    """Elements of a JSON array, which is never in memory as a whole."""
    import ijson

    found = 0

    def elements() -> Iterator[tuple[int, bytes]]:
        nonlocal found
        for value in ijson.items(ContentFile(content), "item", use_float=True):
            found += 1
            yield found, json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")

    try:
        yield from _gather(name, elements(), content, before)
    except (ijson.JSONError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"row {found + 1}: is not JSON, and nothing after it can be read: {reason}") from error
    if not found:
        raise DataError("has no rows: it must be a JSON array of objects (one object a line: name it .jsonl)")


def _records(name: str, content: Content, bounds: DataBounds, before: int) -> Iterator[Chunk]:
    """Records of a csv file in UTF-8, whose first one names the columns; cells are text, and may have line breaks in quotes."""
    csv.field_size_limit(bounds.max_row_bytes)
    file: Any = ContentFile(content)  # it has what TextIOWrapper calls
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    found = 0

    def records() -> Iterator[tuple[int, bytes]]:
        nonlocal found
        header = next(reader, [])
        for cells in reader:
            found += 1
            yield found, json.dumps([header, cells], ensure_ascii=False).encode()

    try:
        yield from _gather(name, records(), content, before, Form.CELLS)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"row {found + 1}: is not CSV in UTF-8, and nothing after it can be read: {error}") from error
    if not found:
        raise DataError("has no rows below its header")


def _gather(
    name: str, rows: Iterator[tuple[int, bytes]], content: Content, before: int, form: Form = Form.JSON
) -> Iterator[Chunk]:
    numbers, texts, size = list[int](), list[bytes](), 0
    for number, text in rows:
        numbers.append(number)
        texts.append(text)
        size += len(text)
        if len(numbers) == CHUNK_ROWS or size > CHUNK_BYTES:
            yield Chunk(name, numbers, texts, form, before + content.hashed_bytes)
            numbers, texts, size = [], [], 0
    if numbers:
        yield Chunk(name, numbers, texts, form, before + content.size)


def _batches(name: str, content: Content, bounds: DataBounds, before: int) -> Iterator[Chunk]:  # noqa: ARG001  as _lines
    import pyarrow as pa
    from pyarrow import parquet

    with _readable("parquet file"):
        file = parquet.ParquetFile(
            pa.PythonFile(ContentFile(content), mode="r"), buffer_size=READ_AHEAD_BYTES, pre_buffer=False
        )
        rows = max(1, file.metadata.num_rows)
        batches = file.iter_batches(CHUNK_ROWS, use_threads=False)
        yield from _numbered(name, batches, lambda done: before + content.size * done // rows)


def _tables(name: str, content: Content, bounds: DataBounds, before: int) -> Iterator[Chunk]:  # noqa: ARG001  as _lines
    """Record batches of a file in Arrow's stream format, as `Dataset.save_to_disk` writes it."""
    import pyarrow as pa

    file = ContentFile(content)
    with _readable("file in Arrow's stream format"), pa.ipc.open_stream(pa.PythonFile(file, mode="r")) as stream:
        yield from _numbered(name, stream, lambda _: before + file.tell())


def _numbered(name: str, batches: Iterable[Any], done_bytes: Callable[[int], int]) -> Iterator[Chunk]:
    """Chunks of record batches; `done_bytes`: of the input, after so many rows."""
    done = 0
    for whole in batches:
        for at in range(0, whole.num_rows, CHUNK_ROWS):
            batch = whole.slice(at, CHUNK_ROWS)
            numbers = list(range(done + 1, done + 1 + batch.num_rows))
            done += batch.num_rows
            yield Chunk(name, numbers, [_serialized(batch)], Form.BATCH, done_bytes(done))


@contextmanager
def _readable(kind: str) -> Iterator[None]:
    """Raises DataError where pyarrow cannot read a file of this kind."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"is not a readable {kind}: {reason}") from error


def _serialized(batch: Any) -> bytes:  # noqa: ANN401  pyarrow is untyped
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
