"""Tensors as bytes: snapshots to publish, and safetensors files, durable and hashed on return, while other threads compute.

The library's own writer first copies every tensor into a Python object, under the global interpreter lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

import torch
import xxhash

from services.common.checkpoints.manifest import WrittenFile
from services.common.errors import WeightSyncError
from services.common.weights.snapshot import Snapshot, plain_bytes
from services.common.weights.tensor_file import Layout, layout

PIECE_BYTES = 8 << 20


def dtype_name(dtype: torch.dtype) -> str:
    """The name as in `services.common.weights.dtypes`: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def write_tensors(root: Path, name: str, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> WrittenFile:
    """Writes `root/name`; the tensors are contiguous and on the CPU.

    Raises:
        OSError: it could not be written, perhaps for lack of space.
    """
    entries = [(key, dtype_name(t.dtype), tuple(t.shape)) for key, t in sorted(tensors.items())]
    plan = layout(entries, metadata)
    digest = xxhash.xxh3_128()
    with (root / name).open("wb", buffering=0) as file:
        for piece in _pieces(plan, tensors):
            digest.update(piece)
            _write(file, piece)
        os.fsync(file.fileno())
        return WrittenFile(name, file.tell(), digest.hexdigest())


def write_version(path: Path, lineage: int, n: int, weights: Weights) -> None:
    """Writes a policy version's safetensors file into host memory, with the tensors in their order.

    Raises:
        WeightSyncError: there is no room, or a tensor is neither float32, bfloat16 nor float16; names the directory or the tensor.
    """
    for name, tensor in weights.items():
        plain_bytes(name, dtype_name(tensor.dtype), tuple(tensor.shape))
    entries = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in weights.items()]
    plan = layout(entries, {"lineage": str(lineage), "policy_version": str(n)})
    try:
        with path.open("xb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, plan.total_bytes)  # no room is an error here, not a broken file later
            for piece in _pieces(plan, weights):
                _write(file, piece)
    except OSError as error:
        raise WeightSyncError(f"no room for {plan.total_bytes} bytes in {path.parent}: {error.strerror}") from error


def _pieces(plan: Layout, tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The file's bytes from its beginning."""
    for data in (plan.header, *(_bytes_of(tensors[key]) for key in plan.offsets)):
        for start in range(0, len(data), PIECE_BYTES):
            yield memoryview(data)[start : start + PIECE_BYTES]


def _write(file: FileIO, piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) or 0 :]


def _bytes_of(tensor: torch.Tensor) -> memoryview | bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


Weights = dict[str, torch.Tensor]
"""Hugging Face name → tensor on the CPU."""


def make_snapshot(lineage: int, policy_version: int, weights: Weights) -> Snapshot:
    """The weights as a snapshot; copies the bytes, so that training may continue.

    Raises:
        WeightSyncError: a tensor is neither float32, bfloat16 nor float16.
    """
    data = {
        name: (dtype_name(t.dtype), tuple(t.shape), t.detach().contiguous().view(-1).view(torch.uint8).numpy())
        for name, t in weights.items()
    }
    return Snapshot.build(lineage, policy_version, data)
