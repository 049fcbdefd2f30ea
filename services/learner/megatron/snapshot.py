"""Snapshot of the weights: tensors as the bytes that are sent."""

from __future__ import annotations

import torch

from services.common.weights.snapshot import Snapshot
from services.learner.megatron.tensor_file import dtype_name

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
