"""Snapshot of a policy's weights at one version, as plain bytes with digests: the learner publishes it, a rollout server stages it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.weights.dtypes import ITEM_BYTES, WEIGHTS

UInt8Array = npt.NDArray[np.uint8]

DIGEST_BYTES = 16


class PolicyVersion(NamedTuple):
    """A version of a job's policy; later ones compare greater."""

    lineage: int
    """Rises when the learner restarts with an older version than it had published."""
    n: int
    """Optimizer steps."""

    def __str__(self) -> str:
        return f"({self.lineage}, {self.n})"

    @classmethod
    def of(cls, message: pb.Version) -> Self:
        """From the wire."""
        return cls(message.lineage, message.n)

    def message(self) -> pb.Version:
        """For the wire."""
        return pb.Version(lineage=self.lineage, n=self.n)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its bytes.

    Example: TensorSpec("model.norm.weight", "bfloat16", (576,), 1152, digest=b"…16 bytes…")
    """

    name: str
    """Hugging Face name."""
    dtype: str
    """One of WEIGHTS."""
    shape: tuple[int, ...]
    nbytes: int
    """Plain bytes: the product of the shape times the element's size."""
    digest: bytes
    """xxh3-128 of the plain bytes (little-endian, contiguous)."""

    def __post_init__(self) -> None:
        """Raises WeightSyncError, which names the tensor, unless the size follows from dtype and shape."""
        if not self.name or self.name == "__metadata__":
            raise WeightSyncError(f"tensor name {self.name!r} is not allowed")
        expected = plain_bytes(self.name, self.dtype, self.shape)
        if self.nbytes != expected:
            raise WeightSyncError(f"{self.name}: {self.nbytes} bytes, but {self.dtype} {self.shape} takes {expected}")
        if len(self.digest) != DIGEST_BYTES:
            raise WeightSyncError(f"{self.name}: a digest of {len(self.digest)} bytes instead of {DIGEST_BYTES}")

    def same_layout(self, other: TensorSpec) -> bool:
        """Whether both have the same name, dtype and shape; only the values may differ."""
        return (self.name, self.dtype, self.shape) == (other.name, other.dtype, other.shape)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All weights of one policy version in host memory; the arrays are read-only, and nothing else changes their bytes."""

    lineage: int
    n: int
    """The policy version within the lineage."""
    tensors: tuple[TensorSpec, ...]
    data: tuple[UInt8Array, ...] = field(repr=False)
    """Plain bytes of each tensor, uint8 [nbytes], in the order of `tensors`."""
    digest: bytes
    """Identifies the snapshot: see `manifest_digest`."""
    path: Path | None = None
    """The file that `data` is mapped from; a server on the same host may take it as it is."""

    @classmethod
    def build(cls, lineage: int, n: int, tensors: Mapping[str, tuple[str, tuple[int, ...], UInt8Array]]) -> Self:
        """Copies and hashes name → (dtype, shape, bytes); the caller may overwrite its arrays afterwards.

        Raises:
            WeightSyncError: a dtype that is not in WEIGHTS, or bytes that do not fit dtype and shape; names the tensor.
        """
        if not tensors:
            raise WeightSyncError("a snapshot needs at least one tensor")
        specs, copies = [], []
        for name, (dtype, shape, source) in tensors.items():
            if source.dtype != np.uint8:
                raise WeightSyncError(f"{name}: bytes must be a uint8 array, not {source.dtype}")
            copy = np.array(source, order="C", copy=True).reshape(-1)
            copy.flags.writeable = False
            specs.append(TensorSpec(name, dtype, tuple(int(size) for size in shape), copy.nbytes, digest_of(copy)))
            copies.append(copy)
        return cls(lineage, n, tuple(specs), tuple(copies), manifest_digest(specs))

    @property
    def version(self) -> PolicyVersion:
        """Lineage and number of the policy version."""
        return PolicyVersion(self.lineage, self.n)

    @property
    def total_bytes(self) -> int:
        """Plain bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors)

    def verify(self) -> None:
        """Compares all bytes with their digests. Raises WeightSyncError, which names the first tensor that differs."""
        for spec, data in zip(self.tensors, self.data, strict=True):
            if digest_of(data) != spec.digest:
                raise WeightSyncError(f"{spec.name}: the bytes do not match their digest")
        if manifest_digest(self.tensors) != self.digest:
            raise WeightSyncError(f"version {self.version}: the tensors do not match the manifest's digest")


def plain_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this dtype and shape. Raises WeightSyncError when the dtype is not in WEIGHTS or a size is negative."""
    if dtype not in WEIGHTS:
        raise WeightSyncError(f"{name}: dtype {dtype!r} does not travel (known: {', '.join(WEIGHTS)})")
    if any(size < 0 for size in shape):
        raise WeightSyncError(f"{name}: negative size in shape {shape}")
    return math.prod(shape) * ITEM_BYTES[dtype]


def digest_of(data: UInt8Array) -> bytes:
    """xxh3-128 of the bytes, uint8 [nbytes]."""
    return xxhash.xxh3_128_digest(data.data)


def chunk_checksum(data: bytes | memoryview) -> int:
    """xxh3-64 of a chunk on the wire."""
    return xxhash.xxh3_64_intdigest(data)


def manifest_digest(specs: Iterable[TensorSpec]) -> bytes:
    """xxh3-128 over all names, dtypes, shapes and digests, in order; every field is length-prefixed, so that fields cannot run together."""
    state = xxhash.xxh3_128()
    for spec in specs:
        name, dtype = spec.name.encode(), spec.dtype.encode()
        state.update(struct.pack("<II", len(name), len(dtype)) + name + dtype)
        state.update(struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape) + spec.digest)
    return state.digest()
