"""The journal: a write-ahead log of batches. A step trains only what has been written here and fsynced.

    file    = segment-<first step>.wal          record = magic | length | xxh3-64 of the payload | xxh3-64 of the header | zstd(MessagePack)

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
_SEAL = struct.Struct("<Q")
_PREFIX_BYTES = _HEADER.size + _SEAL.size
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
        header = _HEADER.pack(_MAGIC, len(payload), xxhash.xxh3_64_intdigest(payload))
        data = header + _SEAL.pack(xxhash.xxh3_64_intdigest(header)) + payload
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
    document = {
        "step": record.step,
        "lineage": record.lineage,
        "groups": record.groups,
        "settled": settled,
        "issued": record.issued,
    }
    return bytes(msgpack.packb(document))


def _unpack(payload: bytes) -> BatchRecord:
    raw = zstandard.ZstdDecompressor().decompress(payload, max_output_size=_MAX_RECORD_BYTES)
    document = msgpack.unpackb(raw, max_bin_len=_MAX_RECORD_BYTES, max_array_len=10_000_000)
    settled = tuple(Settled(group_id, Fate(fate), reason) for group_id, fate, reason in document["settled"])
    return BatchRecord(document["step"], document["lineage"], tuple(document["groups"]), settled, document["issued"])


def _scan(segment: Path, *, torn_tail_allowed: bool) -> Iterator[tuple[int, bytes | None]]:
    """(offset, payload) of each record; payload None for a last record that was never finished.

    Raises:
        JournalError: anything else that is no whole, sound record.
    """
    data = segment.read_bytes()
    offset = 0
    while offset < len(data):
        prefix = data[offset : offset + _PREFIX_BYTES]
        sealed = len(prefix) == _PREFIX_BYTES and _SEAL.unpack_from(prefix, _HEADER.size)[
            0
        ] == xxhash.xxh3_64_intdigest(prefix[: _HEADER.size])
        magic, length, checksum = _HEADER.unpack_from(prefix) if sealed else (b"", 0, 0)
        payload = data[offset + _PREFIX_BYTES : offset + _PREFIX_BYTES + length]
        if sealed and magic == _MAGIC and len(payload) == length and xxhash.xxh3_64_intdigest(payload) == checksum:
            yield offset, payload
            offset += _PREFIX_BYTES + length
            continue
        torn = len(prefix) < _PREFIX_BYTES or (sealed and len(payload) < length)
        if not (torn and torn_tail_allowed):
            raise JournalError(f"{segment}: the record at byte {offset} is damaged")
        yield offset, None
        return


def _read_segment(segment: Path, *, last: bool) -> Iterator[BatchRecord]:
    for _, payload in _scan(segment, torn_tail_allowed=last):
        if payload is not None:
            yield _unpack(payload)


def _cut_torn_tail(segment: Path) -> None:
    for offset, payload in _scan(segment, torn_tail_allowed=True):
        if payload is None:
            with segment.open("r+b") as file:
                file.truncate(offset)
                os.fsync(file.fileno())
