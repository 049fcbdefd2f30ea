"""What verl's keys become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.cli.imports.convert import Request, SourceName, convert
from services.cli.imports.result import Imported, Line, Outcome
from services.common.spec.job import JobSpec, parse_spec

FILES = Path(__file__).parent / "files"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")
MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
AUX_LOSS = f"+{TRANSFORMER}.moe_aux_loss_coeff=0.01"
MODEL = "actor_rollout_ref.model"


def imported(*overrides: str, rows: int | None = None) -> Imported:
    return convert(Request(overrides=overrides, source=SourceName.VERL, rows=rows), {"HOME": "/home/u"})


def script(name: str, rows: int | None = None) -> JobSpec:
    return parse_spec(convert(Request(script=FILES / name, rows=rows), {"HOME": "/home/u"}).text)


def value(found: Imported, field: str) -> Any:
    part: Any = parse_spec(found.text).model_dump(mode="json")
    for key in field.split("."):
        part = part[key]
    return part


def line(found: Imported, key: str) -> Line:
    (one,) = [line for line in (*found.lines, *found.defaults) if line.key == key]
    return one


@pytest.mark.parametrize(
    ("overrides", "field", "expected"),
    [
        (
            ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16"),
            "algorithm.filter_groups_train_batch_size",
            64,
        ),
        (("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16"), "learner.mini_batch_size", 16),
        ((f"{ROLLOUT}.n=5",), "rollout.group_size", 5),
        ((f"{ACTOR}.ppo_epochs=2",), "learner.ppo_epochs", 2),
        (("algorithm.adv_estimator=gae",), "algorithm.advantage_estimator", "gae"),
        (GRPO, "algorithm.advantage_estimator", "grpo"),
        ((*GRPO, "algorithm.norm_adv_by_std_in_grpo=False"), "algorithm.advantage_estimator", "dr_grpo"),
        ((*GRPO, "algorithm.adv_estimator=rloo"), "algorithm.advantage_estimator", "rloo"),
        (
            (*GRPO, "algorithm.adv_estimator=reinforce_plus_plus_baseline"),
            "algorithm.advantage_estimator",
            "reinforce_plus_plus_baseline",
        ),
        (("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"), "algorithm.gamma", 0.9),
        (("algorithm.gamma=0.99",), "algorithm.gamma", 0.99),
        (("algorithm.lam=0.95",), "algorithm.lam", 0.95),
        ((f"{ACTOR}.clip_ratio_low=0.1",), "algorithm.clip_ratio_low", 0.1),
        ((f"{ACTOR}.clip_ratio_high=0.28",), "algorithm.clip_ratio_high", 0.28),
        ((f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_low=null"), "algorithm.clip_ratio_low", 0.3),
        ((f"{ACTOR}.clip_ratio_c=10.0",), "algorithm.dual_clip", 10.0),
        ((f"{ACTOR}.entropy_coeff=0.01",), "algorithm.entropy_coefficient", 0.01),
        ((f"{ACTOR}.loss_agg_mode=token-mean",), "algorithm.token_level_loss", True),
        ((f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",), "algorithm.token_level_loss", False),
        ((f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",), "algorithm.constant_length", None),
        ((f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",), "algorithm.constant_length", 1),
        (
            (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=300"),
            "algorithm.constant_length",
            300,
        ),
        (
            (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=77"),
            "algorithm.constant_length",
            77,
        ),
        (
            (f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"),
            "algorithm.loss",
            "gspo",
        ),
        ((f"{ACTOR}.policy_loss.loss_mode=cispo",), "algorithm.loss", "cispo"),
        ((f"{ACTOR}.policy_loss.loss_mode=cispo",), "algorithm.dual_clip", None),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.02"), "algorithm.kl_coefficient", 0.02),
        ((f"{ACTOR}.use_kl_loss=True",), "algorithm.kl_placement", "loss"),
        ((f"{ACTOR}.use_kl_loss=True",), "algorithm.kl_estimator", "k3"),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=kl"), "algorithm.kl_estimator", "k1"),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=mse"), "algorithm.kl_estimator", "k2"),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k3+"), "algorithm.kl_estimator", "k2"),
        (("algorithm.use_kl_in_reward=True",), "algorithm.kl_placement", "reward"),
        (("algorithm.use_kl_in_reward=True",), "algorithm.kl_estimator", "k1"),
        (("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.005"), "algorithm.kl_coefficient", 0.005),
        (("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"), "algorithm.kl_target", 0.1),
        (("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"), "algorithm.kl_horizon", 10_000),
        (("algorithm.use_kl_in_reward=True",), "algorithm.kl_target", None),
        (("algorithm.use_kl_in_reward=True",), "reference.path", None),
        (
            (*GRPO, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"),
            "algorithm.filter_groups_metric",
            "accuracy",
        ),
        ((*GRPO, "algorithm.filter_groups.enable=True"), "algorithm.filter_groups_metric", "reward"),
        ((*GRPO, "algorithm.filter_groups.enable=True"), "algorithm.filter_groups_max_batches", 10_000),
        (
            (*GRPO, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"),
            "algorithm.filter_groups_max_batches",
            10,
        ),
        ((), "algorithm.filter_groups_enable", False),
        (
            ("reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=128"),
            "algorithm.overlong_buffer",
            128,
        ),
        (
            (
                "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
                "+reward.reward_kwargs.overlong_buffer_cfg.len=128",
                "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
            ),
            "algorithm.overlong_buffer_penalty_factor",
            0.5,
        ),
        ((), "algorithm.proximal_policy", "trainer"),
        (("algorithm.rollout_correction.bypass_mode=True",), "algorithm.proximal_policy", "inference"),
        (("algorithm.rollout_correction.rollout_is=token",), "algorithm.importance_correction", "truncated"),
        (("algorithm.rollout_correction.rollout_is=sequence",), "algorithm.importance_level", "sequence"),
        (("algorithm.rollout_correction.rollout_is=token",), "algorithm.importance_weight_cap", 2.0),
        (
            (
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
            ),
            "algorithm.importance_weight_floor",
            0.5,
        ),
        ((f"{ACTOR}.optim.lr=3e-6",), "learner.lr", 3e-6),
        ((f"{ACTOR}.optim.lr_warmup_steps=10",), "learner.lr_warmup_steps", 10),
        ((), "learner.lr_warmup_steps", 0),
        ((f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",), "learner.lr_warmup_share", 0.1),
        ((f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.min_lr_ratio=0.1"), "learner.lr_min_ratio", 0.1),
        ((f"{ACTOR}.optim.warmup_style=cosine",), "learner.lr_schedule", "cosine"),
        (
            (f"{MEGATRON}.tensor_model_parallel_size=1", f"{ACTOR}.optim.lr_decay_style=linear"),
            "learner.lr_schedule",
            "linear",
        ),
        (
            (f"{ACTOR}.optim.lr_decay_style=linear", f"{ACTOR}.optim.min_lr=1e-7", f"{ACTOR}.optim.lr=1e-6"),
            "learner.lr_min_ratio",
            0.1,
        ),
        ((f"{ACTOR}.optim.weight_decay=0.1",), "learner.weight_decay", 0.1),
        ((f"{ACTOR}.optim.betas=[0.9,0.95]",), "learner.adam_beta2", 0.95),
        ((f"{ACTOR}.optim.clip_grad=0.5",), "learner.clip_grad", 0.5),
        ((f"{ACTOR}.grad_clip=0.3",), "learner.clip_grad", 0.3),
        (("critic.optim.lr=2e-5",), "critic.lr", 2e-5),
        (("critic.cliprange_value=0.2",), "critic.value_clip", 0.2),
        (("critic.model.path=/m/critic",), "critic.path", "/m/critic"),
        (("trainer.critic_warmup=20",), "critic.warmup_steps", 19),
        (("trainer.critic_warmup=0",), "critic.warmup_steps", 0),
        (("data.max_prompt_length=100", "data.max_response_length=50"), "rollout.rollout_max_tokens", 50),
        (("data.max_prompt_length=100", "data.max_response_length=50"), "model.max_model_len", 150),
        (("data.train_files=~/x.parquet",), "data.train.source", "/home/u/x.parquet"),
        (("data.val_files=/x/test.jsonl",), "data.eval.source", "/x/test.jsonl"),
        (("data.train_max_samples=1000",), "data.train.size", 1000),
        (("data.shuffle=False",), "data.shuffle", False),
        ((f"{ROLLOUT}.temperature=0.8",), "rollout.temperature", 0.8),
        ((f"{ROLLOUT}.tensor_model_parallel_size=4",), "rollout.tensor_parallel_size", 4),
        ((), "rollout.tensor_parallel_size", 2),
        ((f"{ROLLOUT}.gpu_memory_utilization=0.8",), "rollout.gpu_memory_utilization", 0.8),
        ((f"{ROLLOUT}.max_num_seqs=256", *GRPO), "rollout.max_concurrent_groups", 64),
        (
            (f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=2"),
            "learner.data_parallel_size",
            2,
        ),
        ((f"{MEGATRON}.tensor_model_parallel_size=2",), "learner.tensor_parallel_size", 2),
        ((f"{MEGATRON}.tensor_model_parallel_size=2",), "learner.sequence_parallel", True),
        ((f"{MEGATRON}.context_parallel_size=2",), "learner.context_parallel_size", 2),
        ((AUX_LOSS,), "learner.router_aux_loss_coef", 0.01),
        ((AUX_LOSS, f"+{TRANSFORMER}.moe_router_load_balancing_type=none"), "learner.router_aux_loss_coef", 0.0),
        (("trainer.nnodes=2", "trainer.n_gpus_per_node=4"), "learner.data_parallel_size", 8),
        (("trainer.n_gpus_per_node=8", f"{ACTOR}.ulysses_sequence_parallel_size=2"), "learner.data_parallel_size", 4),
        (
            (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=9000"),
            "learner.max_tokens_per_micro_batch",
            9000,
        ),
        ((f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",), "learner.max_tokens_per_micro_batch", 4096),
        (("actor_rollout_ref.model.enable_gradient_checkpointing=False",), "learner.recompute", "none"),
        ((f"+{MEGATRON}.override_transformer_config.recompute_granularity=full",), "learner.recompute", "full"),
        (("trainer.total_training_steps=70",), "learner.steps", 70),
        (("trainer.save_freq=25",), "checkpoint.interval_steps", 25),
        (("trainer.max_actor_ckpt_to_keep=3",), "checkpoint.keep_last", 3),
        (("trainer.test_freq=5",), "eval.interval_steps", 5),
        (("trainer.test_freq=-1", "trainer.val_before_train=False"), "eval.enabled", False),
        (("trainer.test_freq=-1",), "eval.enabled", True),
        ((f"{ROLLOUT}.val_kwargs.n=4",), "eval.samples", 4),
        ((f"{ROLLOUT}.val_kwargs.temperature=0.7", f"{ROLLOUT}.val_kwargs.do_sample=True"), "eval.temperature", 0.7),
        ((f"{ROLLOUT}.val_kwargs.temperature=0.7",), "eval.temperature", 0.01),
        ((), "off_policy.max_off_policy_steps", 0),
        (
            ("trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_threshold=4"),
            "off_policy.max_off_policy_steps",
            3,
        ),
        (("trainer.experiment_name=Qwen2.5_7B GSM8K",), "name", "qwen2-5-7b-gsm8k"),
    ],
)
def test_a_key_becomes_the_field_of_the_same_meaning(overrides: tuple[str, ...], field: str, expected: object) -> None:
    found = imported("trainer.total_epochs=1", *overrides)
    assert value(found, field) == expected


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((f"{ROLLOUT}.top_p=0.9",), f"{ROLLOUT}.top_p"),
        ((f"{ROLLOUT}.top_k=50",), f"{ROLLOUT}.top_k"),
        ((f"{ACTOR}.clip_ratio=0.1",), f"{ACTOR}.clip_ratio"),
        ((f"{ACTOR}.policy_loss.loss_mode=clip_cov",), f"{ACTOR}.policy_loss.loss_mode"),
        ((f"{ACTOR}.loss_agg_mode=token-sum",), f"{ACTOR}.loss_agg_mode"),
        ((*GRPO, "algorithm.adv_estimator=remax"), "algorithm.adv_estimator"),
        ((f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"), "algorithm.use_kl_in_reward"),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=abs"), f"{ACTOR}.kl_loss_type"),
        (("data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=30"), f"{ACTOR}.ppo_mini_batch_size"),
        (("data.train_files=['a.parquet','b.parquet']",), "data.train_files"),
        (("data.truncation=left",), "data.truncation"),
        ((f"{ACTOR}.strategy=megatron", f"{MODEL}.lora_rank=64"), f"{MODEL}.lora_rank"),
        ((f"{MODEL}.lora_adapter_path=/adapter",), f"{MODEL}.lora_adapter_path"),
        ((f"{ROLLOUT}.multi_turn.enable=True",), f"{ROLLOUT}.multi_turn.enable"),
        (("custom_reward_function.path=/x.py",), "custom_reward_function.path"),
        (("reward_model.enable=True",), "reward_model.enable"),
        (("trainer.n_gpus_per_node=6", f"{MEGATRON}.tensor_model_parallel_size=4"), "trainer.n_gpus_per_node"),
        (
            ("+data.apply_chat_template_kwargs.enable_thinking=False",),
            "data.apply_chat_template_kwargs.enable_thinking",
        ),
        (
            ("+actor_rollout_ref.model.override_config.max_position_embeddings=32768",),
            "actor_rollout_ref.model.override_config.max_position_embeddings",
        ),
        (("trainer.total_epochs=2",), "trainer.total_epochs"),
        ((f"{ACTOR}.shuffle=True",), f"{ACTOR}.shuffle"),
        (("algorithm.rollout_correction.rollout_rs=token_k1",), "algorithm.rollout_correction.rollout_rs"),
        ((f"+{TRANSFORMER}.moe_router_load_balancing_type=aux_loss",), f"{TRANSFORMER}.moe_router_load_balancing_type"),
        (
            (AUX_LOSS, f"+{TRANSFORMER}.moe_router_load_balancing_type=seq_aux_loss"),
            f"{TRANSFORMER}.moe_router_load_balancing_type",
        ),
        ((AUX_LOSS, f"+{TRANSFORMER}.moe_z_loss_coeff=0.001"), f"{TRANSFORMER}.moe_z_loss_coeff"),
        ((f"{MEGATRON}.expert_tensor_parallel_size=2",), f"{MEGATRON}.expert_tensor_parallel_size"),
    ],
)
def test_a_key_without_the_same_meaning_differs(overrides: tuple[str, ...], key: str) -> None:
    assert line(imported("trainer.nnodes=1", *overrides), key).outcome is Outcome.DIFFERS


def test_context_parallelism_of_megatron_divides_the_ranks() -> None:
    found = imported("trainer.nnodes=1", "trainer.n_gpus_per_node=8", f"{MEGATRON}.context_parallel_size=2")
    assert value(found, "learner.context_parallel_size") == 2
    assert value(found, "learner.data_parallel_size") == 4


@pytest.mark.parametrize(
    ("overrides", "outcome"),
    [
        ((), Outcome.BECAME),
        ((f"{MEGATRON}.context_parallel_size=2",), Outcome.BECAME),
        ((f"{MEGATRON}.pipeline_model_parallel_size=4",), Outcome.DIFFERS),
        ((f"{MEGATRON}.tensor_model_parallel_size=2",), Outcome.DIFFERS),
    ],
)
def test_expert_parallelism_is_taken_over_where_the_data_parallel_ranks_can_share_experts(
    overrides: tuple[str, ...], outcome: Outcome
) -> None:
    key = f"{MEGATRON}.expert_model_parallel_size"
    found = imported("trainer.nnodes=1", "trainer.n_gpus_per_node=8", f"{key}=4", *overrides)
    assert line(found, key).outcome is outcome
    assert value(found, "learner.expert_parallel_size") == (4 if outcome is Outcome.BECAME else 1)


def test_fsdp_becomes_the_back_end_of_that_name_with_its_adapters() -> None:
    found = imported(
        "trainer.nnodes=1", f"{MODEL}.lora_rank=64", f"{MODEL}.lora_alpha=32", f"{MODEL}.target_modules=[q_proj,v_proj]"
    )
    assert value(found, "learner.backend") == "fsdp2"
    assert value(found, "model.lora") == {
        "rank": 64,
        "alpha": 32,
        "target_modules": ["q_proj", "v_proj"],
        "dropout": 0.0,
    }


def test_a_mini_batch_that_does_not_divide_takes_the_next_smaller_divisor() -> None:
    found = imported("data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=30")
    assert value(found, "learner.mini_batch_size") == 25


def test_rows_make_epochs_steps() -> None:
    found = imported("data.train_batch_size=1024", "trainer.total_epochs=15", rows=7473)
    assert value(found, "learner.steps") == 15 * 7
    assert line(found, "trainer.total_epochs").outcome is Outcome.BECAME


def test_a_coefficient_of_0_needs_no_reference() -> None:
    found = imported(*GRPO, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.0")
    assert parse_spec(found.text).reference is None


def test_an_estimator_without_values_has_no_critic() -> None:
    found = imported(*GRPO, "critic.optim.lr=1e-5", "trainer.critic_warmup=0")
    assert parse_spec(found.text).critic is None
    assert line(found, "critic.optim.lr").outcome is Outcome.LEFT_OUT


def test_defaults_that_become_fields_are_listed_and_marked() -> None:
    found = imported("trainer.nnodes=1")
    assert line(found, f"{ACTOR}.clip_ratio_c").fields == ("algorithm.dual_clip",)
    assert f"# {ACTOR}.clip_ratio_c (default)" in found.text


def test_the_ppo_example_of_gsm8k_has_the_values_of_its_script() -> None:
    spec = script("ppo_gsm8k_verl.sh", rows=7473)
    assert spec.critic is not None
    assert spec.reference is not None
    assert (spec.algorithm.advantage_estimator, spec.algorithm.gamma, spec.algorithm.lam) == ("gae", 1.0, 1.0)
    assert (spec.algorithm.kl_placement, spec.algorithm.kl_coefficient, spec.algorithm.kl_estimator) == (
        "reward",
        0.001,
        "k1",
    )
    assert (spec.learner.lr, spec.critic.lr, spec.critic.value_clip, spec.critic.warmup_steps) == (1e-6, 1e-5, 0.5, 0)
    assert spec.critic.path == spec.model.path == "deepseek-ai/deepseek-llm-7b-chat"
    assert (spec.algorithm.groups_per_step, spec.learner.mini_batch_size, spec.updates_per_step) == (1024, 256, 4)
    assert (spec.rollout.group_size, spec.rollout.rollout_max_tokens, spec.model.max_model_len) == (1, 512, 1024)
    assert (spec.rollout.tensor_parallel_size, spec.rollout.gpu_memory_utilization) == (4, 0.4)
    assert spec.data.train.source == "/home/u/data/gsm8k/train.parquet"
    assert (spec.checkpoint.interval_steps, spec.eval.interval_steps, spec.learner.data_parallel_size) == (20, 1, 8)
    assert spec.learner.steps == 105


def test_the_dapo_recipe_has_the_values_of_its_script() -> None:
    spec = script("dapo_verl.sh")
    algorithm = spec.algorithm
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.dual_clip) == (0.2, 0.28, 10.0)
    assert (algorithm.overlong_buffer_enable, algorithm.overlong_buffer, algorithm.overlong_buffer_penalty_factor) == (
        True,
        4096,
        1.0,
    )
    assert (algorithm.filter_groups_enable, algorithm.filter_groups_metric, algorithm.filter_groups_max_batches) == (
        True,
        "accuracy",
        10,
    )
    assert (algorithm.groups_per_step, spec.learner.mini_batch_size, spec.rollout.group_size) == (512, 32, 16)
    assert (spec.rollout.rollout_max_tokens, spec.model.max_model_len) == (20_480, 22_528)
    assert (spec.learner.weight_decay, spec.learner.lr_warmup_steps) == (0.1, 10)
    assert (spec.learner.data_parallel_size, spec.learner.max_tokens_per_micro_batch) == (16, 8 * 22_528)
    assert (spec.critic, spec.reference) == (None, None)


def test_a_megatron_script_has_its_ranks_and_its_kl() -> None:
    spec = script("grpo_megatron_verl.sh")
    learner = spec.learner
    assert (learner.tensor_parallel_size, learner.pipeline_parallel_size, learner.data_parallel_size) == (2, 2, 2)
    assert (learner.sequence_parallel, learner.use_distributed_optimizer, learner.recompute, learner.steps) == (
        True,
        True,
        "none",
        100,
    )
    assert (spec.algorithm.kl_placement, spec.algorithm.kl_estimator, spec.algorithm.kl_coefficient) == (
        "loss",
        "k3",
        0.001,
    )
    assert spec.reference is not None
    assert spec.eval.enabled is False
