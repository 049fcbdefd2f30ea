"""What MindSpeed-RL's keys become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.cli.imports.convert import Request, convert
from services.cli.imports.result import Imported, Outcome
from services.common.errors import ConfigError
from services.common.spec.job import parse_spec

FILES = Path(__file__).parent / "files"
DAPO, GRPO = "dapo_mindspeed.yaml", "grpo_mindspeed.yaml"
PPO = ("megatron_training.stage=ray_ppo", "rl_config.adv_estimator=gae", "critic_config.lr=5e-6")

BOTH = ("rl_config.verifier_function=[math_17k_acc,format]", "rl_config.verifier_weight=[1.0,0.5]")


def rubric(weights: dict[str, float], accuracy_of: str | None = None) -> dict[str, Any]:
    return {
        "weighted": {
            "verifier_function": [*weights],
            "verifier_weight": [*weights.values()],
            "accuracy_of": accuracy_of,
        }
    }


def imported(name: str, *overrides: str) -> Imported:
    return convert(Request(file=FILES / name, overrides=overrides), {})


def value(found: Imported, field: str) -> Any:
    part: Any = parse_spec(found.text).model_dump(mode="json")
    for key in field.split("."):
        part = part[key]
    return part


@pytest.mark.parametrize(
    ("name", "overrides", "field", "expected"),
    [
        (DAPO, (), "algorithm.filter_groups_train_batch_size", 32),
        (DAPO, ("megatron_training.global_batch_size=64",), "algorithm.filter_groups_train_batch_size", 32),
        (
            DAPO,
            ("megatron_training.global_batch_size=64", "rl_config.filter_groups_enable=false"),
            "algorithm.filter_groups_train_batch_size",
            64,
        ),
        (GRPO, ("megatron_training.global_batch_size=64",), "algorithm.filter_groups_train_batch_size", 64),
        (GRPO, ("rl_config.mini_batch_size=8",), "learner.mini_batch_size", 8),
        (DAPO, (), "algorithm.clip_ratio_high", 0.28),
        (DAPO, ("rl_config.clip_higher_enable=false", "rl_config.clip_ratio=0.1"), "algorithm.clip_ratio_high", 0.1),
        (GRPO, ("rl_config.clip_ratio=0.3",), "algorithm.clip_ratio_low", 0.3),
        (DAPO, (), "algorithm.dual_clip", None),
        (DAPO, ("rl_config.token_level_loss=false",), "algorithm.token_level_loss", False),
        (GRPO, ("rl_config.token_level_loss=false",), "algorithm.token_level_loss", True),
        (DAPO, (), "algorithm.overlong_buffer", 512),
        (DAPO, (), "algorithm.overlong_buffer_penalty_factor", 1.0),
        (DAPO, (), "algorithm.filter_groups_metric", "accuracy"),
        (DAPO, (), "algorithm.filter_groups_max_batches", 10_000),
        (DAPO, ("rl_config.filter_groups_max_batches=7",), "algorithm.filter_groups_max_batches", 7),
        (GRPO, (), "algorithm.filter_groups_enable", False),
        (DAPO, (), "algorithm.kl_coefficient", 0.0),
        (GRPO, (), "algorithm.kl_coefficient", 0.001),
        (GRPO, (), "algorithm.kl_placement", "loss"),
        (GRPO, ("rl_config.kl_penalty=kl",), "algorithm.kl_estimator", "k1"),
        (GRPO, ("rl_config.kl_ctrl_type=adaptive", "rl_config.kl_target=0.1"), "algorithm.kl_target", 0.1),
        (GRPO, ("rl_config.kl_ctrl_type=adaptive", "rl_config.kl_target=0.1"), "algorithm.kl_horizon", 1000),
        (GRPO, PPO, "algorithm.kl_coefficient", 0.0),
        (GRPO, (*PPO, "rl_config.use_kl_in_reward=true"), "algorithm.kl_placement", "reward"),
        (GRPO, PPO, "critic.lr", 5e-6),
        (GRPO, PPO, "critic.value_clip", 0.5),
        (GRPO, PPO, "algorithm.lam", 0.95),
        (DAPO, (), "algorithm.advantage_estimator", "grpo"),
        (DAPO, (), "algorithm.proximal_policy", "trainer"),
        (DAPO, (), "reward.verifiers", {"*": "dapo_math"}),
        (GRPO, (), "reward.verifiers", {"*": "math"}),
        (DAPO, (), "learner.lr", 1e-6),
        (DAPO, (), "learner.adam_beta2", 0.95),
        (GRPO, (), "learner.weight_decay", 0.01),
        (DAPO, ("actor_config.lr_warmup_fraction=0.05",), "learner.lr_warmup_share", 0.05),
        (DAPO, (), "learner.lr_warmup_steps", 0),
        (DAPO, ("actor_config.lr_decay_style=cosine", "actor_config.min_lr=1e-7"), "learner.lr_min_ratio", 0.1),
        (DAPO, ("~actor_config.lr_decay_style",), "learner.lr_schedule", "linear"),
        (DAPO, (), "learner.data_parallel_size", 2),
        (GRPO, (), "learner.data_parallel_size", 4),
        (GRPO, (), "learner.pipeline_parallel_size", 2),
        (DAPO, (), "learner.sequence_parallel", True),
        (DAPO, ("actor_config.context_parallel_size=2",), "learner.context_parallel_size", 2),
        (
            DAPO,
            ("actor_config.tensor_model_parallel_size=1", "actor_config.expert_model_parallel_size=4"),
            "learner.expert_parallel_size",
            4,
        ),
        (GRPO, (*PPO, "rl_config.critic_resource.num_npus=8"), "critic.placement", "own"),
        (GRPO, ("megatron_training.moe_aux_loss_coeff=0.001",), "learner.router_aux_loss_coef", 0.001),
        (DAPO, (), "learner.steps", 2000),
        (DAPO, (), "learner.max_tokens_per_micro_batch", 4096),
        (
            DAPO,
            ("rl_config.use_dynamic_bsz=true", "rl_config.update_max_packing_token_size=6000"),
            "learner.max_tokens_per_micro_batch",
            6000,
        ),
        (DAPO, ("megatron_training.recompute_granularity=full",), "learner.recompute", "full"),
        (GRPO, (), "learner.seed", 1),
        (DAPO, ("rl_config.epochs=2",), "learner.ppo_epochs", 2),
        (DAPO, (), "model.path", "./Qwen2.5-32B"),
        (DAPO, (), "model.max_model_len", 4096),
        (DAPO, ("rl_config.max_prompt_length=1024",), "model.max_model_len", 3072),
        (DAPO, (), "data.shuffle", False),
        (GRPO, ("megatron_training.data_path=/d/x.jsonl",), "data.train.source", "/d/x.jsonl"),
        (DAPO, (), "rollout.group_size", 8),
        (DAPO, (), "rollout.rollout_max_tokens", 2048),
        (DAPO, (), "rollout.tensor_parallel_size", 8),
        (DAPO, (), "rollout.max_concurrent_groups", 128),
        (
            DAPO,
            ("~generate_config.sampling_config.temperature", "generate_config.sampling_config.temperature=0.9"),
            "rollout.temperature",
            0.9,
        ),
        (DAPO, (), "checkpoint.interval_steps", 50),
        (DAPO, (), "off_policy.max_off_policy_steps", 0),
        (DAPO, ("rl_config.partial_rollout_max_split=3",), "off_policy.max_off_policy_steps", 2),
        (DAPO, ("rl_config.verifier_timeout=30",), "reward.timeout_s", 30.0),
        (DAPO, ("rl_config.verifier_weight=[2.0]",), "reward.verifiers", {"*": "weighted"}),
        (DAPO, ("rl_config.verifier_weight=[2.0]",), "reward.rubrics", rubric({"dapo_math": 2.0}, "dapo_math")),
        (GRPO, BOTH, "reward.verifiers", {"*": "weighted"}),
        (GRPO, BOTH, "reward.rubrics", rubric({"math": 1.0, "format": 0.5})),
        (GRPO, ("rl_config.verifier_function=[format]",), "reward.verifiers", {"*": "format"}),
        (
            GRPO,
            ("rl_config.verifier_function=[acc,base_acc,step]", "rl_config.verifier_weight=[1,2,3]"),
            "reward.rubrics",
            rubric({"math": 3.0}),
        ),
    ],
)
def test_a_key_becomes_the_field_of_the_same_meaning(
    name: str, overrides: tuple[str, ...], field: str, expected: object
) -> None:
    assert value(imported(name, *overrides), field) == expected


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("generate_config.sampling_config.top_p=0.9", "generate_config.sampling_config.top_p"),
        ("rl_config.verifier_function=[acc,format]", "rl_config.verifier_function"),
        ("rl_config.verifier_weight=[-1.0]", "rl_config.verifier_weight"),
        ("rl_config.multi_turn_enable=true", "rl_config.multi_turn_enable"),
        ("rl_config.rule_reward=false", "rl_config.rule_reward"),
        (
            "actor_config.expert_model_parallel_size=4",
            "actor_config.expert_model_parallel_size",
        ),  # beside tensor parallelism
        ("actor_config.moe_z_loss_coeff=0.001", "actor_config.moe_z_loss_coeff"),
        (
            "megatron_training.moe_router_load_balancing_type=aux_loss",
            "megatron_training.moe_router_load_balancing_type",
        ),
        ("megatron_training.data_path=./data", "megatron_training.data_path"),
        ("megatron_training.hidden_dropout=0.1", "megatron_training.hidden_dropout"),
        ("rl_config.actor_resource.num_npus=20", "rl_config.actor_resource.num_npus"),
    ],
)
def test_a_key_without_the_same_meaning_differs(override: str, key: str) -> None:
    (found,) = [line for line in imported(DAPO, override).lines if line.key == key]
    assert found.outcome is Outcome.DIFFERS


@pytest.mark.parametrize("name", ["rl_config", "actor_config", "generate_config", "megatron_training"])
def test_a_misspelt_key_is_unknown(name: str) -> None:
    assert [line.key for line in imported(DAPO, f"{name}.typo=1").of(Outcome.UNKNOWN)] == [f"{name}.typo"]


def test_a_trainer_without_a_counterpart_is_refused() -> None:
    with pytest.raises(ConfigError, match="ray_dpo has no counterpart"):
        imported(DAPO, "megatron_training.stage=ray_dpo")
