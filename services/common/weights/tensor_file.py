"""Tensor file in the safetensors format: 8 bytes of header length, a JSON header, the tensors' bytes.

The safetensors library is not used: here the file is filled while the bytes arrive, without a second copy in memory.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.common.errors import WeightSyncError
from services.common.weights.dtypes import ITEM_BYTES, SAFETENSORS, TORCH
from services.common.weights.snapshot import (
    PolicyVersion,
    Snapshot,
    TensorSpec,
    UInt8Array,
    digest_of,
    manifest_digest,
)

_ALIGN = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a file."""

    header: bytes
    """Length field and padded JSON: the beginning of the file."""
    offsets: dict[str, int]
    """Tensor name → position in the file, in the order of the file."""
    total_bytes: int


def layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> Layout:
    """Lays tensors (name, dtype, shape) out, widest dtype first: each begins at a multiple of its element's size.

    Raises:
        WeightSyncError: a name occurs twice.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    position = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor[1]]):
        if name in starts:
            raise WeightSyncError(f"{name}: the name occurs twice")
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [position, end]}
        starts[name], position = position, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    header = struct.pack("<Q", len(text)) + text
    return Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + position)


def map_tensors(path: Path) -> dict[str, UInt8Array]:
    """The plain bytes of each tensor, mapped read-only, uint8 [nbytes]. Raises WeightSyncError when the file is missing or incomplete."""
    return {name: data for name, (_, _, data) in _map(path).items()}


def map_snapshot(path: Path, version: PolicyVersion) -> Snapshot:
    """The file as a snapshot, in the file's order: mapped, not copied, and hashed here. Raises WeightSyncError as `map_tensors`."""
    tensors = _map(path)
    with ThreadPoolExecutor(
        min(len(tensors), os.cpu_count() or 1) or 1
    ) as threads:  # hashing releases the interpreter's lock
        digests = list(threads.map(digest_of, (data for _, _, data in tensors.values())))
    specs = tuple(
        TensorSpec(name, dtype, shape, data.nbytes, digest)
        for (name, (dtype, shape, data)), digest in zip(tensors.items(), digests, strict=True)
    )
    data = tuple(data for _, _, data in tensors.values())
    return Snapshot(*version, specs, data, manifest_digest(specs), path)


def verify_file(path: Path, specs: Sequence[TensorSpec]) -> None:
    """Compares a file with the tensors that it must hold, byte for byte by their digests.

    Raises:
        WeightSyncError: it is not whole, or holds other tensors; names the first one that differs.
    """
    found = _map(path)
    if odd := sorted(found.keys() ^ {spec.name for spec in specs}):
        raise WeightSyncError(f"{path}: {len(odd)} tensors are not in both file and manifest: {', '.join(odd[:5])}")
    for spec in specs:
        dtype, shape, data = found[spec.name]
        if (dtype, shape, digest_of(data)) != (spec.dtype, spec.shape, spec.digest):
            raise WeightSyncError(f"{spec.name}: the file does not hold what the manifest says")


def _map(path: Path) -> dict[str, tuple[str, tuple[int, ...], UInt8Array]]:
    """Name → dtype, shape and mapped bytes, in the file's order."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        length = int(data[:8].view("<u8")[0])
        entries = json.loads(bytes(data[8 : 8 + length]))
        entries.pop("__metadata__", None)
        spans = {name: entry["data_offsets"] for name, entry in entries.items()}
        kinds = {name: (TORCH[entry["dtype"]], tuple(map(int, entry["shape"]))) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"{path} is not a whole safetensors file: {error}") from error
    if max((end for _, end in spans.values()), default=0) + 8 + length != data.size:
        raise WeightSyncError(f"{path}: the header does not account for its {data.size} bytes")
    return {
        name: (*kinds[name], np.asarray(data[8 + length + begin : 8 + length + end]))
        for name, (begin, end) in spans.items()
    }
