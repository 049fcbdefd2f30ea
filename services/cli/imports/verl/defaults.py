"""Defaults of verl 0.9.1 for the keys that decide what is trained: a script only overrides them."""

from __future__ import annotations

from collections.abc import Mapping

ACTOR, ROLLOUT, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
CORRECTION = "algorithm.rollout_correction"


def _optimizer(role: str, lr: float) -> dict[str, object]:
    return {
        f"{role}.optim.optimizer": "AdamW",
        f"{role}.optim.lr": lr,
        f"{role}.optim.lr_warmup_steps": -1,
        f"{role}.optim.lr_warmup_steps_ratio": 0.0,
        f"{role}.optim.weight_decay": 0.01,
        f"{role}.optim.betas": [0.9, 0.999],
        f"{role}.optim.clip_grad": 1.0,
    }


DEFAULTS: Mapping[str, object] = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.shuffle": True,
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    **_optimizer(ACTOR, 1e-6),
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.enforce_eager": False,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    **_optimizer(CRITIC, 1e-5),
    f"{CRITIC}.cliprange_value": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10_000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.metric": "reward",
    "algorithm.filter_groups.max_num_gen_batches": 0,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.bypass_mode": False,
    f"{CORRECTION}.loss_type": "ppo_clip",
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.critic_warmup": 0,
    "trainer.v1.trainer_mode": "sync",
    "trainer.v1.sampler.max_off_policy_threshold": 8,
}
FSDP_DEFAULTS: Mapping[str, object] = {
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.optim.lr_scheduler_type": "constant",
    f"{CRITIC}.optim.lr_scheduler_type": "constant",
}
"""Besides, with the FSDP engine."""
MEGATRON_DEFAULTS: Mapping[str, object] = {
    f"{ACTOR}.strategy": "megatron",
    f"{ACTOR}.optim.lr_decay_style": "constant",
    f"{CRITIC}.optim.lr_decay_style": "constant",
    f"{ACTOR}.megatron.tensor_model_parallel_size": 1,
    f"{ACTOR}.megatron.pipeline_model_parallel_size": 1,
    f"{ACTOR}.megatron.context_parallel_size": 1,
    f"{ACTOR}.megatron.sequence_parallel": True,
    f"{ACTOR}.megatron.use_distributed_optimizer": True,
}
"""Besides, with the Megatron engine."""
