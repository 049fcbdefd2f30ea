"""Whether the weights in the model are those of the file: sums of bits, taken from the file before the pause and from the model after it.

Engines fuse tensors (q, k, v into one) and may pad them; each part of a fused parameter is compared by itself, so a part that is missing,
stale or damaged is found. Sums are taken where the weights lie, at the speed of that memory.

Not covered, and counted as such: parameters that the engine keeps in another layout (the CPU build repacks linear layers; a parameter that
holds the right elements in another order counts here too) or spreads over devices. For those it is known only that the loader was handed
the right bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import WeightSyncError

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

Facts = dict[str, tuple[str, list[int], int]]
"""What a file says of its tensors: dtype, shape and sum of bits, as they travel to the engine's workers."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the file says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    bits: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Expected:
        """Of a tensor of the file."""
        return cls(str(tensor.dtype), tuple(tensor.shape), bit_sum(tensor))


class Model(Protocol):
    """What is asked of vLLM's model."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Names and values."""


def read_facts(path: Path) -> Facts:
    """Of every tensor in a safetensors file.

    Raises:
        WeightSyncError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: Expected.of(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path}: cannot be read: {error}") from error
    return {name: (expected.dtype, list(expected.shape), expected.bits) for name, expected in found.items()}


def bit_sum(tensor: torch.Tensor) -> int:
    """The tensor's bytes, read as the widest integers that their number allows, summed up modulo 2⁶⁴ on the tensor's own device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = next(width for width in _WORDS if data.numel() % width == 0)
    if data.storage_offset() % width:
        data = data.clone()
    return int(data.view(_WORDS[width]).sum(dtype=torch.int64))


def check_installed(model: Model, facts: Facts, read: Callable[[str], torch.Tensor]) -> tuple[int, int]:
    """Compares every parameter that can be compared; returns how many those were, and how many there are.

    `read`: a tensor of the file, asked for only where sums disagree.

    Raises:
        WeightSyncError: one of them does not hold what the file says; names the tensor.
    """
    expected = {name: Expected(dtype, tuple(shape), bits) for name, (dtype, shape, bits) in facts.items()}
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    checked = total = 0
    for name, parameter in model.named_parameters():
        total += 1
        parts = _parts(name, packed, expected)
        if parts and _comparable(parameter, [expected[part] for part in parts]):
            wrong = _differing(parameter, parts, expected)
            if wrong is None:
                checked += 1
            elif _element_sum(parameter) != sum(_element_sum(read(part)) for part in parts):
                raise WeightSyncError(f"{wrong}: what the engine holds is not what the file says")
    return checked, total


def _parts(name: str, packed: Mapping[str, Sequence[str]], expected: Mapping[str, Expected]) -> list[str]:
    """The file's tensors that make up a parameter, in order; empty when they are not known."""
    if name in expected:
        return [name]
    for fused, parts in packed.items():
        if f".{fused}." in name:
            names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
            return names if all(part in expected for part in names) else []
    return []


def _comparable(parameter: torch.Tensor, parts: Sequence[Expected]) -> bool:
    """Whether the parts lie one after the other in it, perhaps with padding behind them."""
    if parameter.is_meta or parameter.dim() == 0 or any(part.dtype != str(parameter.dtype) for part in parts):
        return False
    rest = tuple(parameter.shape[1:])
    rows = sum(part.shape[0] for part in parts if part.shape)
    return rows <= parameter.shape[0] and all(part.shape[1:] == rest and part.shape for part in parts)


def _differing(parameter: torch.Tensor, names: Sequence[str], expected: Mapping[str, Expected]) -> str | None:
    """The first of its parts that is not where it should be."""
    begin = 0
    for name in names:
        rows = expected[name].shape[0]
        if bit_sum(parameter[begin : begin + rows]) != expected[name].bits:
            return name
        begin += rows
    return None


def _element_sum(tensor: torch.Tensor) -> int:
    """The elements' bits, read as integers and summed up: the same in any order."""
    data = tensor.detach().contiguous().reshape(-1)
    return int(data.view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64))
