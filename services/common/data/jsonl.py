"""Lines of a jsonl file, held as bytes; a line is parsed when it is read."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

from services.common.data.bounds import DataBounds
from services.common.data.rows import LazyRow
from services.common.errors import DataError
from services.common.spec.document import no_constant

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NON_SPACE = re.compile(rb"\S")


class JsonlRows:
    """One JSON object per line; empty lines are skipped, and a row's number is its line's."""

    def __init__(self, content: bytes, bounds: DataBounds) -> None:
        self._content, self._bounds = content, bounds
        self._starts, self._ends = array("Q"), array("Q")

    def __len__(self) -> int:
        """Lines found by `scan`."""
        return len(self._starts)

    def scan(self, limit: int | None) -> Iterator[tuple[int, LazyRow]]:
        """Number and content of each line that is not empty, `limit` at the most."""
        content, line, begin = self._content, 1, len(_BYTE_ORDER_MARK) * self._content.startswith(_BYTE_ORDER_MARK)
        while (limit is None or len(self) < limit) and (found := _NON_SPACE.search(content, begin)):
            start = max(content.rfind(b"\n", begin, found.start()) + 1, begin)
            end = content.find(b"\n", found.start())
            end = len(content) if end < 0 else end
            line += content.count(b"\n", begin, start)
            self._starts.append(start)
            self._ends.append(end)
            yield line, partial(self.read, len(self) - 1)
            begin, line = end + 1, line + 1

    def read(self, index: int) -> dict[str, Any]:
        """The line, parsed. Raises DataError when too long or no object, ValueError or RecursionError when not JSON."""
        start, end = self._starts[index], self._ends[index]
        self._bounds.check_row(end - start)
        row = json.loads(self._content[start:end], parse_constant=no_constant)
        if isinstance(row, dict):
            return row
        raise DataError(f"must be a JSON object, not {type(row).__name__}")
