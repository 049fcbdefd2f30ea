"""Lines of a jsonl file: an index of blocks stays in memory, and a line is read from the file when it is needed.

content ──► lines that are not empty ──► index: a block begins every BLOCK_BYTES ──► read: from the block's start to the line
"""

from __future__ import annotations

import json
import re
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from services.common.data.bounds import DataBounds
from services.common.data.content import Content
from services.common.data.rows import LazyRow
from services.common.errors import DataError
from services.common.spec.document import no_constant

BLOCK_BYTES = 64 * 1024
"""Least distance of the blocks' starts: what is read for one line, in addition to the line."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NON_SPACE = re.compile(rb"\S")


class Line(NamedTuple):
    """A line that is not empty."""

    number: int
    """From 1; empty lines count."""
    start: int
    """Offset in the file."""
    size: int
    """Bytes, without the end of line."""
    text: bytes
    """Of a line that is longer than a row may be, only the beginning."""


class JsonlRows:
    """One JSON object per line; empty lines are skipped, and a row's number is its line's."""

    def __init__(self, content: Content, bounds: DataBounds) -> None:
        self._content, self._bounds = content, bounds
        self._first, self._numbers, self._starts = array("Q"), array("Q"), array("Q")
        self._count = 0

    def __len__(self) -> int:
        """Lines found by `scan`."""
        return self._count

    def scan(self, limit: int | None, until: float | None) -> Iterator[tuple[int, LazyRow]]:
        """Number and content of each line that is not empty, `limit` at the most; after `until` lines are found, but not given."""
        for line in lines_of(self._content.pieces(), 0, 1, self._bounds.max_row_bytes + 1):
            if line.start + line.size == self._content.hashed_bytes and not self._content.is_complete:
                return  # the time was over within this line
            if not self._starts or line.start - self._starts[-1] >= BLOCK_BYTES:
                self._first.append(self._count)
                self._numbers.append(line.number)
                self._starts.append(line.start)
            self._count += 1
            if until is None or time.monotonic() <= until:
                yield line.number, partial(self._parse, line)
            if self._count == limit:
                return

    def row(self, index: int) -> tuple[int, LazyRow]:
        """Number and content of one line, 0 ≤ index < len. Raises DataError when the file has changed."""
        block = bisect_right(self._first, index) - 1
        start = self._starts[block]
        pieces = (self._content.read(offset, BLOCK_BYTES) for offset in range(start, self._content.size, BLOCK_BYTES))
        lines = lines_of(pieces, start, self._numbers[block], self._bounds.max_row_bytes + 1)
        line = next(islice(lines, index - self._first[block], None))
        return line.number, partial(self._parse, line)

    def _parse(self, line: Line) -> dict[str, Any]:
        """The line, parsed. Raises DataError when too long or no object, ValueError or RecursionError when not JSON."""
        self._bounds.check_row(line.size)
        row = json.loads(line.text, parse_constant=no_constant)
        if isinstance(row, dict):
            return row
        raise DataError(f"must be a JSON object, not {type(row).__name__}")


def lines_of(pieces: Iterable[bytes], offset: int, number: int, most: int) -> Iterator[Line]:
    """Lines that are not empty, of pieces that begin at this offset with the line of this number; `most`: bytes that are kept of one."""
    begun = _Begun(most, offset)
    for piece in pieces:
        mark = len(_BYTE_ORDER_MARK) if offset == 0 and piece.startswith(_BYTE_ORDER_MARK) else 0
        begun.start += mark
        first, last = piece.find(b"\n"), piece.rfind(b"\n") + 1
        begun.add(piece[mark : first if last else None])
        if last:
            if begun.has_text:
                yield begun.line(number)
            yield from _split(piece[first + 1 : last], offset + first + 1, number + 1)
            number += piece.count(b"\n")
            begun = _Begun(most, offset + last)
            begun.add(piece[last:])
        offset += len(piece)
    if begun.has_text:
        yield begun.line(number)


class _Begun:
    """A line whose end was not read yet."""

    def __init__(self, most: int, start: int) -> None:
        """`most`: bytes that are kept of it."""
        self.start, self.has_text = start, False
        self._most, self._size, self._parts, self._kept = most, 0, list[bytes](), 0

    def add(self, part: bytes) -> None:
        """More of the line."""
        self.has_text = self.has_text or _NON_SPACE.search(part) is not None
        kept = part[: self._most - self._kept]
        self._parts.append(kept)
        self._kept += len(kept)
        self._size += len(part)

    def line(self, number: int) -> Line:
        """The line, as it is now."""
        return Line(number, self.start, self._size, b"".join(self._parts))


def _split(text: bytes, offset: int, number: int) -> Iterator[Line]:
    """The lines of a text that are not empty; each ends with an end of line."""
    begin = 0
    while found := _NON_SPACE.search(text, begin):
        start = text.rfind(b"\n", begin, found.start()) + 1 or begin
        end = text.find(b"\n", found.start())
        number += text.count(b"\n", begin, start)
        yield Line(number, offset + start, end - start, text[start:end])
        begin, number = end + 1, number + 1
