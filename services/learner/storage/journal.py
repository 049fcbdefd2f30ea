"""Journal: a write-ahead log of batches. A step trains only what has been written here and fsynced.

    file    = segment-<first step>.wal          record = magic | length | xxh3-64 of the payload | xxh3-64 of the header | zstd(MessagePack)

With a key the header of a record also holds a MAC (see `journal_key`); records with and without it are read alike.

A crash may leave a torn record at the very end: it is cut off when the journal is opened for writing. Any other record that does not
verify is damage: it is reported with file and offset, and `cut` moves it and everything after it to `damaged-<n>/`.

Steps are consecutive, except where the lineage rises: lost steps then leave a gap.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import xxhash
import zstandard

from services.common.durable import fsync_directory
from services.common.errors import MillraceError
from services.common.jobs.fates import Fate
from services.common.jobs.history_mark import HistoryMark
from services.learner.groups.ledger import Settled
from services.learner.storage.journal_key import FIRST, ID_BYTES, MAC_BYTES, JournalKey, Mac, Proof, tag_of

_HEADER = struct.Struct("<4sQQ")
_MAC = struct.Struct(f"<{ID_BYTES}s{MAC_BYTES}s{MAC_BYTES}s")
_SEAL = struct.Struct("<Q")
_MAGIC = b"MRJ1"
_MAGIC_WITH_MAC = b"MACJ"
"""Differs in more than one bit from the other, so that no record is mistaken for the torn beginning of one of the other kind."""
_MAX_RECORD_BYTES = 4 * 1024**3
SEGMENT_BYTES = 256 * 1024**2
"""A segment that is larger is followed by a new one."""


class JournalError(MillraceError):
    """A journal file is damaged; names the file and the offset."""

    def __init__(self, segment: Path, offset: int, what: str) -> None:
        """Everything before `offset` in `segment`, and every earlier segment, is sound."""
        super().__init__(f"{segment}: the record at byte {offset} {what}")
        self.segment = segment
        self.offset = offset


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The groups that one step trains, in order, and the fates decided since the previous record."""

    step: int
    lineage: int
    groups: tuple[bytes, ...]
    """Encoded ScoredGroups, in training order. If there are none, nothing was trained, and `step` is the last trained one."""
    settled: tuple[Settled, ...]
    issued: int
    """Ordinals issued so far."""
    weights_digest: str = ""
    """Of the published weights before this step (`Snapshot.digest`, hex): each step is proved by the record after it."""
    history: HistoryMark | None = None
    """Length and digest of the job's history at that time; None in records of earlier releases."""
    proof: Proof = field(default=Proof.CHECKSUM, compare=False)
    """Result of checking its seal when it was read; not part of the record."""

    @property
    def digest(self) -> str:
        """xxh3-128 of the whole record, hex; the step's line in the history contains it."""
        head = [self.step, self.lineage, self.issued, self.weights_digest, _settled(self)]
        found = xxhash.xxh3_128(msgpack.packb(head + ([] if self.history is None else [[*self.history]])))
        for group in self.groups:
            found.update(len(group).to_bytes(8, "little"))
            found.update(group)
        return found.hexdigest()

    @property
    def base_version(self) -> int:
        """The policy version before this record, whose weights `weights_digest` is of."""
        return self.step - bool(self.groups)


