"""Training of MindSpeed-RL: batches, ranks, optimizers, lengths and data; `actor_config` goes before `megatron_training`."""

from __future__ import annotations

from pathlib import PurePosixPath

from services.cli.imports.conversions import experts, fitting_mini_batch, router_losses, schedule
from services.cli.imports.draft import Draft
from services.cli.imports.mindspeed.objective import Stage, filters, stage_of
from services.cli.imports.settings import Settings

COMMON, ACTOR, CRITIC, RL, GENERATE = (
    "megatron_training",
    "actor_config",
    "critic_config",
    "rl_config",
    "generate_config",
)
OPTIMIZER = ("lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2")
OF_ACTOR = ("sequence_parallel", "use_distributed_optimizer", "seed", "recompute_granularity", "bf16")
"""Keys that are the actor's and are usually in `megatron_training`."""


def of_role(settings: Settings, role: str, name: str) -> str:
    """The key of this name that counts for a role."""
    return settings.first(f"{role}.{name}", f"{COMMON}.{name}")


def batches(settings: Settings, draft: Draft) -> None:
    """Prompts of a batch and of one optimizer step."""
    usual, filtered, part = (
        f"{COMMON}.global_batch_size",
        f"{RL}.filter_groups_train_batch_size",
        f"{RL}.mini_batch_size",
    )
    whole, other = (filtered, usual) if filters(settings) else (usual, filtered)
    groups = settings.integer(whole) or 1
    draft.set("algorithm.filter_groups_train_batch_size", groups, whole)
    draft.leave(other, f"{whole} counts; sampling is paced by the share of groups that the filter keeps")
    fitting, remark = fitting_mini_batch(groups, settings.integer(part) or 1)
    draft.set("learner.mini_batch_size", fitting, part, remark=remark, fits=not remark)


def actor(settings: Settings, draft: Draft) -> None:
    """Optimizer, precision and memory of the actor."""
    _optimizer(settings, draft, ACTOR, "learner")
    tensor = settings.integer(of_role(settings, ACTOR, "tensor_model_parallel_size")) or 1
    sequence, distributed, seed, granularity, bf16 = (of_role(settings, ACTOR, name) for name in OF_ACTOR)
    if tensor > 1:
        draft.set("learner.sequence_parallel", bool(settings.truth(sequence)), sequence)
    else:
        draft.leave(sequence, "there is no tensor parallelism")
    draft.set("learner.use_distributed_optimizer", bool(settings.truth(distributed)), distributed)
    if settings.is_given(seed):
        draft.set("learner.seed", settings.integer(seed), seed)
    choice = settings.text(granularity)
    if choice in {"full", "selective"}:
        draft.set("learner.recompute", choice, granularity)
    else:
        draft.leave(granularity, "nothing is computed again")
    draft.set("model.dtype", "float32" if settings.truth(bf16) is False else "bfloat16", bf16)
    _micro_batch(settings, draft)
    for name in ("attention_dropout", "hidden_dropout"):
        key = of_role(settings, ACTOR, name)
        draft.leave(key, "there is no dropout", fits=not settings.number(key))


def _micro_batch(settings: Settings, draft: Draft) -> None:
    dynamic, micro = f"{RL}.use_dynamic_bsz", of_role(settings, ACTOR, "micro_batch_size")
    packing = settings.first(f"{RL}.update_max_packing_token_size", f"{RL}.max_packing_token_size")
    if settings.truth(dynamic):
        draft.set("learner.max_tokens_per_micro_batch", settings.integer(packing), packing, dynamic)
        draft.leave(micro, "use_dynamic_bsz counts tokens")
    elif settings.is_given(micro):
        longest = (settings.integer(f"{RL}.max_prompt_length") or 0) + _response(settings)
        remark = "micro_batch_size × (max_prompt_length + max_tokens), tokens"
        draft.set("learner.max_tokens_per_micro_batch", (settings.integer(micro) or 1) * longest, micro, remark=remark)
    draft.leave(dynamic, "micro-batches are always filled by tokens")


def critic(settings: Settings, draft: Draft) -> None:
    """The critic, of stage ray_ppo."""
    clip = f"{RL}.cliprange_value"
    if stage_of(settings) is not Stage.PPO:
        for key in settings.given:
            if key.startswith(f"{CRITIC}."):
                draft.leave(key, "only ray_ppo has a critic")
        draft.leave(clip, "only ray_ppo has a critic")
        return
    _optimizer(settings, draft, CRITIC, "critic")
    draft.set("critic.value_clip", settings.number(clip), clip)
    for name in ("tensor", "pipeline"):
        key = f"{CRITIC}.{name}_model_parallel_size"
        same = settings.integer(key) in {
            None,
            settings.integer(of_role(settings, ACTOR, f"{name}_model_parallel_size")),
        }
        draft.leave(key, "the critic has the actor's ranks and layout", fits=same)
    draft.leave(f"{CRITIC}.micro_batch_size", "the learner fills micro-batches by tokens")


def _optimizer(settings: Settings, draft: Draft, role: str, section: str) -> None:
    for name in OPTIMIZER:
        key = of_role(settings, role, name)
        value = settings.number(key)
        if value is not None:
            draft.set(f"{section}.{name}", value, key)
    warmup = of_role(settings, role, "lr_warmup_fraction")
    share = settings.number(warmup) or 0.0
    if share > 0.0:
        draft.set(f"{section}.lr_warmup_share", share, warmup)
    else:
        draft.set(f"{section}.lr_warmup_steps", 0, warmup)
    style, least, lr = (of_role(settings, role, name) for name in ("lr_decay_style", "min_lr", "lr"))
    schedule(settings, draft, section, style, "", least, lr)
    kind = of_role(settings, role, "optimizer")
    draft.leave(kind, "the optimizer is AdamW", fits=settings.text(kind) in {None, "adam"})


