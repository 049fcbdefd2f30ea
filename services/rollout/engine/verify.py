"""Verification of installed weights: sums of bits, of the file before the pause and of the model after it, must be equal.

Engines fuse tensors (q, k, v into one) and may pad them; each part of a fused parameter is compared by itself, so that a part that is
missing, stale or damaged is found. Sums are computed on the device of the weights, at the speed of its memory.

Not covered, and counted as such: parameters that the engine keeps in another layout (the CPU build repacks linear layers; a parameter with
the right elements in another order is counted here too) or spreads over devices. Of those it is only known that the file has the right
bytes: their digests are verified once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import WeightSyncError
from services.common.weights.snapshot import digest_of

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

Facts = dict[str, tuple[str, list[int], int]]
"""Tensor name → dtype, shape and sum of bits in the file, in a form that can be sent to the engine's workers."""


class Expected(NamedTuple):
    """Facts of one tensor of the file."""

    dtype: str
    shape: tuple[int, ...]
    bits: int


class Model(Protocol):
    """The part of vLLM's model that is used here."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Names and values."""


def read_facts(path: Path, digests: Mapping[str, str]) -> Facts:
    """Facts of every tensor in a safetensors file, whose bytes are compared with their digests (xxh3-128, hexadecimal) in the same pass.

    Raises:
        WeightSyncError: it cannot be read, or does not hold what the digests say; names the tensors.
    """
    facts: Facts = {}
    try:
        with safe_open(path, framework="pt") as file:
            if odd := sorted(set(file.keys()) ^ digests.keys()):
                raise WeightSyncError(
                    f"{path}: {len(odd)} tensors are not in both file and manifest: {', '.join(odd[:5])}"
                )
            for name in digests:
                tensor = read_verified(file, digests, name)
                facts[name] = (str(tensor.dtype), list(tensor.shape), bit_sum(tensor))
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path}: cannot be read: {error}") from error
    return facts


def read_verified(file: Any, digests: Mapping[str, str], name: str) -> torch.Tensor:  # noqa: ANN401  an open safetensors file
    """A tensor of the file. Raises WeightSyncError, which names it, when its bytes do not match their digest."""
    tensor: torch.Tensor = file.get_tensor(name)
    if digest_of(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hex() != digests[name]:
        raise WeightSyncError(f"{name}: the bytes do not match their digest")
    return tensor


def bit_sum(tensor: torch.Tensor) -> int:
    """Sum modulo 2⁶⁴ of the tensor's bytes, read as the widest integers that divide their number; computed on the tensor's device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = next(width for width in _WORDS if data.numel() % width == 0)
    if data.storage_offset() % width:
        data = data.clone()
    return int(data.view(_WORDS[width]).sum(dtype=torch.int64))


def check_installed(model: Model, facts: Facts, read: Callable[[str], torch.Tensor]) -> tuple[int, int]:
    """Compares every parameter that can be compared; returns how many those are, and how many there are in all.

    `read`: reads a tensor of the file and verifies its digest. Only the tensors that sums of bits do not prove are read.

    Raises:
        WeightSyncError: a parameter differs from the file, or the file from its digests; names the tensor.
    """
    expected = {name: Expected(dtype, tuple(shape), bits) for name, (dtype, shape, bits) in facts.items()}
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    unproven = set(expected)
    checked = total = 0
    for name, parameter in model.named_parameters():
        total += 1
        parts = _parts(name, packed, expected)
        if not parts or not _comparable(parameter, [expected[part] for part in parts]):
            continue
        wrong = _first_difference(parameter, parts, expected)
        if wrong is None:
            checked += 1
        elif _element_sum(parameter) != sum(_element_sum(read(part)) for part in parts):
            raise WeightSyncError(f"{wrong}: what the engine holds is not what the file says")
        unproven.difference_update(parts)
    for name in unproven:
        read(name)
    return checked, total


def _parts(name: str, packed: Mapping[str, Sequence[str]], expected: Mapping[str, Expected]) -> list[str]:
    """Tensors of the file that a parameter consists of, in order; empty when they are not known."""
    if name in expected:
        return [name]
    for fused, parts in packed.items():
        if f".{fused}." in name:
            names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
            return names if all(part in expected for part in names) else []
    return []


def _comparable(parameter: torch.Tensor, parts: Sequence[Expected]) -> bool:
    """Whether the parameter can be the parts one after the other, perhaps with padding after them."""
    if parameter.is_meta or parameter.dim() == 0 or any(part.dtype != str(parameter.dtype) for part in parts):
        return False
    rest = tuple(parameter.shape[1:])
    rows = sum(part.shape[0] for part in parts if part.shape)
    return rows <= parameter.shape[0] and all(part.shape[1:] == rest and part.shape for part in parts)


def _first_difference(parameter: torch.Tensor, names: Sequence[str], expected: Mapping[str, Expected]) -> str | None:
    """The first part that the parameter does not hold at its place; None when it holds all."""
    begin = 0
    for name in names:
        rows = expected[name].shape[0]
        if bit_sum(parameter[begin : begin + rows]) != expected[name].bits:
            return name
        begin += rows
    return None


def _element_sum(tensor: torch.Tensor) -> int:
    """Sum of the elements' bits, read as integers: the same in any order."""
    data = tensor.detach().contiguous().reshape(-1)
    return int(data.view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64))
