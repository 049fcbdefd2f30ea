"""The safetensors file format: 8 bytes of header length, a JSON header, the tensors' bytes.

Written here rather than with the safetensors library because the file is filled while the bytes arrive, without a second copy in memory.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.common.errors import WeightSyncError
from services.common.weights.snapshot import ITEM_BYTES, TensorSpec, UInt8Array

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGN = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies in the file."""

    header: bytes
    """Length field and padded JSON: what the file begins with."""
    offsets: dict[str, int]
    """Tensor name → position in the file."""
    total_bytes: int
    """Size of the file."""


def layout(specs: Sequence[TensorSpec], metadata: dict[str, str]) -> Layout:
    """Lays the tensors out, widest dtype first so that each begins at a multiple of its element's size, and makes the header.

    Raises:
        WeightSyncError: a name occurs twice.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]):
        if spec.name in starts:
            raise WeightSyncError(f"{spec.name}: the name occurs twice")
        starts[spec.name] = position
        entries[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    header = struct.pack("<Q", len(text)) + text
    return Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + position)


def map_tensors(path: Path) -> dict[str, UInt8Array]:
    """The plain bytes of each tensor of a safetensors file, mapped read-only, uint8 [nbytes].

    Raises:
        WeightSyncError: the file is missing, or is not whole.
    """
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