def ranks(settings: Settings, draft: Draft) -> None:
    """Tensor, pipeline, context, data and expert parallelism of the learner."""
    shared = 1
    for name, theirs in (("tensor", "tensor_model"), ("pipeline", "pipeline_model"), ("context", "context")):
        key = of_role(settings, ACTOR, f"{theirs}_parallel_size")
        size = settings.integer(key) or 1
        shared *= size
        draft.set(f"learner.{name}_parallel_size", size, key)
    stages = of_role(settings, ACTOR, "num_layers_per_virtual_pipeline_stage")
    draft.leave(stages, "there is no such split of a model", fits=settings.integer(stages) in {None, 1})
    _data_parallel(settings, draft, shared)
    experts(settings, draft, of_role(settings, ACTOR, "expert_model_parallel_size"))


def _data_parallel(settings: Settings, draft: Draft, shared: int) -> None:
    """`shared`: NPUs that share a model."""
    npus = f"{RL}.actor_resource.num_npus"
    devices = settings.integer(npus)
    if devices is None:
        return
    divided, left = divmod(devices, shared)
    remark = f"{devices} NPUs ÷ {shared} that share a model"
    remark += " is no integer" if left else "; they only train here: rollout servers have NPUs of their own"
    draft.set(
        "learner.data_parallel_size",
        max(1, divided),
        npus,
        remark=remark,
        fits=not left,
    )
    critic_npus = f"{RL}.critic_resource.num_npus"
    if settings.integer(critic_npus) is not None and stage_of(settings) is Stage.PPO:
        fits = settings.integer(critic_npus) == devices
        draft.set("critic.placement", "own", critic_npus, remark="as many ranks as the actor has", fits=fits)
    else:
        draft.leave(critic_npus, "only ray_ppo has a critic")


def routers(settings: Settings, draft: Draft) -> None:
    """Losses of the routers of a mixture of experts."""
    router_losses(settings, draft, lambda name: of_role(settings, ACTOR, name))


def model(settings: Settings, draft: Draft) -> None:
    """The model's directory."""
    key = of_role(settings, ACTOR, "tokenizer_name_or_path")
    if settings.is_given(key):
        draft.set(
            "model.path",
            settings.text(key),
            key,
            remark="the Hugging Face directory; actor_config.load is a converted copy",
        )
    else:
        draft.leave(key, "not set: give model.path")


def data(settings: Settings, draft: Draft) -> None:
    """File of tasks."""
    key, shuffle = of_role(settings, ACTOR, "data_path"), of_role(settings, ACTOR, "no_shuffle")
    path = settings.text(key)
    if path is not None:
        fits = path.endswith((".parquet", ".jsonl"))
        name = path if fits else f"{PurePosixPath(path).name or 'data'}.parquet"
        remark = (
            "" if fits else "a folder of preprocessed rows there: name the parquet or jsonl file that they were made of"
        )
        draft.set("data.train.source", name, key, remark=remark, fits=fits)
    draft.set("data.shuffle", not settings.truth(shuffle), shuffle)


def rollouts(settings: Settings, draft: Draft) -> None:
    """Lengths, and groups at once."""
    tokens, longest = f"{GENERATE}.sampling_config.max_tokens", f"{RL}.rollout_max_tokens"
    response = _response(settings)
    draft.set("rollout.rollout_max_tokens", response, tokens)
    same = settings.value(longest) in {None, response} or not settings.truth(f"{RL}.overlong_buffer_enable")
    draft.leave(longest, "generate_config.sampling_config.max_tokens counts, as there", fits=same)
    prompt, whole = f"{RL}.max_prompt_length", f"{GENERATE}.max_model_len"
    room = (settings.integer(prompt) or 0) + response
    most = settings.integer(whole) or room
    draft.set(
        "model.max_model_len",
        min(room, most),
        prompt,
        whole,
        remark="the smaller of max_prompt_length + max_tokens and max_model_len",
    )
    seqs, count = f"{GENERATE}.max_num_seqs", settings.integer(f"{RL}.n_samples_per_prompt") or 1
    if settings.is_given(seqs):
        groups = min(4096, max(1, (settings.integer(seqs) or 1) // count))
        draft.set(
            "rollout.max_concurrent_groups", groups, seqs, remark=f"max_num_seqs ÷ n_samples_per_prompt ({count})"
        )
    for name in ("infer_pipeline_parallel_size", "infer_expert_parallel_size"):
        key = f"{GENERATE}.{name}"
        draft.leave(key, "start more rollout servers instead", fits=settings.integer(key) in {None, 1})


def _response(settings: Settings) -> int:
    return settings.integer(f"{GENERATE}.sampling_config.max_tokens") or 1


def off_policy(settings: Settings, draft: Draft) -> None:
    """How old a policy may be."""
    split = f"{RL}.partial_rollout_max_split"
    count = settings.integer(split) or 1
    if count > 1:
        remark = "a response may go on over so many iterations"
    else:
        remark = "MindSpeed-RL samples with the newest policy; 2 lets servers sample while the learner trains"
    draft.set("off_policy.max_off_policy_steps", count - 1, split, remark=remark)
