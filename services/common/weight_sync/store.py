"""Store of the versions that a weight server keeps for rollout servers, and of the payloads that it sends.

publish → WeightStore.put ── newest `keep` versions ──► WeightStore.payload(version, base) → Payload.replies
                    └─ wakes ──────────────────► WeightStore.news_after(seen)
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import NamedTuple, Self

from services.common.errors import DeadlineExceeded, WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.weights import delta
from services.common.weights.channel import CHUNK_BYTES
from services.common.weights.snapshot import PolicyVersion, Snapshot, chunk_checksum

_Key = tuple[PolicyVersion, PolicyVersion | None]
"""Version and base of a payload."""


class Payload:
    """Wire form of a snapshot: the manifest, and one piece of bytes per tensor."""

    @classmethod
    def full(cls, snapshot: Snapshot) -> Self:
        """All bytes as they are."""
        return cls(snapshot, None, [data.data for data in snapshot.data])

    def __init__(self, snapshot: Snapshot, base: PolicyVersion | None, pieces: Sequence[bytes | memoryview]) -> None:
        """The full snapshot without a base, otherwise the delta from it."""
        self._pieces = [memoryview(piece) for piece in pieces]
        self._ends = list(accumulate(len(piece) for piece in self._pieces))
        self.wire_bytes = self._ends[-1]
        tensors = [
            pb.Tensor(name=spec.name, dtype=spec.dtype, shape=spec.shape, wire_bytes=len(piece), digest=spec.digest)
            for spec, piece in zip(snapshot.tensors, self._pieces, strict=True)
        ]
        self.manifest = pb.Manifest(
            version=snapshot.version.message(),
            encoding=pb.ENCODING_XOR_ZSTD if base else pb.ENCODING_FULL,
            base=base.message() if base else None,
            tensors=tensors,
            digest=snapshot.digest,
        )

    def replies(self, offset: int) -> Iterator[pb.FetchReply]:
        """The manifest, then the payload from a byte offset on."""
        yield pb.FetchReply(manifest=self.manifest)
        while offset < self.wire_bytes:
            data = self._slice(offset, CHUNK_BYTES)
            reply = pb.FetchReply()
            chunk = reply.chunk  # filled in place: the constructor would copy a chunk
            chunk.offset, chunk.data, chunk.checksum = offset, data, chunk_checksum(data)
            yield reply
            offset += len(data)

    def _slice(self, offset: int, size: int) -> bytes:
        parts = []
        index = bisect.bisect_right(self._ends, offset)
        while size and index < len(self._pieces):
            piece = self._pieces[index]
            start = offset - (self._ends[index] - len(piece))
            part = piece[start : start + size]
            parts.append(part)
            offset, size, index = offset + len(part), size - len(part), index + 1
        return b"".join(parts)


class News(NamedTuple):
    """What servers are told."""

    version: PolicyVersion
    """The newest."""
    turn: int
    """Number of the learner's turn on devices that it shares with the servers; 0 between two of them."""


class WeightStore:
    """The newest versions of one job, and whether it is the learner's turn; thread-safe."""

    def __init__(self, keep: int) -> None:
        self._keep = max(1, keep)
        self._changed = threading.Condition()
        self._kept: OrderedDict[PolicyVersion, Snapshot] = OrderedDict()
        self._payloads: dict[_Key, Future[Payload]] = {}
        self._turns = 0
        self._turn = 0
        self._closed = False

    def begin_turn(self) -> None:
        """Begins a turn of the learner, which the next version ends."""
        with self._changed:
            self._turns += 1
            self._turn = self._turns
            self._changed.notify_all()

    def put(self, snapshot: Snapshot) -> None:
        """Makes the snapshot the current one; removes the oldest beyond `keep`, and every delta that needs it.

        Raises:
            WeightSyncError: the version is not newer than the current one; a version is never used twice.
        """
        with self._changed:
            current = self.current
            if current is not None and snapshot.version <= current.version:
                raise WeightSyncError(f"version {snapshot.version} is not newer than {current.version}")
            self._kept[snapshot.version] = snapshot
            self._turn = 0
            while len(self._kept) > self._keep:
                self._kept.popitem(last=False)
            self._payloads = {
                (version, base): payload
                for (version, base), payload in self._payloads.items()
                if version in self._kept and (base is None or base in self._kept)
            }
            self._changed.notify_all()

    @property
    def current(self) -> Snapshot | None:
        """The newest version, or None before the first."""
        with self._changed:  # a Condition's own lock is reentrant
            return next(reversed(self._kept.values()), None)

    def get(self, version: PolicyVersion) -> Snapshot | None:
        """The version, if it is kept."""
        with self._changed:
            return self._kept.get(version)

    def news_after(self, seen: News | None, timeout_s: float) -> News | None:
        """Waits for a newer version than was seen, or a turn's begin; None after the timeout or `close`."""
        with self._changed:
            if self._news() in {None, seen} and not self._closed:
                self._changed.wait(timeout_s)
            news = self._news()
            return None if self._closed or news == seen else news

    def _news(self) -> News | None:
        current = self.current
        return None if current is None else News(current.version, self._turn)

    @property
    def closed(self) -> bool:
        """Whether the server is stopping."""
        with self._changed:
            return self._closed

    def close(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def payload(self, version: PolicyVersion, base: PolicyVersion | None, timeout_s: float) -> Payload:
        """The payload for a server that requests `version` and has `base`: the delta where that is possible and smaller, else all.

        Each payload is made once, in the thread of the first call, and shared.

        Raises:
            KeyError: the version is not kept.
            DeadlineExceeded: another thread is still encoding it.
        """
        with self._changed:
            snapshot = self._kept[version]
            basis = self._kept.get(base) if base is not None and base != version else None
            if basis is not None and not _same_layout(snapshot, basis):
                basis = None
            key = (version, basis.version if basis is not None else None)
            future = self._payloads.get(key)
            mine = future is None
            if future is None:
                future = self._payloads[key] = Future()
        if mine:
            self._make(key, snapshot, basis, future)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"waited {timeout_s:.0f} s for the delta from {base} to {version}") from error

    def _make(self, key: _Key, snapshot: Snapshot, basis: Snapshot | None, future: Future[Payload]) -> None:
        try:
            future.set_result(_encode(snapshot, basis))
        except BaseException as error:
            future.set_exception(error)  # for the waiting threads; the next call tries again
            with self._changed:
                self._payloads.pop(key, None)
            raise

    def _is_newer(self, version: PolicyVersion | None) -> bool:
        current = self.current
        return current is not None and (version is None or current.version > version)


def _same_layout(snapshot: Snapshot, basis: Snapshot) -> bool:
    pairs = zip(snapshot.tensors, basis.tensors, strict=False)
    return len(snapshot.tensors) == len(basis.tensors) and all(a.same_layout(b) for a, b in pairs)


def _encode(snapshot: Snapshot, basis: Snapshot | None) -> Payload:
    """The delta, or the full payload where the delta is not smaller."""
    if basis is None:
        return Payload.full(snapshot)
    pieces: list[bytes | memoryview] = []
    size = 0
    for data, old in zip(snapshot.data, basis.data, strict=True):
        piece = delta.encode(data, old)
        size += len(piece)
        if size >= snapshot.total_bytes:
            return Payload.full(snapshot)
        pieces.append(piece)
    return Payload(snapshot, basis.version, pieces)
