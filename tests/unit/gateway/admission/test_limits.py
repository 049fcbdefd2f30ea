"""What one job may ask of an installation: refused by the limit's name and both numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common.config.settings import Platform, Settings, load_settings
from services.common.models.directory import ModelInfo
from services.common.spec.job import JobSpec, parse_spec
from services.gateway.admission.automatic import settle
from services.gateway.admission.limits import GIB, InstallationLimits, Machine, over_limits

JOBS = sorted((Path(__file__).parents[4] / "deploy/config/jobs").glob("*.yaml"))
SMALL = Machine(cores=2, memory_bytes=8 * GIB)
SMOLLM2 = 134_515_008
INFO = ModelInfo("LlamaForCausalLM", 30, 9, 3, 576, 1536, 49152, 8192, tie_word_embeddings=True)


def spec(**sections: dict[str, Any]) -> JobSpec:
    data = {"train": {"source": "reasoning_gym:chain_sum"}, "eval": {"source": "reasoning_gym:chain_sum", "seed": 1}}
    return JobSpec.model_validate({"model": {"path": "tiny"}, "data": data} | sections)


def over(
    asked: JobSpec,
    machine: Machine = SMALL,
    parameters: int | None = None,
    roles: dict[str, int] | None = None,
    **settings: Any,
) -> list[tuple[str, str]]:
    known = {} if parameters is None else {"model": parameters}
    problems = over_limits(asked, Settings(**settings), machine, INFO, known | (roles or {}))
    return [(problem.field, problem.message) for problem in problems]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
@pytest.mark.parametrize("machine", [SMALL, Machine(1, 2 * GIB)])
def test_the_jobs_that_come_along_are_taken_by_any_machine(path: Path, machine: Machine) -> None:
    asked = settle(parse_spec(path.read_bytes()), Settings(), machine)
    assert over_limits(asked, Settings(), machine) == []
    assert (
        over_limits(asked, Settings(platform=Platform.NPU, learner_nodes=2), machine, INFO, {"model": 32_000_000_000})
        == []
    )
    if "smollm2" in path.stem:
        assert over_limits(asked, Settings(), SMALL, INFO, {"model": SMOLLM2}) == []


@pytest.mark.parametrize(
    ("sections", "field", "message"),
    [
        (
            {"learner": {"data_parallel_size": 4096}},
            "learner.data_parallel_size",
            "4096 ranks are more than MILLRACE_MAX_RANKS=16 of this installation",
        ),
        (
            {
                "learner": {"data_parallel_size": 8},
                "algorithm": {"preset": "ppo"},
                "critic": {"placement": "own"},
                "reference": {"placement": "own"},
            },
            "reference.placement",
            "24 ranks are more than MILLRACE_MAX_RANKS=16 of this installation",
        ),
        (
            {"learner": {"tensor_parallel_size": 32}},
            "learner.tensor_parallel_size",
            "32 ranks are more than MILLRACE_MAX_RANKS=16 ",
        ),
        (
            {"learner": {"threads_per_rank": 1024}},
            "learner.threads_per_rank",
            "1024 threads of all ranks are more than MILLRACE_MAX_THREADS=64 ",
        ),
        (
            {"rollout": {"kv_cache_gib": 1000.0}},
            "rollout.kv_cache_gib",
            "1000 GiB are more than MILLRACE_MAX_KV_CACHE_GIB=4 ",
        ),
        (
            {"rollout": {"tensor_parallel_size": 64}},
            "rollout.tensor_parallel_size",
            "64 processes of one engine are more than MILLRACE_MAX_ENGINE_DEVICES=8 ",
        ),
        (
            {"reward": {"memory_mib": 1_048_576}},
            "reward.memory_mib",
            "1048576 MiB are more than MILLRACE_MAX_VERIFIER_MEMORY_MIB=4096 ",
        ),
        (
            {"algorithm": {"filter_groups_train_batch_size": 65_536}, "rollout": {"rollout_max_tokens": 1}},
            "algorithm.filter_groups_train_batch_size",
            "1572864 rollouts in flight (slots × group_size) are more than MILLRACE_MAX_ROLLOUTS_IN_FLIGHT=1048576 ",
        ),
        (
            {"algorithm": {"filter_groups_train_batch_size": 1024}, "rollout": {"rollout_max_tokens": 100_000}},
            "rollout.rollout_max_tokens",
            "2457600000 tokens in flight (slots × group_size × rollout_max_tokens) are more than MILLRACE_MAX_TOKENS_IN_FLIGHT=134217728 ",
        ),
        (
            {"model": {"path": "tiny", "max_model_len": 2_000_000}},
            "model.max_model_len",
            "2000000 tokens are more than MILLRACE_MAX_SEQUENCE_TOKENS=131072 ",
        ),
        (
            {
                "rollout": {"group_size": 64, "rollout_max_tokens": 65_536},
                "algorithm": {"filter_groups_train_batch_size": 1},
            },
            "rollout.rollout_max_tokens",
            "104071168 bytes that a group may take in a stream (rollout.group_size 64 × rollout_max_tokens 65536) are more than MILLRACE_",
        ),
        (
            {"rollout": {"rollout_max_tokens": 16_384}, "eval": {"enabled": True, "samples": 256, "tasks": 8}},
            "rollout.rollout_max_tokens",
            "104857600 bytes that a group may take in a stream (eval.samples 256 × rollout_max_tokens 16384) are more than ",
        ),
        (
            {"learner": {"steps": 10_000_000}},
            "learner.steps",
            "10000000 steps are more than MILLRACE_MAX_STEPS=1000000 ",
        ),
        (
            {"eval": {"enabled": True, "tasks": 1_000_000}},
            "eval.tasks",
            "8000000 rollouts of an evaluation (tasks × samples) are more than MILLRACE_MAX_EVAL_ROLLOUTS=1048576 ",
        ),
    ],
)
def test_what_asks_for_more_names_field_limit_and_both_numbers(
    sections: dict[str, Any], field: str, message: str
) -> None:
    ((found, said),) = over(spec(**sections))
    assert found == field
    assert said.startswith(message)


def test_memory_is_judged_where_the_parameters_are_known() -> None:
    assert over(spec()) == []
    assert over(spec(), parameters=SMOLLM2) == []
    ((field, said),) = over(spec(), parameters=7_000_000_000)
    assert field == "model.path"
    assert said.startswith(
        "157.5 GiB of memory for 7000000000 parameters in ranks and one engine are more than MILLRACE_MAX_MEMORY_GIB=8 "
    )
    sharded = spec(learner={"data_parallel_size": 8, "use_distributed_optimizer": True})
    whole = spec(learner={"data_parallel_size": 8})
    assert over(sharded, parameters=SMOLLM2, max_memory_gib=15) == []
    assert [field for field, _ in over(whole, parameters=SMOLLM2, max_memory_gib=15)] == ["model.path"]


PPO: dict[str, Any] = {"preset": "ppo", "kl_coefficient": 0.0}


def test_a_critic_costs_as_much_as_an_actor_of_its_size_and_a_reference_its_weights() -> None:
    """Bytes of a parameter in bfloat16: actor 6 + 12 in its rank and 3 × 2 on the way to the engine, critic 6 + 12, reference 2."""
    billion = 1_000_000_000
    alone = spec(model={"path": "tiny", "dtype": "bfloat16"}, rollout={"kv_cache_gib": 1.0})
    critic = JobSpec.model_validate(alone.model_dump() | {"algorithm": PPO, "critic": {}})
    both = JobSpec.model_validate(critic.model_dump() | {"reference": {}})
    for asked, parameter_bytes in ((alone, 24), (critic, 42), (both, 44)):
        needed = parameter_bytes * billion / GIB + 1.0
        assert over(asked, parameters=billion, max_memory_gib=needed + 0.1) == []
        assert over(asked, parameters=billion, max_memory_gib=needed - 0.1) != []


@pytest.mark.parametrize(
    ("sections", "roles", "field", "message"),
    [
        ({"algorithm": PPO, "critic": {}}, {}, "critic", "4.9 GiB of memory for 100000000 parameters + 100000000 of the critic in"),
        (
            {"algorithm": PPO, "critic": {"path": "large"}},
            {"critic": 300_000_000},
            "critic.path",
            "8.3 GiB of memory for 100000000 parameters + 300000000 of the critic in",
        ),
        ({"reference": {"path": "large"}}, {"reference": 900_000_000}, "reference.path", "4.9 GiB of memory for 100000000 "),
        ({"algorithm": PPO, "critic": {"path": "unread"}}, {}, "", ""),
        ({"reference": {}}, {}, "", ""),
    ],
)  # fmt: skip
def test_the_role_by_which_a_job_becomes_too_large_is_named(
    sections: dict[str, Any], roles: dict[str, int], field: str, message: str
) -> None:
    asked = spec(model={"path": "tiny", "dtype": "bfloat16"}, rollout={"kv_cache_gib": 1.0}, **sections)
    found = over(asked, parameters=100_000_000, roles=roles, max_memory_gib=4)
    assert [name for name, _ in found] == ([field] if field else [])
    assert all(said.startswith(message) for _, said in found)


def test_a_model_of_very_many_positions_needs_a_length() -> None:
    info = ModelInfo("LlamaForCausalLM", 2, 4, 2, 32, 48, 64, 2**31, tie_word_embeddings=True)
    (problem,) = over_limits(spec(), Settings(), SMALL, info)
    assert problem.field == "model.max_model_len"
    assert problem.message.startswith("2147483648 tokens (the model's positions, since it is not set) are more than ")
    assert over_limits(spec(model={"path": "tiny", "max_model_len": 4096}), Settings(), SMALL, info) == []


def test_what_the_operator_sets_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in InstallationLimits.__slots__:
        monkeypatch.setenv(f"MILLRACE_MAX_{name.upper()}", "7")
    assert all(
        getattr(InstallationLimits.of(load_settings(), SMALL), name) == 7 for name in InstallationLimits.__slots__
    )


def test_groups_of_long_responses_are_taken_up_to_what_the_operator_lets_into_a_stream() -> None:
    long = spec(rollout={"group_size": 16, "rollout_max_tokens": 32_768})
    assert over(long) == []
    assert over(long, max_entry_bytes=16 * 1024**2) == []
    assert [field for field, _ in over(long, max_entry_bytes="8MiB")] == ["rollout.rollout_max_tokens"]
    assert over(spec(), max_entry_bytes="4MiB") == [], "no job needs less"


def test_a_limit_can_be_set_below_the_machines() -> None:
    assert over(spec(), max_ranks=1) == []
    assert over(spec(learner={"data_parallel_size": 2}), max_ranks=1)


def test_defaults_follow_the_machine_and_the_number_of_machines() -> None:
    big = Machine(cores=128, memory_bytes=1024 * GIB)
    wide = spec(learner={"data_parallel_size": 256, "threads_per_rank": 4})
    assert over(wide)
    assert over(wide, big) == []
    assert over(wide, Machine(64, 512 * GIB), learner_nodes=2) == []


def test_accelerators_are_not_judged_by_the_gateways_machine() -> None:
    asked = spec(
        model={"path": "tiny", "max_model_len": 1_000_000},
        rollout={"tensor_parallel_size": 16, "kv_cache_gib": 1000.0},
        learner={"data_parallel_size": 32, "threads_per_rank": 1024},
    )
    assert over(asked, Machine(1, 2 * GIB), 70_000_000_000, platform=Platform.NPU) == []
    found = over(spec(learner={"data_parallel_size": 4096}), platform=Platform.CUDA)
    assert [field for field, _ in found] == ["learner.data_parallel_size"]


def test_this_machine_has_cores_and_memory() -> None:
    here = Machine.here()
    assert here.cores >= 1
    assert here.memory_bytes > GIB // 4


def test_turns_on_the_same_devices_are_for_cpus() -> None:
    asked = spec(placement={"rollout": "colocated"})
    assert over(asked) == []
    assert (
        "placement.rollout",
        "colocated is for CPUs so far, and this installation runs on npu: leave it out",
    ) in over(asked, platform=Platform.NPU)
