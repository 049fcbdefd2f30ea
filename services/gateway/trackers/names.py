"""Names of a job's figures in trackers: one table for all of them, in the groups that people know from other trainers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

STEP_NAMES: Mapping[str, str] = {
    "reward": "rollout/reward_mean",
    "accuracy": "rollout/accuracy_mean",
    "trained_reward": "rollout/trained_reward_mean",
    "trained_accuracy": "rollout/trained_accuracy_mean",
    "rollouts_judged": "rollout/judged",
    "rollouts_not_judged": "rollout/not_judged",
    "checks_over_limit": "rollout/checks_over_limit",
    "accept_rate": "rollout/accept_rate",
    "groups_judged": "rollout/groups_judged",
    "groups_trained": "rollout/groups_trained",
    "groups_sampled": "rollout/groups_sampled",
    "turns_mean": "rollout/turns_mean",
    "response_length_mean": "response_length/mean",
    "response_length_p95": "response_length/p95",
    "truncated_share": "response_length/clip_ratio",
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "entropy": "actor/entropy",
    "clip_fraction_high": "actor/clip_fraction_high",
    "clip_fraction_low": "actor/clip_fraction_low",
    "clip_fraction_dual": "actor/clip_fraction_dual",
    "reference_kl": "actor/reference_kl",
    "kl_coefficient": "actor/kl_coefficient",
    "optimizer_steps": "actor/optimizer_steps",
    "loss_tokens": "actor/loss_tokens",
    "sequences": "actor/sequences",
    "value_loss": "critic/value_loss",
    "explained_variance": "critic/explained_variance",
    "critic_grad_norm": "critic/grad_norm",
    "critic_lr": "critic/lr",
    "value_mean": "critic/value_mean",
    "return_mean": "critic/return_mean",
    "value_clip_fraction": "critic/clip_fraction",
    "router_load_max": "router/load_max",
    "router_load_min": "router/load_min",
    "router_entropy": "router/entropy",
    "router_balance_loss": "router/balance_loss",
    "mismatch_kl_k1": "off_policy/mismatch_kl_k1",
    "mismatch_kl_k3": "off_policy/mismatch_kl_k3",
    "max_abs_logprob_difference": "off_policy/max_abs_logprob_difference",
    "effective_sample_share": "off_policy/effective_sample_share",
    "importance_weight": "off_policy/importance_weight",
    "mask_fraction_positive": "off_policy/mask_fraction_positive",
    "mask_fraction_negative": "off_policy/mask_fraction_negative",
    "policy_age_mean": "off_policy/policy_age_mean",
    "policy_age_max": "off_policy/policy_age_max",
    "policy_version": "off_policy/policy_version",
    "wait_s": "timing_s/wait",
    "train_s": "timing_s/train",
    "step_s": "timing_s/step",
    "sync_s": "timing_s/weight_sync",
    "pause_s": "timing_s/pause",
    "generate_s_mean": "timing_s/generate_mean",
    "rollout_busy_s": "timing_s/rollout_busy",
    "generated_tokens_per_s": "perf/generated_tokens_per_s",
    "trained_tokens_per_s": "perf/trained_tokens_per_s",
    "trained_tokens": "perf/trained_tokens",
    "wasted_tokens": "perf/wasted_tokens",
    "rollout_servers": "perf/rollout_servers",
    "padding_share": "perf/padding_share",
    "micro_batches": "perf/micro_batches",
    "lineage": "training/lineage",
}
"""Field of a step's record → name. A figure that is not here is the loss function's own: `actor/<field>`."""

EVAL_NAMES: Mapping[str, str] = {
    "avg_at_k": "eval/avg_at_k",
    "avg_at_k_se": "eval/avg_at_k_se",
    "pass_at_k": "eval/pass_at_k",
    "pass_at_k_se": "eval/pass_at_k_se",
    "k": "eval/k",
    "tasks": "eval/tasks",
    "unanswered": "eval/unanswered",
    "rollouts_judged": "eval/judged",
    "rollouts_not_judged": "eval/not_judged",
    "checks_over_limit": "eval/checks_over_limit",
    "min_policy_version": "eval/policy_version_min",
    "max_policy_version": "eval/policy_version_max",
    "seconds": "timing_s/eval",
}
"""Field of an evaluation → name; any other figure is `eval/<field>`."""

_NO_FIGURES = frozenset({"step", "at", "replayed", "optimizer_step"})
_UNUSUAL = re.compile(r"[^A-Za-z0-9_./-]")
"""Characters that a tracker may refuse in a name."""


def figures(kind: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Name → value of a record of a step or an evaluation: its finite numbers. Tables (groups by fate) get a name for each entry."""
    names, rest = (STEP_NAMES, "actor") if kind == "step" else (EVAL_NAMES, "eval")
    return {
        names.get(field) or _UNUSUAL.sub("_", field if "/" in field else f"{rest}/{field}"): float(value)
        for field, value in _numbers(record)
        if field not in _NO_FIGURES
    }


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for field, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{field}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{field}", value