class Journal:
    """Append-only; one writer."""

    def __init__(self, root: Path, key: JournalKey | None = None) -> None:
        """Creates the directory; `append` writes first. With a key new records are sealed, and those read are checked against it."""
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._key = key
        self._tag: bytes | None = None
        """`tag_of` the last record; None before it is read."""
        self._segment: Path | None = None
        self.last_step: int | None = None
        """Step of the newest record that `records` has read; None before the first."""
        self.on_append: Callable[[BatchRecord], None] = lambda _: None
        """Called with each record once it is durable."""
        self.guard: Callable[[], None] = lambda: None
        """Called before each write; raises when this process may not write any more."""

    def append(self, record: BatchRecord) -> int:
        """Writes a record durably; returns its size in bytes. On return, the batch may be trained and its entries acked.

        Raises:
            OSError: it could not be written, perhaps for lack of space; no part of it remains, and the call may be repeated.
        """
        self.guard()
        payload = zstandard.compress(_pack(record), 3)
        segment = self._open_segment(record.step)
        mac = None if self._key is None else self._key.seal(self._last_tag(), payload)
        data = _header(payload, mac) + payload
        size = segment.stat().st_size if segment.exists() else None
        self.guard()  # again, immediately before the write
        try:
            with segment.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if size is None:
                fsync_directory(self._root)
        except OSError:
            _cut(segment, size or 0)
            raise
        self._tag = tag_of(mac, payload)
        self.guard()  # the write may have taken long
        self.on_append(record)
        return len(data)

    def records(self, after_step: int | None = None) -> Iterator[BatchRecord]:
        """Records in order, as `located` gives them."""
        return (record for _, record in self.located(after_step))

    def located(self, after_step: int | None = None) -> Iterator[tuple[Path, BatchRecord]]:
        """Records in order, each with its segment: all, or those after a step; then only the segments that contain them are read.

        Records without groups of `after_step` itself are included. They may be older than the state saved at that step; that does no
        harm, as a fate that is already known changes nothing.

        Raises:
            JournalError: a record does not verify, does not follow the previous one, or is not the first one requested.
        """
        segments = self._segments()
        if after_step is not None:
            begun = [path for path in segments if int(path.stem.removeprefix("segment-")) <= after_step + 1]
            segments = segments[max(0, len(begun) - 1) :]
        before: BatchRecord | None = None
        tag = FIRST if segments == self._segments() else None
        for segment in segments:
            for offset, mac, payload in _scan(segment, torn_tail_allowed=segment == segments[-1]):
                if payload is None:
                    break
                record, tag = _unpack(payload, self._prove(mac, payload, tag)), tag_of(mac, payload)
                if before is not None and not _follows(before, record):
                    raise JournalError(segment, offset, f"of step {record.step} follows step {before.step}")
                if after_step is not None and not _reaches(before, record, after_step):
                    gap = f"is of step {record.step}, and step {after_step + 1} is missing"
                    raise JournalError(segment, offset, gap)
                before = record
                self.last_step = record.step
                if after_step is None or record.step > after_step or (record.step == after_step and not record.groups):
                    yield segment, record

    def newest(self) -> BatchRecord | None:
        """The last whole record, of the last segment that has one; None without any. Earlier segments are not read.

        Raises:
            JournalError: something before it in its segment does not verify.
        """
        last = self._last()
        return None if last is None else _unpack(last[1])

    def cut(self, damage: JournalError) -> Path:
        """Moves the damaged record and everything after it to a new directory, which is returned; nothing in it is ever deleted."""
        self.guard()
        segments = self._segments()
        aside = next(path for n in range(1, 1_000_000) if not (path := self._root / f"damaged-{n}").exists())
        aside.mkdir()
        with damage.segment.open("rb") as source, (aside / damage.segment.name).open("wb") as target:
            source.seek(damage.offset)
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
        (aside / "reason.txt").write_text(f"{damage}\n")
        for later in segments[segments.index(damage.segment) + 1 :]:
            later.rename(aside / later.name)
        fsync_directory(aside)
        _cut(damage.segment, damage.offset)
        fsync_directory(self._root)
        self._segment = self._tag = None
        return aside

    def _prove(self, mac: Mac | None, payload: bytes, previous: bytes | None) -> Proof:
        if mac is None:
            return Proof.CHECKSUM
        return Proof.UNREAD if self._key is None else self._key.prove(mac, payload, previous)

    def _last_tag(self) -> bytes:
        if self._tag is None:
            last = self._last()
            self._tag = FIRST if last is None else tag_of(*last)
        return self._tag

    def _last(self) -> tuple[Mac | None, bytes] | None:
        return next((last for segment in reversed(self._segments()) if (last := _last_of(segment)) is not None), None)

    def _segments(self) -> list[Path]:
        return sorted(self._root.glob("segment-*.wal"))

    def _open_segment(self, step: int) -> Path:
        if self._segment is None and (segments := self._segments()):
            for offset, _, payload in _scan(segments[-1], torn_tail_allowed=True):
                if payload is None:
                    _cut(segments[-1], offset)
            self._segment = segments[-1]
        if self._segment is None or (self._segment.exists() and self._segment.stat().st_size > SEGMENT_BYTES):
            self._segment = self._root / f"segment-{step:010d}.wal"
        return self._segment


