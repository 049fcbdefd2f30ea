"""Objective of MindSpeed-RL's trainers: losses, advantages, KL and filters. What a key means depends on the stage."""

from __future__ import annotations

from enum import StrEnum

from services.cli.imports.conversions import MOST_BATCHES
from services.cli.imports.draft import Draft
from services.cli.imports.settings import Settings
from services.common.errors import ConfigError

STAGE = "megatron_training.stage"
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


class Stage(StrEnum):
    """The trainers that are known here."""

    GRPO = "ray_grpo"
    DAPO = "ray_dapo"
    PPO = "ray_ppo"


def stage_of(settings: Settings) -> Stage:
    """The trainer. Raises ConfigError for those without a counterpart."""
    name = settings.text(STAGE)
    try:
        return Stage(name or Stage.GRPO)
    except ValueError:
        known = ", ".join(Stage)
        raise ConfigError(f"{name} has no counterpart; there are {known}", field=STAGE) from None


def stage(settings: Settings, draft: Draft) -> None:
    """Token loss, and the policy of its ratio."""
    chosen = stage_of(settings)
    draft.set("algorithm.loss", "dapo", STAGE, remark="PPO's clipped surrogate, as in all three stages")
    draft.set("algorithm.proximal_policy", "trainer", STAGE, remark="MindSpeed-RL's old log-probs are the trainer's")
    mean_over_tokens = "rl_config.token_level_loss"
    if chosen is Stage.DAPO:
        draft.set("algorithm.token_level_loss", bool(settings.truth(mean_over_tokens)), mean_over_tokens)
    else:
        draft.set("algorithm.token_level_loss", True, STAGE)
        draft.leave(
            mean_over_tokens,
            f"{chosen} always takes the mean over tokens",
            fits=settings.truth(mean_over_tokens) is not False,
        )
    _clips(settings, draft, chosen)


def _clips(settings: Settings, draft: Draft, chosen: Stage) -> None:
    both, higher = "rl_config.clip_ratio", "rl_config.clip_higher_enable"
    low, high = "rl_config.clip_ratio_low", "rl_config.clip_ratio_high"
    if chosen is Stage.DAPO and settings.truth(higher):
        draft.set("algorithm.clip_ratio_low", settings.number(low), low, higher)
        draft.set("algorithm.clip_ratio_high", settings.number(high), high, higher)
        draft.leave(both, "clip_ratio_low and clip_ratio_high count")
        return
    draft.set("algorithm.clip_ratio_low", settings.number(both), both)
    draft.set("algorithm.clip_ratio_high", settings.number(both), both)
    for key in (higher, low, high):
        draft.leave(key, "clip_ratio counts")


def advantages(settings: Settings, draft: Draft) -> None:
    """Estimator of advantages, with its discounts."""
    key = "rl_config.adv_estimator"
    name = settings.text(key) or "group_norm"
    estimator = {"group_norm": "grpo", "gae": "gae"}.get(name)
    remark = "" if estimator else f"{name} has no counterpart"
    draft.set("algorithm.advantage_estimator", estimator or "grpo", key, remark=remark, fits=bool(estimator))
    for discount in ("gamma", "lam"):
        source = f"rl_config.{discount}"
        if estimator == "gae":
            draft.set(f"algorithm.{discount}", settings.number(source), source)
        else:
            draft.leave(source, f"adv_estimator {name} has no use for it")


def kl(settings: Settings, draft: Draft) -> None:
    """KL to the reference: GRPO's in the loss, PPO's in the reward, DAPO's nowhere."""
    chosen, in_reward = stage_of(settings), "rl_config.use_kl_in_reward"
    coefficient, kind = "rl_config.init_kl_coef", "rl_config.kl_penalty"
    adaptive, target, horizon = "rl_config.kl_ctrl_type", "rl_config.kl_target", "rl_config.kl_horizon"
    wanted = chosen is Stage.GRPO or (chosen is Stage.PPO and bool(settings.truth(in_reward)))
    active = wanted and bool(settings.number(coefficient))
    if active:
        draft.set("reference", {}, coefficient, remark="the weights that the actor begins with")
        draft.set("algorithm.kl_coefficient", settings.number(coefficient), coefficient)
        draft.set("algorithm.kl_placement", "loss" if chosen is Stage.GRPO else "reward", STAGE)
        name = settings.text(kind) or ""
        known = name in KL_ESTIMATORS
        remark = "" if known else f"{name} has no counterpart"
        draft.set("algorithm.kl_estimator", KL_ESTIMATORS.get(name, "k3"), kind, remark=remark, fits=known)
        if settings.text(adaptive) == "adaptive":
            draft.set("algorithm.kl_target", settings.number(target), adaptive, target)
            draft.set("algorithm.kl_horizon", settings.integer(horizon), horizon)
    reason = "the coefficient is constant" if active else f"{chosen} takes no KL with these settings"
    for key in (coefficient, kind, adaptive, target, horizon, in_reward):
        if not draft.has_line(key):
            draft.leave(key, reason)


def filter_groups(settings: Settings, draft: Draft) -> None:
    """Dynamic sampling, of the DAPO stage."""
    enable, metric, most = (f"rl_config.filter_groups_{name}" for name in ("enable", "metric", "max_batches"))
    enabled = filters(settings)
    draft.set("algorithm.filter_groups_enable", enabled, enable)
    if enabled:
        draft.set("algorithm.filter_groups_metric", "accuracy", metric, remark="the verifier's accuracy")
        batches = settings.integer(most) or 0
        bounded = batches > 0
        remark = (
            "then a step trains on what it has; MindSpeed-RL stops" if bounded else "0 or less is without bound there"
        )
        draft.set("algorithm.filter_groups_max_batches", batches if bounded else MOST_BATCHES, most, remark=remark)
    for key in (metric, most):
        if not draft.has_line(key):
            draft.leave(key, "dynamic sampling is off")


def filters(settings: Settings) -> bool:
    """Whether dynamic sampling is on."""
    return stage_of(settings) is Stage.DAPO and bool(settings.truth("rl_config.filter_groups_enable"))


def overlong_buffer(settings: Settings, draft: Draft) -> None:
    """Soft overlong punishment, under the same names."""
    names = ("overlong_buffer", "overlong_buffer_penalty_factor")
    enabled = bool(settings.truth("rl_config.overlong_buffer_enable"))
    draft.set("algorithm.overlong_buffer_enable", enabled, "rl_config.overlong_buffer_enable")
    for name in names:
        key = f"rl_config.{name}"
        if enabled and settings.value(key) is not None:
            draft.set(
                f"algorithm.{name}", settings.number(key) if name.endswith("factor") else settings.integer(key), key
            )
        else:
            draft.leave(key, "the overlong buffer is off")
