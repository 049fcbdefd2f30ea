"""The journal: a write-ahead log of batches. A step trains only what has been written here and fsynced.

    file    = segment-<first step>.wal          record = magic | length | xxh3-64 | zstd(MessagePack)

A torn record at the very end is what a crash leaves: it is cut off when the journal is opened for writing. Anything else that does not
verify is damage, and is reported with file and offset.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack
import xxhash
import zstandard

from services.common.errors import MillraceError
from services.learner.ledger import Fate, Settled

_HEADER = struct.Struct("<4sQQ")
_MAGIC = b"MRJ1"
_MAX_RECORD_BYTES = 4 * 1024**3
SEGMENT_BYTES = 256 * 1024**2
"""A new segment is begun beyond this size."""


class JournalError(MillraceError):
    """A journal file is damaged; names the file and the offset."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What one step trains, in order, and the fates decided since the record before."""

    step: int
    lineage: int
    groups: tuple[bytes, ...]
    """Encoded ScoredGroups, in the order in which they are trained."""
    settled: tuple[Settled, ...]
    issued: int
    """Ordinals issued by then."""


class Journal:
    """Append-only, one writer."""

    def __init__(self, root: Path) -> None:
        """Opens (and makes) the directory; nothing is written before `append`."""
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._segment: Path | None = None

    def append(self, record: BatchRecord) -> int:
        """Writes a record durably; returns its size in bytes. When this returns, the batch may be trained and its entries acked."""
        payload = zstandard.compress(_pack(record), 3)
        data = _HEADER.pack(_MAGIC, len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        segment = self._open_segment(record.step)
        new = not segment.exists()
        with segment.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            fsync_directory(self._root)
        return len(data)

    def records(self, after_step: int = 0) -> Iterator[BatchRecord]:
        """Records of the steps after `after_step`, in order.

        Raises:
            JournalError: a record before the end does not verify, or a step is missing.
        """
        expected: int | None = None
        segments = self._segments()
        for segment in segments:
            for record in _read_segment(segment, last=segment == segments[-1]):
                if expected is not None and record.step != expected:
                    raise JournalError(f"{segment}: step {record.step} follows step {expected - 1}")
                expected = record.step + 1
                if record.step > after_step:
                    yield record

    def _segments(self) -> list[Path]:
        return sorted(self._root.glob("segment-*.wal"))

    def _open_segment(self, step: int) -> Path:
        if self._segment is None:
            segments = self._segments()
            if segments:
                _cut_torn_tail(segments[-1])
                self._segment = segments[-1]
        if self._segment is None or (self._segment.exists() and self._segment.stat().st_size > SEGMENT_BYTES):
            self._segment = self._root / f"segment-{step:010d}.wal"
        return self._segment


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pack(record: BatchRecord) -> bytes:
    settled = [(item.group_id, item.fate.value, item.reason) for item in record.settled]
    document = {"step": record.step, "lineage": record.lineage, "groups": record.groups, "settled": settled, "issued": record.issued}
    return bytes(msgpack.packb(document))


def _unpack(payload: bytes) -> BatchRecord:
    raw = zstandard.ZstdDecompressor().decompress(payload, max_output_size=_MAX_RECORD_BYTES)
    document = msgpack.unpackb(raw, max_bin_len=_MAX_RECORD_BYTES, max_array_len=10_000_000)
    settled = tuple(Settled(group_id, Fate(fate), reason) for group_id, fate, reason in document["settled"])
    return BatchRecord(document["step"], document["lineage"], tuple(document["groups"]), settled, document["issued"])


def _scan(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """(offset, payload) of each record; payload None where the bytes from the offset on are no whole, sound record."""
    offset = 0
    while offset < len(data):
        if len(data) - offset < _HEADER.size:
            yield offset, None
            return
        magic, length, checksum = _HEADER.unpack_from(data, offset)
        payload = data[offset + _HEADER.size : offset + _HEADER.size + length]
        if magic != _MAGIC or len(payload) != length or xxhash.xxh3_64_intdigest(payload) != checksum:
            yield offset, None
            return
        yield offset, payload
        offset += _HEADER.size + length


def _is_torn(data: bytes, offset: int) -> bool:
    """Whether the bytes from `offset` on are the beginning of a record that was never finished."""
    if len(data) - offset < _HEADER.size:
        return _MAGIC.startswith(data[offset : offset + len(_MAGIC)])
    magic, length, _ = _HEADER.unpack_from(data, offset)
    return magic == _MAGIC and offset + _HEADER.size + length > len(data)


def _read_segment(segment: Path, *, last: bool) -> Iterator[BatchRecord]:
    data = segment.read_bytes()
    for offset, payload in _scan(data):
        if payload is not None:
            yield _unpack(payload)
        elif not (last and _is_torn(data, offset)):
            raise JournalError(f"{segment}: the record at byte {offset} is damaged")


def _cut_torn_tail(segment: Path) -> None:
    data = segment.read_bytes()
    for offset, payload in _scan(data):
        if payload is not None:
            continue
        if not _is_torn(data, offset):
            raise JournalError(f"{segment}: the record at byte {offset} is damaged")
        with segment.open("r+b") as file:
            file.truncate(offset)
            os.fsync(file.fileno())
