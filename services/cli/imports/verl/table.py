"""Table of verl's keys: what each becomes, or why it is left out."""

from __future__ import annotations

from services.cli.imports.rules import Field, Fixed, Kind, Source
from services.cli.imports.verl import objective, sampling, training
from services.cli.imports.verl.defaults import ACTOR, CRITIC, DEFAULTS, FSDP_DEFAULTS, MEGATRON_DEFAULTS, ROLLOUT

NAME = "verl 0.9.1"
WHOLE = "rollouts are sampled from the whole distribution: the loss's ratio needs its log-probs"
ENGINE = "vLLM's own choice, or of the rollout server"
KERNEL = "a choice of kernels, of the learner"
TOOLS = "multi-turn rollouts with tools have no counterpart"
CODE = "a job names an installed verifier and carries no code (entry points `millrace.verifiers`)"
TRACKING = "metrics are served to Prometheus, records by `millrace show`"
LAYOUT = "the reference and the critic have the actor's ranks and layout"
MODEL_REWARD = "reward models have no counterpart: verifiers judge"
VERIFIER = "the verifier is chosen by data_source, or by reward.verifiers"
OFFLOAD = "there is no offloading: learner and rollout servers have devices of their own"
AGE = "asynchronous here by off_policy.max_off_policy_steps; weights are published after every step"

