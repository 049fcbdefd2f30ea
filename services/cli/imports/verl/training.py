"""Training of verl's trainer: batches, optimizers, critic, memory and ranks."""

from __future__ import annotations

from services.cli.imports.conversions import experts, fitting_mini_batch, router_losses, schedule
from services.cli.imports.draft import Draft
from services.cli.imports.settings import Settings
from services.cli.imports.verl.defaults import ACTOR, CRITIC, ROLLOUT

MODEL = "actor_rollout_ref.model"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"


def is_megatron(settings: Settings) -> bool:
    """Whether the Megatron engine trains."""
    strategy = settings.text(f"{ACTOR}.strategy")
    return strategy == "megatron" or any(
        key.startswith(f"{ACTOR}.megatron.") for key in (*settings.given, *settings.defaults)
    )


def batches(settings: Settings, draft: Draft) -> None:
    """Prompts of a batch and of one optimizer step."""
    whole, part, required = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", "async_training.require_batches"
    groups, size = settings.integer(whole) or 0, settings.integer(part) or 1
    if groups <= 0:
        groups = size * (settings.integer(required) or 1)
        remark = "no batch is set: ppo_mini_batch_size × async_training.require_batches"
        draft.set("algorithm.filter_groups_train_batch_size", groups, whole, required, remark=remark)
    else:
        draft.set("algorithm.filter_groups_train_batch_size", groups, whole)
    fitting, remark = fitting_mini_batch(groups, size)
    draft.set("learner.mini_batch_size", fitting, part, remark=remark, fits=not remark)


def actor_optimizer(settings: Settings, draft: Draft) -> None:
    """AdamW of the actor."""
    _optimizer(settings, draft, ACTOR, "learner")


def critic(settings: Settings, draft: Draft) -> None:
    """The critic, of advantage estimator gae."""
    enable, gae = f"{CRITIC}.enable", settings.text("algorithm.adv_estimator") == "gae"
    if not gae:
        if settings.truth(enable):
            draft.differ(enable, "a critic has a use for adv_estimator gae only")
        for key in (*settings.given, *settings.defaults, "trainer.critic_warmup"):
            if key.startswith(f"{CRITIC}.") or key == "trainer.critic_warmup":
                draft.leave(key, "adv_estimator is not gae: there is no critic")
        return
    if settings.truth(enable) is False:
        draft.differ(enable, "adv_estimator gae needs a critic")
    else:
        draft.leave(enable, "adv_estimator gae has a critic")
    _critic_path(settings, draft)
    _optimizer(settings, draft, CRITIC, "critic")
    clip = f"{CRITIC}.cliprange_value"
    draft.set("critic.value_clip", settings.number(clip), clip)
    warmup = settings.integer("trainer.critic_warmup") or 0
    remark = f"verl trains the actor from step {warmup} on" if warmup > 0 else ""
    draft.set("critic.warmup_steps", max(0, warmup - 1), "trainer.critic_warmup", remark=remark)
    for name in ("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode"):
        key, actor = f"{CRITIC}.{name}", f"{ACTOR}.{name}"
        same = not settings.is_given(key) or settings.value(key) == settings.value(actor)
        draft.leave(key, "the critic trains on the actor's batches, with the actor's mean", fits=same)


def _critic_path(settings: Settings, draft: Draft) -> None:
    key = f"{CRITIC}.model.path"
    path = settings.text(key)
    if path is None:
        remark = "critic.model.path is not set: it begins with the actor's weights"
        draft.set("critic", {}, "algorithm.adv_estimator", remark=remark)
    else:
        draft.set("critic.path", path, key)


def _optimizer(settings: Settings, draft: Draft, role: str, section: str) -> None:
    name, old_clip, clip, betas = (
        f"{role}.optim.optimizer",
        f"{role}.grad_clip",
        f"{role}.optim.clip_grad",
        f"{role}.optim.betas",
    )
    kind = (settings.text(name) or "adamw").lower()
    draft.leave(name, "the optimizer is AdamW", fits=kind in {"adam", "adamw"})
    lr, decay = f"{role}.optim.lr", f"{role}.optim.weight_decay"
    draft.set(f"{section}.lr", settings.number(lr), lr)
    draft.set(f"{section}.weight_decay", settings.number(decay), decay)
    chosen = settings.first(clip, f"{role}.optim.grad_clip", old_clip)
    draft.set(f"{section}.clip_grad", settings.number(chosen), chosen)
    for key in (clip, f"{role}.optim.grad_clip", old_clip):
        if key != chosen:
            same = settings.value(key) in {None, settings.value(chosen)}
            draft.leave(key, f"{chosen} counts", fits=same)
    if len(values := settings.items(betas)) == 2:
        draft.set(f"{section}.adam_beta1", values[0], betas)
        draft.set(f"{section}.adam_beta2", values[1], betas)
    elif values:
        draft.differ(betas, "must be two numbers")
    _schedule(settings, draft, role, section)


