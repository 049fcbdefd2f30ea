"""Row groups of a parquet file, read at random within bounded memory.

A row group is the smallest part of a parquet file that can be unpacked on its own. Of one that is unpacked, the rows that are read soon
are kept: of a small file all rows, else those among the next WINDOW_ROWS that `expect` named (by default those that follow in the file).

index ──► row group ──► kept rows? ──► row
                          │ no: the row group is unpacked, BATCH_ROWS at a time, and its expected rows are kept (least recently used out)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import DataError

BATCH_ROWS = 64
"""Unpacked at once; a few bytes of a dictionary may expand to megabytes in each row."""
READ_AHEAD_BYTES = 256 * 1024
"""Read at once of a column of a row group, which may be larger than the memory."""
KEPT_BYTES = 96 * 1024 * 1024
"""Memory of all kept rows; only the last row group's may exceed it, by one row."""
WINDOW_ROWS = 65_536

Batches = Callable[[Sequence[int]], Iterator[Any]]
"""Record batches of row groups, in order."""


class RowGroups:
    """The rows of a file by index."""

    def __init__(self, sizes: Sequence[int], unpacked_bytes: int, batches: Batches) -> None:
        """`sizes`: rows of each row group; `unpacked_bytes`: of the whole file, an estimate."""
        self._starts = np.concatenate(([0], np.cumsum(np.asarray(sizes, np.int64), dtype=np.int64)))
        self._batches = batches
        self._is_small = unpacked_bytes <= KEPT_BYTES // 2
        mean = max(1, unpacked_bytes // max(1, self.rows))
        self._window = max(1, min(WINDOW_ROWS, KEPT_BYTES // 2 // mean))
        self._expected: Sequence[int] | None = None
        self._kept: OrderedDict[int, tuple[npt.NDArray[np.int64], Any]] = OrderedDict()
        self._kept_bytes = 0

    @property
    def count(self) -> int:
        """Row groups."""
        return len(self._starts) - 1

    @property
    def rows(self) -> int:
        """Rows of all row groups."""
        return int(self._starts[-1])

    def expect(self, indices: Sequence[int]) -> None:
        """Names the rows that are read next, in their order."""
        self._expected = indices[: self._window]

    def find(self, index: int) -> tuple[Any, int]:
        """A table with the row of this index, 0 ≤ index < rows, and the row's place in it. Raises DataError for a bad file."""
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        if (at := self._place(group, index)) is None:
            self._unpack(group, index)
            at = self._place(group, index)
        if at is None:
            raise DataError(f"is not a readable parquet file: row group {group} ends before row {index + 1}")
        self._kept.move_to_end(group)
        return self._kept[group][1], at

    def _place(self, group: int, index: int) -> int | None:
        if group not in self._kept:
            return None
        rows = self._kept[group][0]
        at = int(np.searchsorted(rows, index))
        return at if at < len(rows) and rows[at] == index else None

    def _unpack(self, group: int, index: int) -> None:
        """Unpacks a row group; keeps its wanted rows, this one in any case."""
        import pyarrow as pa

        wanted = self._wanted(group, index)
        kept: list[npt.NDArray[np.int64]] = []
        parts: list[Any] = []
        start, size = int(self._starts[group]), 0
        for batch in self._batches([group]):
            low, high = np.searchsorted(wanted, (start, start + batch.num_rows))
            rows = wanted[low:high] if size < KEPT_BYTES // 2 else wanted[low:high][wanted[low:high] == index]
            if len(rows):
                part = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows - start))
                kept.append(rows)
                parts.append(part)
                size += part.nbytes
            start += batch.num_rows
            if start > wanted[-1] or (size >= KEPT_BYTES // 2 and start > index):
                break
        self._forget(group)
        if parts:
            self._keep(group, np.concatenate(kept), pa.Table.from_batches(parts).combine_chunks())

    def _wanted(self, group: int, index: int) -> npt.NDArray[np.int64]:
        """Sorted indices of the row group's rows that are kept."""
        begin, end = int(self._starts[group]), int(self._starts[group + 1])
        if self._is_small:
            return np.arange(begin, end)
        if self._expected is None:
            return np.arange(index, min(index + self._window, end))
        expected = np.asarray(self._expected, np.int64)
        here = expected[(expected >= begin) & (expected < end)]
        return np.union1d(here, np.array([index], np.int64))

    def _keep(self, group: int, rows: npt.NDArray[np.int64], table: Any) -> None:  # noqa: ANN401  pyarrow is untyped
        self._kept[group] = rows, table
        self._kept_bytes += table.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))

    def _forget(self, group: int) -> None:
        if group in self._kept:
            self._kept_bytes -= self._kept.pop(group)[1].nbytes
