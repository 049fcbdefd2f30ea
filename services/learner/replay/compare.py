"""Comparison of two files of a rank's state, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

RANDOM_STATE = "rng."
"""Prefix of tensors that are not compared: other threads of a process may draw random numbers, and training draws none."""


def differing(ours: Path, theirs: Path) -> tuple[int, list[str]]:
    """The number of tensors in two files of a rank's state, and the names of those that differ in any bit.

    Raises:
        OSError: a file is missing.
    """
    with safe_open(ours, framework="pt") as left, safe_open(theirs, framework="pt") as right:
        both = set(left.keys()) & set(right.keys())
        names = sorted(name for name in {*left.keys(), *right.keys()} if not name.startswith(RANDOM_STATE))
        wrong = [n for n in names if n not in both or not same_bits(left.get_tensor(n), right.get_tensor(n))]
        counters = [json.loads(file.metadata()["about"]).get("counters") for file in (left, right)]
    return len(names), wrong if counters[0] == counters[1] else [*wrong, "the optimizer's step counters"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit; equal NaNs agree."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def distances(
    before: Mapping[str, torch.Tensor], recorded: Mapping[str, torch.Tensor], changed: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Euclidean norms over all weights: changed minus recorded (`apart`), recorded minus before (`trained`), recorded (`weights`)."""

    def norm(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor] | None = None) -> float:
        squares = ((t.double() - b[n].double() if b else t.double()).square().sum() for n, t in sorted(a.items()))
        return float(sum(map(float, squares)) ** 0.5)

    return {"apart": norm(changed, recorded), "trained": norm(recorded, before), "weights": norm(recorded)}
