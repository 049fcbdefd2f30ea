"""Platform of reward models; no other module of the service depends on the kind of machine. Imported in their processes only."""

from __future__ import annotations

import importlib

import torch

from services.common.config.settings import Platform
from services.common.spec.rollout import DType


def prepare(platform: Platform, threads: int) -> torch.device:
    """The device of this process: the CPU with so many threads, or the first accelerator that it sees."""
    if platform is Platform.CPU:
        torch.set_num_threads(threads)
        return torch.device("cpu")
    if platform is Platform.NPU:
        importlib.import_module("torch_npu")
    return torch.device(platform.value, 0)


def dtype_of(dtype: DType, platform: Platform) -> torch.dtype:
    """The weights' type; automatic: float32 on CPUs, whose bfloat16 is slow or missing, bfloat16 on accelerators."""
    if dtype is DType.AUTO:
        dtype = DType.FLOAT32 if platform is Platform.CPU else DType.BFLOAT16
    return torch.float32 if dtype is DType.FLOAT32 else torch.bfloat16
