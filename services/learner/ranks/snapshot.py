"""From tensors to the bytes that travel."""

from __future__ import annotations

import torch

from services.common.weights.snapshot import Snapshot

Weights = dict[str, torch.Tensor]
"""Hugging Face name → tensor on the CPU."""

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def make_snapshot(lineage: int, policy_version: int, weights: Weights) -> Snapshot:
    """The weights as a snapshot; copies the bytes, so that training may go on.

    Raises:
        KeyError: a tensor is neither float32, bfloat16 nor float16.
    """
    data = {
        name: (_DTYPES[t.dtype], tuple(t.shape), t.detach().contiguous().view(-1).view(torch.uint8).numpy())
        for name, t in weights.items()
    }
    return Snapshot.build(lineage, policy_version, data)
