"""What ranks left in checkpoints, compared bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open


def same(one: Path, other: Path) -> bool:
    """Whether two files hold the same: weights, moments, counters, random states; but Python's, from which I/O draws too."""
    return same_tensors(one, other, but="rng.python")


def same_tensors(one: Path, other: Path, *, but: str = "rng.") -> bool:
    """Whether two files hold the same tensors, bit for bit, and say the same of them; `but` for those that begin so."""
    with safe_open(one, framework="pt") as a, safe_open(other, framework="pt") as b:
        names = set(a.keys())
        compared = [name for name in names if not name.startswith(but)]
        return (
            names == set(b.keys())
            and a.metadata() == b.metadata()
            and all(torch.equal(a.get_tensor(name), b.get_tensor(name)) for name in compared)
        )