FIELDS = {
    "actor_rollout_ref.model.path": Field("model.path", Kind.TEXT),
    "actor_rollout_ref.ref.model.path": Field("reference.path", Kind.TEXT),
    "data.shuffle": Field("data.shuffle", Kind.TRUTH),
    "data.seed": Field("data.seed", Kind.INTEGER),
    f"{ROLLOUT}.n": Field("rollout.group_size", Kind.INTEGER),
    f"{ROLLOUT}.temperature": Field("rollout.temperature", Kind.NUMBER),
    f"{ROLLOUT}.tensor_model_parallel_size": Field("rollout.tensor_parallel_size", Kind.INTEGER),
    f"{ROLLOUT}.gpu_memory_utilization": Field("rollout.gpu_memory_utilization", Kind.NUMBER),
    f"{ROLLOUT}.enforce_eager": Field("rollout.enforce_eager", Kind.TRUTH),
    f"{ACTOR}.ppo_epochs": Field("learner.ppo_epochs", Kind.INTEGER),
    f"{ACTOR}.entropy_coeff": Field("algorithm.entropy_coefficient", Kind.NUMBER),
}
FIXED = {
    f"{ROLLOUT}.top_p": Fixed((1.0,), "the whole distribution", WHOLE),
    f"{ROLLOUT}.top_k": Fixed((-1, 0), "the whole distribution", WHOLE),
    f"{ROLLOUT}.do_sample": Fixed((True,), "rollouts are sampled", "rollouts are always sampled"),
    f"{ROLLOUT}.ignore_eos": Fixed(
        (False,), "a response ends with its end token", "a response ends with its end token"
    ),
    f"{ROLLOUT}.name": Fixed(("vllm",), "the engine is vLLM", "the engine is vLLM"),
    f"{ROLLOUT}.multi_turn.enable": Fixed((False,), "one turn", TOOLS),
    f"{ROLLOUT}.quantization": Fixed(
        (), "no quantization", "the engine samples with the learner's weights, without quantization"
    ),
    f"{ACTOR}.shuffle": Fixed((False,), "a batch is trained in its order", "a batch is trained in its order"),
    f"{ACTOR}.freeze_vision_tower": Fixed((False,), "text models only", "text models only"),
    "actor_rollout_ref.model.lora_adapter_path": Fixed(
        (), "adapters are new at first", "adapters begin anew: merge these into the model first"
    ),
    "actor_rollout_ref.model.custom_chat_template": Fixed(
        (), "the model's chat template", "the template is the model's own"
    ),
    "actor_rollout_ref.model.mtp.enable": Fixed((False,), "one head", "multi-token prediction has no counterpart"),
    "data.prompt_key": Fixed(
        ("prompt",), "the column is `prompt`", "the column is `prompt`: name yours in data.train.prompt_key"
    ),
    "data.reward_fn_key": Fixed(
        ("data_source",), "the column is `data_source`", "the column is `data_source`: rename yours"
    ),
    "data.custom_cls.path": Fixed(
        (), "files are read as they are", "a job carries no code: write the rows into a file"
    ),
    "reward_model.enable": Fixed((False,), MODEL_REWARD, MODEL_REWARD),
    "reward.reward_model.enable": Fixed((False,), MODEL_REWARD, MODEL_REWARD),
    "reward_model.reward_manager": Fixed(("naive", "dapo", "prime", "batch"), VERIFIER, VERIFIER),
    "reward.reward_manager.name": Fixed(("naive", "dapo", "prime", "batch"), VERIFIER, VERIFIER),
    "custom_reward_function.path": Fixed((), VERIFIER, CODE),
    "reward.custom_reward_function.path": Fixed((), VERIFIER, CODE),
    "algorithm.use_pf_ppo": Fixed((False,), "no reweighting", "PF-PPO's reweighting has no counterpart"),
    "distillation.enabled": Fixed((False,), "no teacher", "teachers have no counterpart"),
    "trainer.val_only": Fixed((False,), "the job trains", "a job trains"),
    "trainer.resume_from_path": Fixed((), "a job begins with the model", "a checkpoint of verl cannot be loaded"),
}
DIFFERING = {
    "data.apply_chat_template_kwargs*": "the model's chat template is used with its own defaults",
    "actor_rollout_ref.model.override_config*": "the model's config.json is used as it is: change it there",
    "critic.model.override_config*": "the model's config.json is used as it is: change it there",
    f"{ROLLOUT}.agent.custom_async_server.path": "a job carries no code",
    "actor@*": "the learner is Megatron-core",
    "critic@*": "the learner is Megatron-core",
    "critic": "the learner is Megatron-core",
    "*@*": "a group of Hydra's configuration that is not read",
}
"""Keys that would change what is learned."""
LEFT_OUT = {
    "*.profiler.*": "profiling has no counterpart",
    "global_profiler.*": "profiling has no counterpart",
    f"{ROLLOUT}.multi_turn.*": "rollouts have one turn",
    f"{ROLLOUT}.agent.*": "rollouts have one turn",
    f"{ROLLOUT}.log_prob_*": "the learner fills micro-batches by tokens",
    f"{ROLLOUT}.prompt_length": "model.max_model_len bounds a prompt",
    f"{ROLLOUT}.response_length": "rollout.rollout_max_tokens bounds a response",
    f"{ROLLOUT}.max_model_len": "model.max_model_len is the longest prompt + response",
    f"{ROLLOUT}.nnodes": "start as many rollout servers as you like, at any time",
    f"{ROLLOUT}.n_gpus_per_node": "start as many rollout servers as you like, at any time",
    f"{ROLLOUT}.calculate_log_probs": "the engine's log-probs always come with the samples",
    f"{ROLLOUT}.dtype": "model.dtype",
    f"{ROLLOUT}.free_cache_engine": OFFLOAD,
    f"{ROLLOUT}.*": ENGINE,
    "actor_rollout_ref.ref.*": LAYOUT,
    "actor_rollout_ref.hybrid_engine": OFFLOAD,
    "actor_rollout_ref.nccl_timeout": "every wait has a deadline",
    f"{ACTOR}.fsdp_config.*": OFFLOAD,
    f"{ACTOR}.*offload": OFFLOAD,
    f"{ACTOR}.megatron.override_transformer_config.*": "the model's own config, and a choice of kernels",
    f"{ACTOR}.megatron.*": "Megatron's machinery: layouts, checkpoints and bridges",
    f"{ACTOR}.checkpoint.*": "a checkpoint holds all that resuming needs, and is exported (checkpoint.export)",
    f"{ACTOR}.optim.*": "the optimizer is AdamW with float32 masters; its schedule falls over learner.steps",
    f"{ACTOR}.policy_loss.*": "of a loss that is not chosen",
    f"{ACTOR}.tau_*": "of a loss that is not chosen",
    f"{ACTOR}.use_rollout_log_probs": "see algorithm.proximal_policy",
    f"{ACTOR}.data_loader_seed": "a batch is trained in its order",
    f"{ACTOR}.rollout_n": "rollout.group_size",
    f"{ACTOR}.calculate_*": "metrics of a step are fixed",
    **{
        f"{ACTOR}.{name}": KERNEL
        for name in (
            "use_torch_compile", "use_fused_kernels", "use_prefix_grouper", "use_remove_padding", "entropy_*", "pad_to_length*", "qat.*",
            "_target_", "veomni.*", "torchtitan.*", "engine.*", "deepspeed*", "strategy", "mindspeed.*",
        )
    },
    "actor_rollout_ref.model.lora*": "adapters have rank, alpha, target modules and dropout",
    "actor_rollout_ref.model.target_modules": "all weights are trained",
    "actor_rollout_ref.model.exclude_modules": "adapters are put on the modules that are named",
    "actor_rollout_ref.model.trust_remote_code": "code of a model is never run",
    "actor_rollout_ref.model.mtp.*": "one head",
    "actor_rollout_ref.model.*": KERNEL,
    f"{CRITIC}.*offload": OFFLOAD,
    f"{CRITIC}.optim.*": "the optimizer is AdamW with float32 masters; its schedule falls over learner.steps",
    f"{CRITIC}.*": LAYOUT,
    "data.gen_batch_size": "sampling is paced by the share of groups that the filter keeps",
    "data.val_batch_size": "evaluation goes through the same rollout servers",
    "data.return_*": "rows are read as messages",
    "data.filter_overlong_prompts_workers": "rows are read when they are needed",
    "data.dataloader_num_workers": "rows are read when they are needed",
    **{
        f"data.{name}": "rows are messages of text"
        for name in (
            "image_*", "video_*", "audio_*", "mm_processor_kwargs*", "tool_config_path", "function_tool_path", "tokenizer", "use_shm",
            "trust_remote_code", "custom_cls.*", "validation_shuffle", "datagen.*", "sampler.*",
        )
    },
    "reward_model.*": VERIFIER,
    "reward.*": VERIFIER,
    "custom_reward_function.*": VERIFIER,
    "sandbox_fusion.*": "verifiers run in processes that can be killed",
    "algorithm.rollout_correction*": "no correction",
    "algorithm.rollout_is*": "no correction",
    "algorithm.pf_ppo.*": "no reweighting",
    "algorithm.filter_groups.max_inflight_gen_batches": "slots bound the groups in flight: (max_off_policy_steps + 1) × groups of a step",
    "algorithm.filter_groups._target_": "verl's own class",
    "distillation.*": "no teacher",
    "trainer.logger": TRACKING,
    "trainer.project_name": TRACKING,
    "trainer.experiment_name": "name is `job`",
    "trainer.log_val_generations": "`millrace rollouts` shows samples",
    "trainer.*_data_dir": "`millrace rollouts` shows samples",
    "trainer.balance_batch": "micro-batches are balanced by tokens",
    "trainer.resume_mode": "a job resumes by itself",
    "trainer.max_critic_ckpt_to_keep": "checkpoint.keep_last: a checkpoint holds actor and critic",
    "trainer.default_*_dir": "a job has a folder of its own",
    "trainer.del_local_ckpt_after_load": "checkpoint.keep_last",
    "trainer.remove_previous_ckpt_in_save": "checkpoint.keep_last",
    "trainer.device": "the platform of the learner and the servers",
    "trainer.v1.*": AGE,
    **{
        f"trainer.{name}": "of verl's own processes"
        for name in (
            "use_v1", "use_legacy_worker_impl", "ray_wait_register_center_timeout", "esi_redundant_time", "checkpoint_callback_class",
            "rollout_*", "npu_*", "worker_env.*",
        )
    },
    "async_training.*": AGE,
    "rollout.*": "start as many rollout servers as you like, at any time",
    "ray_kwargs.*": "there is no Ray",
    "ray_init.*": "there is no Ray",
    "transfer_queue.*": "groups come over Redis Streams",
    "skip.*": "samples are not taken from files",
    "hydra.*": "of Hydra",
    "defaults": "of Hydra",
    "model_engine": "the learner is Megatron-core",
    "_target_": "verl's own class",
    "*._target_": "verl's own class",
}  # fmt: skip
DERIVATIONS = (
    sampling.name, sampling.sources, sampling.lengths, sampling.truncation, training.engine_layout,
    objective.advantages, objective.loss, objective.mean, objective.kl, objective.filter_groups, objective.overlong_buffer,
    objective.correction,
    training.batches, training.actor_optimizer, training.critic, training.memory, training.ranks, training.routers,
    training.adapters, sampling.off_policy, sampling.steps, sampling.checkpoints, sampling.evaluation,
)  # fmt: skip


def source(*, megatron: bool) -> Source:
    """The tables of verl, with the defaults of the FSDP or the Megatron engine."""
    defaults = {**DEFAULTS, **(MEGATRON_DEFAULTS if megatron else FSDP_DEFAULTS)}
    return Source(NAME, defaults, FIELDS, FIXED, DERIVATIONS, DIFFERING, LEFT_OUT)
