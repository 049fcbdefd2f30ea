"""Transfer of one snapshot: takes the manifest and the chunks, in order, and verifies all of it before it becomes visible.

chunk ── offset? xxh3-64? ──► tensor's bytes (plain, or base ⊕ delta) ── xxh3-128? ──► unfinished file ──► commit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import numpy as np
import xxhash

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.weight_sync.staging import Stage, StagedWeights
from services.common.weights import delta, snapshot
from services.common.weights.snapshot import PolicyVersion, TensorSpec, UInt8Array


class BrokenStream(WeightSyncError):  # noqa: N818  an event that a retry repairs
    """The stream failed after good bytes: another call from `Transfer.received` on can repair it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked manifest."""

    version: PolicyVersion
    base: PolicyVersion | None
    """Base of the delta; None when the tensors are sent in full."""
    specs: tuple[TensorSpec, ...]
    wire_sizes: tuple[int, ...]
    """Bytes of each tensor on the wire."""
    digest: bytes


def read_manifest(manifest: pb.Manifest, version: PolicyVersion, base: PolicyVersion | None) -> Plan:
    """Checks that the manifest is complete and the one that was requested.

    Raises:
        WeightSyncError: another version, another base, a broken digest, or impossible sizes; names the tensor, if one is the cause.
    """
    received = PolicyVersion.of(manifest.version)
    if received != version:
        raise WeightSyncError(f"asked for version {version}, the manifest is of {received}")
    if manifest.encoding not in {pb.ENCODING_FULL, pb.ENCODING_XOR_ZSTD}:
        raise WeightSyncError(f"version {version}: unknown encoding {manifest.encoding}")
    is_delta = manifest.encoding == pb.ENCODING_XOR_ZSTD
    from_base = PolicyVersion.of(manifest.base) if is_delta else None
    if is_delta and from_base != base:
        raise WeightSyncError(f"version {version}: the delta is from {from_base}, not from {base}")
    specs = []
    for tensor in manifest.tensors:
        name, dtype, shape = tensor.name, tensor.dtype, tuple(tensor.shape)
        spec = TensorSpec(name, dtype, shape, snapshot.plain_bytes(name, dtype, shape), tensor.digest)
        if tensor.wire_bytes > delta.largest_delta(spec.nbytes) if is_delta else tensor.wire_bytes != spec.nbytes:
            raise WeightSyncError(f"{spec.name}: {tensor.wire_bytes} bytes on the wire for {spec.nbytes}")
        specs.append(spec)
    if not specs or snapshot.manifest_digest(specs) != manifest.digest:
        raise WeightSyncError(f"version {version}: the manifest does not match its digest")
    return Plan(version, from_base, tuple(specs), tuple(t.wire_bytes for t in manifest.tensors), manifest.digest)


class Transfer:
    """Takes chunks; holds one chunk, or for a delta one tensor, in memory."""

    def __init__(self, plan: Plan, stage: Stage, base: Mapping[str, UInt8Array]) -> None:
        """Reserves the room in the stage. `base`: plain bytes of the tensors of a delta's base.

        Raises:
            WeightSyncError: no room, or the base lacks a tensor or has it in another size.
        """
        self.plan = plan
        self.received = 0
        """Good payload bytes so far: the offset to resume from."""
        self._base = base
        self._wire_bytes = sum(plan.wire_sizes)
        if plan.base is not None:
            for spec in plan.specs:
                if spec.name not in base or base[spec.name].nbytes != spec.nbytes:
                    raise WeightSyncError(f"{spec.name}: the base {plan.base} does not hold it in this size")
        self._writer = stage.begin(*plan.version, plan.specs)
        self._tensor = 0
        self._start_tensor()
        self._skip_empty()

    @property
    def complete(self) -> bool:
        """Whether every tensor is there and verified."""
        return self._tensor == len(self.plan.specs)

    def accept(self, offset: int, data: bytes, checksum: int) -> None:
        """Takes the next chunk.

        Raises:
            BrokenStream: not the next bytes, or not the bytes that were sent; nothing of the chunk was taken.
            WeightSyncError: the bytes arrived as sent, but are wrong; names the tensor. The transfer cannot go on.
        """
        if offset != self.received:
            raise BrokenStream(f"a chunk at offset {offset} came where {self.received} was next")
        if not data or snapshot.chunk_checksum(data) != checksum:
            raise BrokenStream(f"the chunk at offset {offset} does not match its checksum")
        if offset + len(data) > self._wire_bytes:
            raise BrokenStream(f"the chunk at offset {offset} goes beyond the end")
        view = memoryview(data)
        while view:
            taken = self._take(view)
            view = view[taken:]
            self.received += taken

    def commit(self, *, fetch_s: float, wire_bytes: int) -> StagedWeights:
        """Makes the version visible in the stage. Raises BrokenStream, which names the first tensor that is missing."""
        if not self.complete:
            raise BrokenStream(f"the stream ended at offset {self.received}, in {self.plan.specs[self._tensor].name}")
        return self._writer.commit(fetch_s=fetch_s, wire_bytes=wire_bytes)

    def discard(self) -> None:
        """Removes what has arrived, unless it was committed."""
        self._writer.discard()

    def _start_tensor(self) -> None:
        self._got = 0
        self._hash = xxhash.xxh3_128()
        self._delta = bytearray()

    def _skip_empty(self) -> None:
        while not self.complete and self.plan.wire_sizes[self._tensor] == 0:
            self._end_tensor()

    def _take(self, view: memoryview) -> int:
        """Takes the bytes of the current tensor; returns their number."""
        spec, size = self.plan.specs[self._tensor], self.plan.wire_sizes[self._tensor]
        part = view[: size - self._got]
        if self.plan.base is None:
            self._hash.update(part)
            self._writer.write(spec.name, self._got, part)
        else:
            self._delta += part
        self._got += len(part)
        if self._got == size:
            self._end_tensor()
            self._skip_empty()
        return len(part)

    def _end_tensor(self) -> None:
        spec = self.plan.specs[self._tensor]
        if self.plan.base is None:
            digest = self._hash.digest()
        else:
            try:
                plain = delta.decode(self._delta, self._base[spec.name])
            except WeightSyncError as error:
                raise WeightSyncError(f"{spec.name}: {error}") from error
            digest = snapshot.digest_of(plain)
            self._writer.write(spec.name, 0, np.ascontiguousarray(plain).data)
        if digest != spec.digest:
            raise WeightSyncError(f"{spec.name}: the bytes do not match their digest (offset {self.received})")
        self._tensor += 1
        self._start_tensor()


PERMANENT_STATUSES = frozenset({
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED,
})  # fmt: skip
"""Statuses that a retry does not change."""


def describe(error: grpc.RpcError) -> str:
    """Status and details of an error: `UNAVAILABLE: failed to connect …`."""
    code, details = error.code(), error.details()
    return f"{code.name}: {details}" if code is not None else str(error)
