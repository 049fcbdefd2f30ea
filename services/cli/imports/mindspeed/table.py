"""Table of MindSpeed-RL's keys: what each becomes, or why it is left out. Defaults are those of its config classes."""

from __future__ import annotations

from services.cli.imports.mindspeed import objective, rewards, training
from services.cli.imports.mindspeed.keys import ROLES, left_out
from services.cli.imports.mindspeed.training import ACTOR, COMMON, CRITIC, GENERATE, RL
from services.cli.imports.rules import Field, Fixed, Kind, Source

NAME = "MindSpeed-RL (configurations of April 2026)"
WHOLE = "rollouts are sampled from the whole distribution: the loss's ratio needs its log-probs"
TOOLS = "multi-turn rollouts with tools have no counterpart"

DEFAULTS = {
    f"{COMMON}.lr_decay_style": "linear",
    f"{COMMON}.weight_decay": 0.01,
    f"{COMMON}.clip_grad": 1.0,
    f"{COMMON}.adam_beta1": 0.9,
    f"{COMMON}.adam_beta2": 0.999,
    f"{COMMON}.use_distributed_optimizer": False,
    f"{COMMON}.bf16": True,
    f"{COMMON}.no_shuffle": False,
    f"{RL}.n_samples_per_prompt": 1,
    f"{RL}.mini_batch_size": 1,
    f"{RL}.epochs": 1,
    f"{RL}.max_prompt_length": 512,
    f"{RL}.adv_estimator": "group_norm",
    f"{RL}.gamma": 1.0,
    f"{RL}.lam": 0.95,
    f"{RL}.clip_ratio": 0.2,
    f"{RL}.clip_ratio_low": 0.1,
    f"{RL}.clip_ratio_high": 0.1,
    f"{RL}.cliprange_value": 0.5,
    f"{RL}.entropy_coeff": 0.0,
    f"{RL}.token_level_loss": True,
    f"{RL}.kl_penalty": "low_var_kl",
    f"{RL}.kl_ctrl_type": "fixed",
    f"{RL}.init_kl_coef": 0.01,
    f"{RL}.kl_target": 100.0,
    f"{RL}.kl_horizon": 1000,
    f"{RL}.overlong_buffer_enable": False,
    f"{RL}.filter_groups_enable": False,
    f"{RL}.filter_groups_max_batches": 1,
    f"{RL}.filter_groups_train_batch_size": 1,
    f"{RL}.max_packing_token_size": 4096,
    f"{RL}.partial_rollout_max_split": 1,
    f"{GENERATE}.infer_tensor_parallel_size": 8,
    f"{GENERATE}.gpu_memory_utilization": 0.5,
    f"{GENERATE}.enforce_eager": True,
    f"{GENERATE}.sampling_config.max_tokens": 128,
    f"{GENERATE}.sampling_config.temperature": 0.2,
    f"{GENERATE}.sampling_config.top_k": 50,
}
FIELDS = {
    f"{COMMON}.train_iters": Field("learner.steps", Kind.INTEGER),
    f"{COMMON}.save_interval": Field("checkpoint.interval_steps", Kind.INTEGER),
    f"{RL}.n_samples_per_prompt": Field("rollout.group_size", Kind.INTEGER),
    f"{RL}.epochs": Field("learner.ppo_epochs", Kind.INTEGER),
    f"{RL}.entropy_coeff": Field("algorithm.entropy_coefficient", Kind.NUMBER),
    f"{RL}.verifier_timeout": Field("reward.timeout_s", Kind.NUMBER),
    f"{GENERATE}.infer_tensor_parallel_size": Field("rollout.tensor_parallel_size", Kind.INTEGER),
    f"{GENERATE}.gpu_memory_utilization": Field("rollout.gpu_memory_utilization", Kind.NUMBER),
    f"{GENERATE}.enforce_eager": Field("rollout.enforce_eager", Kind.TRUTH),
    f"{GENERATE}.sampling_config.temperature": Field("rollout.temperature", Kind.NUMBER),
}
FIXED = {
    f"{GENERATE}.sampling_config.top_p": Fixed((1.0,), "the whole distribution", WHOLE),
    f"{GENERATE}.sampling_config.top_k": Fixed((-1, 0), "the whole distribution", WHOLE),
    f"{GENERATE}.sampling_config.min_p": Fixed((0.0,), "the whole distribution", WHOLE),
    f"{RL}.shuffle_mini_batch": Fixed((False,), "a batch is trained in its order", "a batch is trained in its order"),
    f"{RL}.multi_turn_enable": Fixed((False,), "one turn", TOOLS),
    f"{RL}.is_multimodal": Fixed((False,), "text models only", "text models only"),
    f"{COMMON}.lora_target_modules": Fixed(
        (), "all weights are trained", "Megatron trains all weights; backend fsdp2 has adapters (model.lora)"
    ),
    f"{ACTOR}.lora_target_modules": Fixed(
        (), "all weights are trained", "Megatron trains all weights; backend fsdp2 has adapters (model.lora)"
    ),
}
_OF_ROLES = (
    *training.OPTIMIZER, *training.OF_ACTOR, "lr_warmup_fraction", "lr_decay_style", "min_lr", "optimizer", "micro_batch_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "attention_dropout", "hidden_dropout", "tokenizer_name_or_path", "data_path",
    "no_shuffle", "train_iters", "save_interval", "global_batch_size", "stage",
)  # fmt: skip
LEFT_OUT = left_out() | {
    f"{role}.{name}": "another section's value counts, or it has no use here" for role in ROLES for name in _OF_ROLES
}
DERIVATIONS = (
    objective.stage, objective.advantages, objective.kl, objective.filter_groups, objective.overlong_buffer, rewards.verifiers,
    training.model, training.data, training.rollouts, training.batches, training.actor, training.critic, training.ranks,
    training.routers, training.off_policy,
)  # fmt: skip
SOURCE = Source(NAME, DEFAULTS, FIELDS, FIXED, DERIVATIONS, {}, LEFT_OUT)
SECTIONS = frozenset({COMMON, ACTOR, CRITIC, RL, GENERATE})
"""Sections by which such a file is known."""
