"""The only file of the rollout service that differs by what the engine computes on: its environment and its engine arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.config.settings import Platform
from services.common.spec.job import JobSpec

_GIB = 1 << 30

_NO_NZ = {"weight_nz_mode": 0, "rl_config": {"enabled": True}}
"""vLLM-Ascend's settings for weights that are loaded again in place: they must not be cast to the NPU's FRACTAL_NZ format.

0.23.0 knows the first; releases after it gather what reinforcement learning needs in the second. Each leaves alone what it does not know.
"""

_EVERYWHERE = {
    "HF_HUB_OFFLINE": "1",  # models are directories; nothing is looked up
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads: forking it is not safe
}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """How the engine is to be started on this platform."""

    environment: dict[str, str]
    """Variables to set before vLLM is imported."""
    arguments: dict[str, Any]
    """Engine arguments besides those that are the same everywhere."""


def plan_engine(platform: Platform, spec: JobSpec, environment: Mapping[str, str]) -> EnginePlan:
    """The plan for a job.

    On CPUs the cores are vLLM's to bind: VLLM_CPU_OMP_THREADS_BIND ("0", "0-3", …; default: all but one) says on which cores
    the worker computes, so that a learner on the same machine can have the others. What the operator has set stays as it is.
    """
    wanted = dict(_EVERYWHERE)
    arguments: dict[str, Any] = {"gpu_memory_utilization": spec.rollout.gpu_memory_utilization}
    if platform is Platform.CPU:
        # VLLM_CPU_KVCACHE_SPACE, where the operator sets it, wins over this; it takes whole GiB only.
        arguments["kv_cache_memory_bytes"] = int(spec.rollout.kv_cache_gib * _GIB)
    elif platform is Platform.NPU:
        arguments["additional_config"] = copy.deepcopy(_NO_NZ)
        wanted["VLLM_ASCEND_ENABLE_NZ"] = "0"  # its worker looks at this one too
    return EnginePlan({name: value for name, value in wanted.items() if name not in environment}, arguments)
