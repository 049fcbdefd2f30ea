"""What differs by platform, and nothing else."""

from __future__ import annotations

import pytest

from services.common.config.settings import Platform
from services.common.spec.job import JobSpec
from services.common.spec.placement import PlacementSpec, RolloutPlacement
from services.rollout.engine.platform import plan_engine

SPEC = JobSpec.model_validate(
    {
        "model": {"path": "tiny"},
        "data": {"train": {"source": "reasoning_gym:chain_sum"}},
        "rollout": {"kv_cache_gib": 0.5, "gpu_memory_utilization": 0.3},
    }
)


def test_the_cpu_gets_a_kv_cache_of_the_size_asked_for() -> None:
    assert plan_engine(Platform.CPU, SPEC, {}).arguments["kv_cache_memory_bytes"] == 512 * 1024 * 1024


def test_ascend_keeps_weights_in_a_format_that_can_be_loaded_again() -> None:
    """The setting of vLLM-Ascend 0.23.0, that of the releases after it, and the variable that its worker reads."""
    plan = plan_engine(Platform.NPU, SPEC, {})
    assert plan.arguments["additional_config"] == {"weight_nz_mode": 0, "rl_config": {"enabled": True}}
    assert plan.environment["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert "VLLM_ASCEND_ENABLE_NZ" not in plan_engine(Platform.CPU, SPEC, {}).environment


def test_cuda_gets_nothing_of_its_own() -> None:
    assert plan_engine(Platform.CUDA, SPEC, {}).arguments == {"gpu_memory_utilization": 0.3}


@pytest.mark.parametrize("platform", list(Platform))
def test_what_the_operator_has_set_stays(platform: Platform) -> None:
    plan = plan_engine(platform, SPEC, {"VLLM_LOGGING_LEVEL": "DEBUG"})
    assert "VLLM_LOGGING_LEVEL" not in plan.environment
    assert plan.environment["HF_HUB_OFFLINE"] == "1"


def test_an_engine_that_takes_turns_computes_on_all_cores_of_its_stack_and_the_next_one_on_its_own_again() -> None:
    given = {"VLLM_CPU_OMP_THREADS_BIND": "0", "MILLRACE_STACK_CORES": "0,1"}
    in_turns = SPEC.model_copy(update={"placement": PlacementSpec(rollout=RolloutPlacement.COLOCATED)})
    assert plan_engine(Platform.CPU, in_turns, given).environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert plan_engine(Platform.CPU, SPEC, given).environment["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in plan_engine(Platform.CPU, in_turns, {}).environment
