"""Keys of MindSpeed-RL that have no counterpart, by the reason why."""

from __future__ import annotations

from collections.abc import Mapping

ROLES = ("megatron_training", "actor_config", "critic_config", "ref_config", "reward_config")
_ARCHITECTURE = (
    "use_mcore_models", "spec", "use_rotary_position_embeddings", "rope_scaling_*", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "max_position_embeddings", "beta_fast", "beta_slow", "num_layers", "hidden_size",
    "ffn_hidden_size", "num_attention_heads", "kv_channels", "group_query_attention", "num_query_groups",
    "untie_embeddings_and_output_weights", "multi_latent_attention", "qk_*", "q_lora_rank", "kv_lora_rank", "v_head_dim", "moe_*",
    "seq_aux", "first_k_dense_replace", "num_experts", "n_shared_experts", "norm_topk_prob", "make_vocab_size_divisible_by",
    "padded_vocab_size", "add_qkv_bias", "disable_bias_linear", "position_embedding_type", "rotary_base", "normalization",
    "norm_epsilon", "swiglu", "attention_bias", "attention_mask_type", "vocab_extra_ids", "mm_model", "transformer_impl", "model",
    "use_fused_moe_token_permute_and_unpermute", "noop_layers",
)  # fmt: skip
_KERNELS = (
    "use_flash_attn", "use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb", "shape_order", "no_bias_dropout_fusion",
    "no_masked_softmax_fusion", "attention_softmax_in_fp32", "no_gradient_accumulation_fusion", "gemm_gradient_accumulation_fusion",
    "distributed_backend", "ddp_bucket_size", "overlap_grad_reduce", "overlap_param_gather", "accumulate_allreduce_grads_in_fp32",
    "reuse_fp32_param", "use_ascend_coc", "coc_*", "swap_optimizer", "swap_attention", "use_tp_pp_dp_mapping", "npu_deterministic",
    "ai_framework", "no_check_for_nan_in_loss_and_grad", "initial_loss_scale", "use_cp_send_recv_overlap",
    "use_fused_ring_attention_update", "context_parallel_algo", "reset_position_ids", "reset_attention_mask", "pad_to_multiple_of",
    "variable_seq_lengths", "no_pad_to_seq_lengths", "use_kv_cache", "enable_high_availability", "recompute_method",
    "recompute_num_layers", "recompute_activation_function", "num_layer_list", "log_throughput",
)  # fmt: skip
_DATA = (
    "tokenizer_type", "tokenizer_not_use_fast", "tokenizer_padding_side", "dataset_additional_keys", "is_instruction_dataset",
    "is_pairwise_dataset", "full_shuffle_instruction_dataset", "dataloader_type", "num_workers", "prompt_type", "prompt_type_path",
    "seq_length", "split",
)  # fmt: skip
_INITIAL = ("init_method_std", "load", "save", "pretrained_checkpoint", "load_checkpoint_loosely", "no_save_optim", "no_save_rng",
            "no_shared_storage", "finetune", "no_load_optim", "no_load_rng")  # fmt: skip
_OTHERS = (
    "log_interval", "eval_iters", "eval_interval", "skip_train", "algorithm", "do_sample", "dpo_loss_type", "ref_model", "refer_model_iter",
)  # fmt: skip
REASONS: Mapping[str, tuple[str, ...]] = {
    "the architecture is that of the model's config.json": _ARCHITECTURE,
    "a choice of kernels, memory or communication, of the learner": _KERNELS,
    "rows are read from parquet or jsonl as they are, with the model's own tokenizer and chat template": _DATA,
    "a job begins with the Hugging Face model and has a folder of its own (checkpoint.load begins with another job's)": _INITIAL,
    "of no use to the job": _OTHERS,
    "all weights are trained": ("lora_*",),
}
RL_REASONS: Mapping[str, tuple[str, ...]] = {
    "work moves as soon as it is there": (
        "blocking", "async_engine", "guarantee_order", "*_dispatch_size", "zmq_communication", "data_strategy", "transfer_queue_*",
        "num_cpus_*", "num_samples_per_step", "hccl_buffersize", "runtime_env_path", "integrated_mode_config", "tp_split_expert",
    ),
    "sampling and training have devices of their own": ("use_integrated_worker", "*_resource", "*_resource.*", "colocate_*"),
    "metrics are served to Prometheus, records by `millrace show`": (
        "use_tensorboard", "use_wandb", "wandb_*", "use_swanlab", "swanlab_*", "log_max_throughput",
    ),
    "the learner fills micro-batches by tokens and balances them": (
        "*_forward_micro_batch_size", "use_dp_batch_balance", "use_remove_padding", "*max_packing_token_size", "*dynamic_max_batch_size",
    ),
    "rollouts have one turn": (
        "tool_*", "max_tool_calls", "max_parallel_calls", "max_total_response_length", "max_tool_response_length",
    ),
    "text models only": ("reuse_image_embeds",),
    "of no use to the job": ("beta", "advantage_whiten", "verifier_parallel", "require_max_age_all_finished", "share_backbone"),
}  # fmt: skip
GENERATE_REASONS: Mapping[str, tuple[str, ...]] = {
    "there is no offloading: learner and rollout servers have devices of their own": ("offload_train_*",),
    "vLLM's own choice, or of the rollout server": (
        "max_num_batched_tokens", "dtype", "enable_prefix_caching", "num_scheduler_steps", "torchair_graph", "enable_expert_parallel",
        "ascend_scheduler_config_enabled", "expert_map_path", "eplb_*", "data_parallel_size", "limit_mm_*", "sampling_config.detokenize",
        "sampling_config.logprobs", "sampling_config.seed",
    ),
    "code of a model is never run": ("trust_remote_code",),
    "the tokenizer is the model's": ("tokenizer_name_or_path",),
}  # fmt: skip


def left_out() -> dict[str, str]:
    """Pattern of keys → reason."""
    found = {f"{role}.{name}": reason for reason, names in REASONS.items() for name in names for role in ROLES}
    found |= {f"rl_config.{name}": reason for reason, names in RL_REASONS.items() for name in names}
    found |= {f"generate_config.{name}": reason for reason, names in GENERATE_REASONS.items() for name in names}
    found |= {"profiler_config.*": "profiling has no counterpart", "msprobe_config.*": "profiling has no counterpart"}
    found |= {"ref_config.*": "the reference has the actor's ranks and layout"}
    found |= {
        "defaults": "names files of the model's architecture, which config.json has",
        "model.*": "the architecture is that of the model's config.json",
    }
    return found