def _schedule(settings: Settings, draft: Draft, role: str, section: str) -> None:
    steps, share = f"{role}.optim.lr_warmup_steps", f"{role}.optim.lr_warmup_steps_ratio"
    count, ratio = settings.integer(steps) or 0, settings.number(share) or 0.0
    if count > 0:
        draft.set(f"{section}.lr_warmup_steps", count, steps)
        draft.leave(share, "lr_warmup_steps counts")
    elif ratio > 0.0:
        draft.set(f"{section}.lr_warmup_share", ratio, share)
        draft.leave(steps, "lr_warmup_steps_ratio counts")
    else:
        draft.set(f"{section}.lr_warmup_steps", 0, steps, share)
    style = settings.first(
        *(f"{role}.optim.{name}" for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style"))
    )
    schedule(settings, draft, section, style, f"{role}.optim.min_lr_ratio", f"{role}.optim.min_lr", f"{role}.optim.lr")
    total, cycles = f"{role}.optim.lr_decay_steps", f"{role}.optim.num_cycles"
    draft.leave(total, "a schedule falls over learner.steps", fits=not (settings.is_given(total)))
    usual = settings.number(cycles) in {None, 0.5}
    draft.leave(cycles, "a cosine is half a period", fits=usual)


def memory(settings: Settings, draft: Draft) -> None:
    """Tokens of a micro-batch, and recomputed activations."""
    dynamic, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    micro = settings.first(f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size")
    longest = (settings.integer("data.max_prompt_length") or 0) + (settings.integer("data.max_response_length") or 0)
    if settings.truth(dynamic):
        split = ulysses(settings)
        per_rank = (settings.integer(tokens) or longest) * split
        remark = f"× {split} ranks of a sequence" if split > 1 else ""
        draft.set("learner.max_tokens_per_micro_batch", per_rank, tokens, dynamic, remark=remark)
        draft.leave(micro, "use_dynamic_bsz counts tokens")
    elif settings.is_given(micro):
        count = settings.integer(micro) or 1
        remark = f"{count} × (max_prompt_length + max_response_length), tokens"
        draft.set("learner.max_tokens_per_micro_batch", count * longest, micro, remark=remark)
        draft.leave(dynamic, "micro-batches are always filled by tokens")
        draft.leave(tokens, "use_dynamic_bsz is off")
    else:
        draft.leave(dynamic, "micro-batches are always filled by tokens")
        draft.leave(tokens, "use_dynamic_bsz is off")
    for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"):
        if not draft.has_line(f"{ACTOR}.{name}"):
            draft.leave(f"{ACTOR}.{name}", "learner.max_tokens_per_micro_batch counts")
    _recompute(settings, draft)


def _recompute(settings: Settings, draft: Draft) -> None:
    checkpointing, granularity = (
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        f"{TRANSFORMER}.recompute_granularity",
    )
    if not is_megatron(settings):
        draft.set("learner.recompute", "full" if settings.truth(checkpointing) else "none", checkpointing)
        return
    draft.leave(checkpointing, "with Megatron, recompute_granularity counts")
    choice = settings.text(granularity)
    if choice in {"full", "selective"}:
        draft.set("learner.recompute", choice, granularity)
    else:
        draft.leave(granularity, "nothing is computed again")
    for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
        draft.leave(
            f"{TRANSFORMER}.{name}", "full keeps the inputs of all layers, selective leaves out those of the MLPs"
        )


def ulysses(settings: Settings) -> int:
    """Ranks that share a sequence under FSDP."""
    key = settings.first(
        f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    )
    return max(1, settings.integer(key) or 1)


def ranks(settings: Settings, draft: Draft) -> None:
    """Tensor, pipeline, context, data and expert parallelism of the learner."""
    nodes, per_node = "trainer.nnodes", "trainer.n_gpus_per_node"
    devices = (settings.integer(nodes) or 1) * (settings.integer(per_node) or 1)
    megatron = is_megatron(settings)
    shared = _megatron_sizes(settings, draft) if megatron else _fsdp_sizes(settings, draft)
    divided, left = divmod(devices, shared)
    remark = f"{devices} devices ÷ {shared} that share a model" if shared > 1 else f"{devices} devices"
    remark += " is no integer" if left else "; they only train here: rollout servers have devices of their own"
    draft.set("learner.data_parallel_size", max(1, divided), nodes, per_node, remark=remark, fits=not left)
    if megatron:
        experts(settings, draft, f"{ACTOR}.megatron.expert_model_parallel_size")


def routers(settings: Settings, draft: Draft) -> None:
    """Losses of the routers of a mixture of experts."""
    router_losses(settings, draft, lambda name: f"{TRANSFORMER}.{name}")


def _megatron_sizes(settings: Settings, draft: Draft) -> int:
    sizes = {}
    for name, theirs in (("tensor", "tensor_model"), ("pipeline", "pipeline_model"), ("context", "context")):
        key = f"{ACTOR}.megatron.{theirs}_parallel_size"
        sizes[name] = settings.integer(key) or 1
        draft.set(f"learner.{name}_parallel_size", sizes[name], key)
    for name in ("expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"):
        key = f"{ACTOR}.megatron.{name}"
        draft.leave(key, "there is no such split of a model", fits=settings.integer(key) in {None, 1})
    sequence, distributed = f"{ACTOR}.megatron.sequence_parallel", f"{ACTOR}.megatron.use_distributed_optimizer"
    if sizes["tensor"] > 1:
        draft.set("learner.sequence_parallel", bool(settings.truth(sequence)), sequence)
    else:
        draft.leave(sequence, "there is no tensor parallelism")
    draft.set("learner.use_distributed_optimizer", bool(settings.truth(distributed)), distributed)
    return sizes["tensor"] * sizes["pipeline"] * sizes["context"]


def _fsdp_sizes(settings: Settings, draft: Draft) -> int:
    split = ulysses(settings)
    for name in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        key = f"{ACTOR}.{name}"
        draft.leave(key, "a sequence is computed by one rank", fits=split == 1)
    draft.set("learner.backend", "fsdp2", f"{ACTOR}.strategy")
    size = f"{ACTOR}.fsdp_config.fsdp_size"
    if (settings.integer(size) or -1) > 0:
        draft.set("learner.fsdp_size", settings.integer(size), size)
    else:
        draft.leave(size, "all ranks hold one copy of the weights between them")
    return split


def adapters(settings: Settings, draft: Draft) -> None:
    """Low-rank adapters, which FSDP alone has here."""
    rank = settings.first(f"{MODEL}.lora_rank", f"{MODEL}.lora.rank")
    alpha = settings.first(f"{MODEL}.lora_alpha", f"{MODEL}.lora.alpha")
    modules = settings.first(f"{MODEL}.target_modules", f"{MODEL}.lora.target_modules")
    if not (settings.integer(rank) or 0):
        for key in (rank, alpha, modules):
            draft.leave(key, "all weights are trained")
        return
    if is_megatron(settings):
        draft.differ(rank, "Megatron trains all weights; backend fsdp2 has adapters")
        return
    named = [str(item) for item in settings.items(modules)]
    lora: dict[str, object] = {"rank": settings.integer(rank), "alpha": settings.integer(alpha) or 16}
    if named not in ([], ["all-linear"]):
        lora["target_modules"] = named
    draft.set("model.lora", lora, rank, alpha, modules)


def engine_layout(settings: Settings, draft: Draft) -> None:
    """Rollout servers: devices of one server, and groups at once."""
    key, count = f"{ROLLOUT}.max_num_seqs", settings.integer(f"{ROLLOUT}.n") or 1
    if settings.is_given(key):
        groups = min(4096, max(1, (settings.integer(key) or 1) // count))
        draft.set("rollout.max_concurrent_groups", groups, key, remark=f"max_num_seqs ÷ n ({count})")
    for name in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"):
        size = settings.integer(f"{ROLLOUT}.{name}")
        draft.leave(f"{ROLLOUT}.{name}", "start more rollout servers instead", fits=size in {None, 1})
