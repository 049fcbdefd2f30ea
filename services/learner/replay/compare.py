"""Bit for bit: two files of a rank's state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

RANDOM_STATE = "rng."
"""Left out: other threads of a process may draw random numbers, and training draws none."""


def differing(ours: Path, theirs: Path) -> tuple[int, list[str]]:
    """How many tensors two files of a rank's state hold, and the names of those that are not the same in every bit.

    Raises:
        OSError: a file is missing.
    """
    with safe_open(ours, framework="pt") as left, safe_open(theirs, framework="pt") as right:
        mine, other = set(left.keys()), set(right.keys())
        names = sorted(name for name in mine | other if not name.startswith(RANDOM_STATE))
        wrong = [
            name
            for name in names
            if name not in mine & other or not same_bits(left.get_tensor(name), right.get_tensor(name))
        ]
        counters = [json.loads(file.metadata()["about"]).get("counters") for file in (left, right)]
    return len(names), wrong if counters[0] == counters[1] else [*wrong, "the optimizer's step counters"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit; not-a-number is like itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def distances(
    before: Mapping[str, torch.Tensor], recorded: Mapping[str, torch.Tensor], changed: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Euclidean norms over all weights: how far the changed end lies from the recorded one, how far training went, how large it is."""

    def norm(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor] | None = None) -> float:
        squares = ((t.double() - b[n].double() if b else t.double()).square().sum() for n, t in sorted(a.items()))
        return float(sum(map(float, squares)) ** 0.5)

    return {"apart": norm(changed, recorded), "trained": norm(recorded, before), "weights": norm(recorded)}