def _follows(before: BatchRecord, record: BatchRecord) -> bool:
    if not record.groups:
        return record.step == before.step and record.lineage >= before.lineage
    if record.lineage > before.lineage:
        return record.step > before.step
    return record.lineage == before.lineage and record.step == before.step + 1


def _reaches(before: BatchRecord | None, record: BatchRecord, after_step: int) -> bool:
    """Whether no step is missing between `after_step` and this record, wherever the lineage rises."""
    return record.step <= max(after_step, before.step if before is not None else 0) + bool(record.groups)


def _settled(record: BatchRecord) -> list[tuple[int, str, str]]:
    return [(item.group_id, item.fate.value, item.reason) for item in record.settled]


def _pack(record: BatchRecord) -> bytes:
    document = {
        "step": record.step,
        "lineage": record.lineage,
        "groups": record.groups,
        "settled": _settled(record),
        "issued": record.issued,
        "weights_digest": record.weights_digest,
        "history": record.history,
    }
    return bytes(msgpack.packb(document))


def _unpack(payload: bytes, proof: Proof = Proof.CHECKSUM) -> BatchRecord:
    raw = zstandard.ZstdDecompressor().decompress(payload, max_output_size=_MAX_RECORD_BYTES)
    document = msgpack.unpackb(raw, max_bin_len=_MAX_RECORD_BYTES, max_array_len=10_000_000)
    settled = tuple(Settled(group_id, Fate(fate), reason) for group_id, fate, reason in document["settled"])
    history = document.get("history")
    return BatchRecord(
        document["step"], document["lineage"], tuple(document["groups"]), settled, document["issued"],
        document.get("weights_digest", ""), None if history is None else HistoryMark(*history), proof,
    )  # fmt: skip


def _header(payload: bytes, mac: Mac | None) -> bytes:
    magic = _MAGIC if mac is None else _MAGIC_WITH_MAC
    head = _HEADER.pack(magic, len(payload), xxhash.xxh3_64_intdigest(payload))
    head += b"" if mac is None else _MAC.pack(mac.key_id, mac.previous, mac.value)
    return head + _SEAL.pack(xxhash.xxh3_64_intdigest(head))


def _scan(segment: Path, *, torn_tail_allowed: bool) -> Iterator[tuple[int, Mac | None, bytes | None]]:
    """(offset, MAC, payload) of each record; the MAC is None where there is none, the payload for an unfinished last record.

    Raises:
        JournalError: any other record that is not whole and sound.
    """
    data = segment.read_bytes()
    offset = 0
    while offset < len(data):
        with_mac = data.startswith(_MAGIC_WITH_MAC, offset)
        head_bytes = _HEADER.size + (_MAC.size if with_mac else 0)
        start = offset + head_bytes + _SEAL.size
        head, seal = data[offset : offset + head_bytes], data[offset + head_bytes : start]
        sealed = len(seal) == _SEAL.size and _SEAL.unpack(seal)[0] == xxhash.xxh3_64_intdigest(head)
        magic, length, checksum = _HEADER.unpack_from(head) if sealed else (b"", 0, 0)
        payload = data[start : start + length]
        known = magic in {_MAGIC, _MAGIC_WITH_MAC}
        if known and len(payload) == length and xxhash.xxh3_64_intdigest(payload) == checksum:
            yield offset, Mac(*_MAC.unpack_from(head, _HEADER.size)) if with_mac else None, payload
            offset = start + length
            continue
        torn = len(data) < start or (sealed and len(payload) < length)
        if not (torn and torn_tail_allowed):
            raise JournalError(segment, offset, "is damaged")
        yield offset, None, None
        return


def _last_of(segment: Path) -> tuple[Mac | None, bytes] | None:
    """MAC and payload of the segment's last whole record; None without one."""
    last = None
    for _, mac, payload in _scan(segment, torn_tail_allowed=True):
        last = last if payload is None else (mac, payload)
    return last


def _cut(segment: Path, size: int) -> None:
    """Shortens a segment, durably. An empty one is removed, so that the next one is named by its own first step."""
    if not segment.exists():
        return
    with segment.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())
    if size == 0:
        segment.unlink()
