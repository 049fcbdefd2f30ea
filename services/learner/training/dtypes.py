"""Dtypes of a job as torch names them."""

from __future__ import annotations

import torch

from services.common.spec.rollout import DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of that name."""
    return getattr(torch, dtype.value)  # type: ignore[no-any-return]
