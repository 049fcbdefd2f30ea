"""Unknown keys of a document: where such a setting stands, what TRL or verl call so, or which key of the section is near."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.common.errors import did_you_mean

RENAMED = {
    "adv_estimator": "algorithm.advantage_estimator",
    "beta": "algorithm.kl_coefficient",
    "clip_ratio": "algorithm.clip_ratio_low",
    "clip_ratio_c": "algorithm.dual_clip",
    "critic_warmup": "critic.warmup_steps",
    "dataset": "data.train.source",
    "dataset_name": "data.train.source",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "epsilon": "algorithm.clip_ratio_low",
    "epsilon_high": "algorithm.clip_ratio_high",
    "eval_steps": "eval.interval_steps",
    "grad_clip": "learner.clip_grad",
    "gradient_checkpointing": "learner.recompute",
    "kl_coef": "algorithm.kl_coefficient",
    "kl_ctrl": "algorithm.kl_coefficient",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "kl_loss_type": "algorithm.kl_estimator",
    "kl_penalty": "algorithm.kl_estimator",
    "learning_rate": "learner.lr",
    "loss_agg_mode": "algorithm.token_level_loss",
    "loss_type": "algorithm.preset",
    "lr_scheduler_type": "learner.lr_schedule",
    "lr_warmup_steps_ratio": "learner.lr_warmup_share",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "max_completion_length": "rollout.rollout_max_tokens",
    "max_grad_norm": "learner.clip_grad",
    "max_response_length": "rollout.rollout_max_tokens",
    "max_steps": "learner.steps",
    "model_name_or_path": "model.path",
    "n": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "num_iterations": "learner.ppo_epochs",
    "per_device_train_batch_size": "algorithm.filter_groups_train_batch_size",
    "pipeline_model_parallel_size": "learner.pipeline_parallel_size",
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_micro_batch",
    "ppo_micro_batch_size_per_gpu": "learner.max_tokens_per_micro_batch",
    "ppo_mini_batch_size": "learner.mini_batch_size",
    "report_to": "trackers",
    "response_length": "rollout.rollout_max_tokens",
    "reward_funcs": "reward.verifiers",
    "reward_weights": "reward.rubrics",
    "save_freq": "checkpoint.interval_steps",
    "save_steps": "checkpoint.interval_steps",
    "save_total_limit": "checkpoint.keep_last",
    "scale_rewards": "algorithm.advantage_estimator",
    "tensor_model_parallel_size": "learner.tensor_parallel_size",
    "ulysses_sequence_parallel_size": "learner.context_parallel_size",
    "test_freq": "eval.interval_steps",
    "total_training_steps": "learner.steps",
    "train_batch_size": "algorithm.filter_groups_train_batch_size",
    "train_files": "data.train.source",
    "use_kl_loss": "algorithm.kl_coefficient",
    "val_files": "data.eval.source",
    "warmup_ratio": "learner.lr_warmup_share",
    "warmup_steps": "learner.lr_warmup_steps",
}
"""Names of TRL and verl → the field that is nearest to them. What they mean may differ in detail: docs/migrate.md."""
_WHOLE_DISTRIBUTION = "rollouts are sampled from the whole distribution, whose log-probs the loss's ratio needs"
_NO_LORA = "LoRA does not exist yet: all weights are trained"
_STEPS = "a job is counted in steps: learner.steps"
MISSING = {
    "gradient_accumulation_steps": "micro-batches are made by learner.max_tokens_per_micro_batch",
    "lora_alpha": _NO_LORA,
    "lora_rank": _NO_LORA,
    "max_prompt_length": "prompt and response share model.max_model_len",
    "min_p": _WHOLE_DISTRIBUTION,
    "nnodes": "learner.data_parallel_size and the other parallel sizes say how many devices train",
    "n_gpus_per_node": "learner.data_parallel_size and the other parallel sizes say how many devices train",
    "num_train_epochs": _STEPS,
    "output_dir": "a job's folder is <home>/jobs/<job>",
    "peft_config": _NO_LORA,
    "repetition_penalty": _WHOLE_DISTRIBUTION,
    "top_k": _WHOLE_DISTRIBUTION,
    "top_p": _WHOLE_DISTRIBUTION,
    "total_epochs": _STEPS,
    "use_vllm": "rollouts are always sampled by vLLM",
}
"""Names of TRL and verl that have no field here → why."""

_OF_JOBS = {"model", "data", "rollout"}
"""Sections by which a job spec is known."""


def explain(root: type[BaseModel], path: Sequence[str]) -> str:
    """What is wrong with a key that `root` does not know. Example: `is not a setting here; it is rollout.group_size`."""
    *section, key = path
    known = _paths(root)
    if RENAMED.get(key) in known:
        return f"is not a setting; what TRL or verl call so is {RENAMED[key]} here"
    if elsewhere := _by_name(root).get(key):
        return f"is not a setting here; it is {' or '.join(elsewhere)}"
    if key in MISSING and known.issuperset(_OF_JOBS):
        return f"is not a setting: {MISSING[key]}"
    return f"is not a setting{did_you_mean(key, _fields_at(root, section))}"


@cache
def _paths(root: type[BaseModel]) -> frozenset[str]:
    """Dotted paths of all sections and settings, without those below names that the user gives."""
    found: set[str] = set()
    for name, field in root.model_fields.items():
        found.add(name)
        found |= {f"{name}.{below}" for kind in _models(field.annotation) for below in _paths(kind)}
    return frozenset(found)


@cache
def _by_name(root: type[BaseModel]) -> dict[str, list[str]]:
    """Last part of a path → the paths that end so."""
    found: dict[str, list[str]] = {}
    for path in sorted(_paths(root)):
        found.setdefault(path.rpartition(".")[2], []).append(path)
    return found


def _fields_at(kind: Any, path: Sequence[str]) -> dict[str, FieldInfo]:  # noqa: ANN401  a type annotation
    """The fields of the section at a path; empty where the path leads through no section."""
    models = list(_models(kind))
    if not path:
        return {name: field for model in models for name, field in model.model_fields.items()}
    first, *rest = path
    for model in models:
        if first in model.model_fields:
            return _fields_at(model.model_fields[first].annotation, rest)
    for option in _options(kind):
        if get_origin(option) is dict:
            return _fields_at(get_args(option)[1], rest)
    return {}


def _models(kind: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401
    yield from (option for option in _options(kind) if isinstance(option, type) and issubclass(option, BaseModel))


def _options(kind: Any) -> Iterator[Any]:  # noqa: ANN401
    """The types that an annotation allows."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _options(get_args(kind)[0])
    elif origin in {Union, types.UnionType}:
        for option in get_args(kind):
            yield from _options(option)
    else:
        yield kind
