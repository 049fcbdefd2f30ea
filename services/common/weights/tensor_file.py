"""Tensor file in the safetensors format: 8 bytes of header length, a JSON header, the tensors' bytes.

The safetensors library is not used: here the file is filled while the bytes arrive, without a second copy in memory.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from services.common.errors import WeightSyncError
from services.common.weights.dtypes import ITEM_BYTES, SAFETENSORS
from services.common.weights.snapshot import UInt8Array

_ALIGN = 8


class TensorShape(Protocol):
    """Header fields of a tensor: `TensorSpec`, or any tuple of these names."""

    @property
    def name(self) -> str:
        """Unique in the file."""

    @property
    def dtype(self) -> str:
        """A key of ITEM_BYTES."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def nbytes(self) -> int:
        """Its plain bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a file."""

    header: bytes
    """Length field and padded JSON: the beginning of the file."""
    offsets: dict[str, int]
    """Tensor name → position in the file, in the order of the file."""
    total_bytes: int
    """Size of the file."""


def layout(tensors: Iterable[TensorShape], metadata: dict[str, str]) -> Layout:
    """Lays the tensors out, widest dtype first so that each begins at a multiple of its element's size, and makes the header.

    Raises:
        WeightSyncError: a name occurs twice.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    position = 0
    for tensor in sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype]):
        if tensor.name in starts:
            raise WeightSyncError(f"{tensor.name}: the name occurs twice")
        starts[tensor.name] = position
        entries[tensor.name] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    header = struct.pack("<Q", len(text)) + text
    return Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + position)


def map_tensors(path: Path) -> dict[str, UInt8Array]:
    """The plain bytes of each tensor, mapped read-only, uint8 [nbytes]. Raises WeightSyncError when the file is missing or incomplete."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        length = int(data[:8].view("<u8")[0])
        entries = json.loads(bytes(data[8 : 8 + length]))
        entries.pop("__metadata__", None)
        spans = {name: entry["data_offsets"] for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"{path} is not a whole safetensors file: {error}") from error
    if max((end for _, end in spans.values()), default=0) + 8 + length != data.size:
        raise WeightSyncError(f"{path}: the header does not account for its {data.size} bytes")
    return {name: np.asarray(data[8 + length + begin : 8 + length + end]) for name, (begin, end) in spans.items()}
