"""Writes safetensors files piece by piece: durable and hashed on return, and other threads compute meanwhile.

The library's own writer first copies every tensor into a Python object under the interpreter's lock.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash

from services.common.checkpoints.manifest import WrittenFile

PIECE_BYTES = 8 << 20
_ALIGN = 8

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(root: Path, name: str, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> WrittenFile:
    """Writes `root/name`; the tensors are contiguous and on the CPU.

    Raises:
        OSError: it could not be written, for want of space perhaps.
    """
    # widest elements first, so that each begins at a multiple of its element's size
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    entries: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for key, tensor in ordered:
        end = position + tensor.nbytes
        entries[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    digest = xxhash.xxh3_128()
    with (root / name).open("wb", buffering=0) as file:
        for data in (struct.pack("<Q", len(text)) + text, *(_bytes_of(tensor) for _, tensor in ordered)):
            for start in range(0, len(data), PIECE_BYTES):
                piece = memoryview(data)[start : start + PIECE_BYTES]
                digest.update(piece)
                while piece:
                    piece = piece[file.write(piece) or 0 :]
        os.fsync(file.fileno())
        return WrittenFile(name, file.tell(), digest.hexdigest())


def _bytes_of(tensor: torch.Tensor) -> memoryview | bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
