"""Platform of the ranks: cpu, cuda or npu. What Megatron needs of each lies in `megatron/platform.py`; no other module depends on it."""

from __future__ import annotations

import importlib
import math
import os
import random
from typing import Any

import numpy as np
import torch

from services.common.config.settings import Platform
from services.common.service.host import keep_freed_memory

BACKENDS = {Platform.CPU: "gloo", Platform.CUDA: "nccl", Platform.NPU: "hccl"}
"""torch.distributed's backend of each platform."""


def prepare(platform: Platform) -> None:
    """Prepares this process to compute on its device; a second call changes nothing."""
    match platform:
        case Platform.CPU:
            keep_freed_memory()
        case Platform.NPU:
            importlib.import_module("torch_npu")
            torch.get_device_module("npu").set_device(local_rank())
        case Platform.CUDA:
            torch.cuda.set_device(local_rank())
            _sum_in_one_order()


def _sum_in_one_order() -> None:
    """Lets CUDA's kernels compute the same bits each time, as resuming and replaying need."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads such memory


def device_of(platform: Platform) -> torch.device:
    """The device that this rank computes on."""
    return torch.device("cpu") if platform is Platform.CPU else torch.device(platform.value, local_rank())


def seed_all(seed: int) -> None:
    """Seeds every generator that libraries draw from: torch's, Python's, NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def rng_states(platform: Platform) -> dict[str, torch.Tensor]:
    """This rank's random number states by name: torch's, Python's, NumPy's, and the device's."""
    version, key, gauss = random.getstate()
    drawn: Any = np.random.get_state(legacy=False)
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *key], dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([drawn["state"]["pos"], drawn["has_gauss"], *drawn["state"]["key"].tolist()]),
        "numpy_gauss": torch.tensor([drawn["gauss"]], dtype=torch.float64),
    }
    if platform is not Platform.CPU:
        states["device"] = torch.get_device_module(device_of(platform)).get_rng_state()
    return states


def set_rng_states(platform: Platform, states: dict[str, torch.Tensor]) -> None:
    """Restores the states of `rng_states`."""
    torch.set_rng_state(states["cpu"])
    version, *key = states["python"].tolist()
    gauss = float(states["python_gauss"][0])
    random.setstate((version, tuple(key), None if math.isnan(gauss) else gauss))
    position, has_gauss, *keys = states["numpy"].tolist()
    cached = float(states["numpy_gauss"][0])
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    if platform is not Platform.CPU:
        torch.get_device_module(device_of(platform)).set_rng_state(states["device"])


def local_rank() -> int:
    """This rank's ordinal on its machine, from the launcher; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))
