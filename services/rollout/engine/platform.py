"""Platform: the engine's environment and arguments for each; the only file of the rollout service that differs by platform."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.config.settings import STACK_CORES, Platform
from services.common.spec.job import JobSpec

_GIB = 1 << 30
_CORES = "VLLM_CPU_OMP_THREADS_BIND"

_NO_NZ = {"weight_nz_mode": 0, "rl_config": {"enabled": True}}
"""vLLM-Ascend's settings for weights that are loaded again in place: they must not be cast to the NPU's FRACTAL_NZ format.

Release 0.23.0 reads the first; later releases read the second, for reinforcement learning. Each ignores the one that it does not know.
"""

_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Worker in the engine's own process. vLLM's default on CPUs is a process of its own; the two wait for each other by spinning, on the
cores that sample and train. (Its short name, "uni", is refused on CPUs.)"""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are directories; no download
    "PYTHONWARNINGS": "ignore",  # of the engine's own libraries, at every start
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads: a fork is not safe
}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Environment and arguments of an engine start."""

    environment: dict[str, str]
    """Variables to set before vLLM is imported."""
    arguments: dict[str, Any]
    """Engine arguments besides those that are the same on every platform."""


def plan_engine(platform: Platform, spec: JobSpec, environment: Mapping[str, str]) -> EnginePlan:
    """The plan for a job. Variables in `environment` are the operator's, and are left out of the plan.

    On CPUs vLLM binds the cores: VLLM_CPU_OMP_THREADS_BIND ("0", "0-3", …; default: all but one) names the cores of the worker, so that
    a learner on the same machine can have the others. Where the two take turns, the engine computes on all cores of its stack.
    """
    variables, bound = dict(_ENVIRONMENT), dict[str, str]()
    arguments: dict[str, Any] = {"gpu_memory_utilization": spec.rollout.gpu_memory_utilization}
    if platform is Platform.CPU:
        # VLLM_CPU_KVCACHE_SPACE, where the operator sets it, overrides this; it takes whole GiB only.
        arguments["kv_cache_memory_bytes"] = int(spec.rollout.kv_cache_gib * _GIB)
        if spec.rollout.tensor_parallel_size == 1:
            arguments["distributed_executor_backend"] = _ONE_PROCESS
        cores = environment.get(STACK_CORES) if spec.takes_turns else environment.get(_CORES)
        if cores is not None:
            bound = {_CORES: cores}  # an engine before this one may have had others
    elif platform is Platform.NPU:
        arguments["additional_config"] = copy.deepcopy(_NO_NZ)
        variables["VLLM_ASCEND_ENABLE_NZ"] = "0"  # its worker reads this one too
    own = {name: value for name, value in variables.items() if name not in environment}
    return EnginePlan(own | bound, arguments)
