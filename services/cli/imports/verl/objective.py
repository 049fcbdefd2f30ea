"""Objective of verl's trainer: token loss, means, advantages, KL, dynamic sampling and corrections."""

from __future__ import annotations

from services.cli.imports.conversions import MOST_BATCHES
from services.cli.imports.draft import Draft
from services.cli.imports.settings import Settings
from services.cli.imports.verl.defaults import ACTOR, CORRECTION

LOSSES = {"vanilla": "dapo", "gspo": "gspo", "cispo": "cispo"}
ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
DISCOUNTED = frozenset({"gae", "reinforce_plus_plus"})
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
METRICS = dict.fromkeys(("acc", "accuracy"), "accuracy") | dict.fromkeys(
    ("reward", "score", "seq_reward", "seq_final_reward"), "reward"
)
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
    "custom_reward_function.overlong_buffer",
)
"""Where releases and recipes of verl keep the overlong buffer, the newest first."""


def loss(settings: Settings, draft: Draft) -> None:
    """Token loss and its clips."""
    mode = f"{ACTOR}.policy_loss.loss_mode"
    name = settings.text(mode) or "vanilla"
    chosen = LOSSES.get(name, "dapo")
    if name in LOSSES:
        draft.set("algorithm.loss", chosen, mode)
    else:
        remark = f"{name} has no counterpart; losses are dapo (vanilla), gspo, cispo, surrogate, or an installed one"
        draft.set("algorithm.loss", chosen, mode, remark=remark, fits=False)
    _clips(settings, draft, chosen)
    _dual_clip(settings, draft, chosen)


def _clips(settings: Settings, draft: Draft, chosen: str) -> None:
    low, high, both = (f"{ACTOR}.clip_ratio{suffix}" for suffix in ("_low", "_high", ""))
    nulls = [key for key in (low, high) if settings.value(key) is None]
    for key, name in ((low, "clip_ratio_low"), (high, "clip_ratio_high")):
        source = both if key in nulls else key
        if name == "clip_ratio_low" and chosen == "cispo":
            value = settings.number(source)
            draft.leave(source, "loss cispo has no lower clip here", fits=value is not None and value >= 1.0)
        elif (value := settings.number(source)) is not None:
            draft.set(f"algorithm.{name}", value, source)
        if key in nulls:
            draft.leave(key, "null: verl takes clip_ratio")
    if not draft.has_line(both):
        unused = "verl reads it only where clip_ratio_low or clip_ratio_high is null, and their default is 0.2"
        same = all(settings.number(both) == settings.number(key) for key in (low, high))
        draft.leave(both, unused, fits=same or all(map(settings.is_given, (low, high))))


def _dual_clip(settings: Settings, draft: Draft, chosen: str) -> None:
    key = f"{ACTOR}.clip_ratio_c"
    if chosen == "dapo" and (value := settings.number(key)) is not None:
        draft.set("algorithm.dual_clip", value, key)
    else:
        draft.leave(key, f"verl's loss {chosen} has no dual clip")


def mean(settings: Settings, draft: Draft) -> None:
    """How token losses become one loss."""
    old, key, scale = f"{ACTOR}.use_token_level_loss", f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    mode = settings.text(key) or "token-mean"
    if settings.is_given(old) and not settings.is_given(key):
        key, mode = old, "token-mean" if settings.truth(old) else "seq-mean-token-mean"
    elif settings.is_given(old):
        draft.leave(old, "verl reads loss_agg_mode")
    gspo = settings.text(f"{ACTOR}.policy_loss.loss_mode") == "gspo"
    if gspo and mode != "seq-mean-token-mean":
        remark = f"loss gspo is a mean of sequence means here, not {mode}"
        draft.set("algorithm.token_level_loss", False, key, remark=remark, fits=False)
    elif mode == "token-mean" or not mode.startswith("seq-mean-token-"):
        fits = mode == "token-mean"
        remark = "" if fits else f"{mode} has no counterpart"
        draft.set("algorithm.token_level_loss", True, key, remark=remark, fits=fits)
    else:
        draft.set("algorithm.token_level_loss", False, key)
        _constant_length(settings, draft, mode, key, scale)
    if not draft.has_line(scale):
        draft.leave(scale, "loss_agg_mode has no use for it")


def _constant_length(settings: Settings, draft: Draft, mode: str, key: str, scale: str) -> None:
    if mode == "seq-mean-token-sum":
        draft.set("algorithm.constant_length", 1, key, remark="a sum over each sequence's tokens")
    elif mode == "seq-mean-token-sum-norm" and settings.is_given(scale):
        draft.set("algorithm.constant_length", settings.integer(scale), key, scale)
    elif mode == "seq-mean-token-sum-norm":
        longest = settings.integer("data.max_response_length")
        draft.set("algorithm.constant_length", longest, key, remark="verl divides by the longest response")


def advantages(settings: Settings, draft: Draft) -> None:
    """Estimator of advantages, with its discounts."""
    key, scaled = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name = settings.text(key) or "gae"
    estimator = ESTIMATORS.get(name, "grpo")
    if estimator == "grpo" and name in ESTIMATORS and settings.truth(scaled) is False:
        estimator = "dr_grpo"
        draft.set("algorithm.advantage_estimator", estimator, key, scaled)
    elif name in ESTIMATORS:
        draft.set("algorithm.advantage_estimator", estimator, key)
    else:
        remark = f"{name} has no counterpart: grpo stands there; an installed package can offer an estimator"
        draft.set("algorithm.advantage_estimator", "grpo", key, remark=remark, fits=False)
    for discount in ("gamma", "lam"):
        source = f"algorithm.{discount}"
        used = estimator == "gae" or (discount == "gamma" and estimator in DISCOUNTED)
        if used and (value := settings.number(source)) is not None:
            draft.set(source, value, source)
        else:
            draft.leave(source, f"advantage_estimator {estimator} has no use for it")
    draft.leave(scaled, "advantage_estimator grpo divides by the standard deviation, dr_grpo does not")


def kl(settings: Settings, draft: Draft) -> None:
    """KL to the reference: in the loss or in the reward."""
    use_loss, use_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    in_loss, in_reward = bool(settings.truth(use_loss)), bool(settings.truth(use_reward))
    loss_keys = (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    reward_keys = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    if in_loss and not settings.number(loss_keys[0]):
        in_loss = False
        draft.leave(use_loss, "the coefficient is 0: no KL, and no reference")
    if in_reward and not settings.number(reward_keys[0]):
        in_reward = False
        draft.leave(use_reward, "the coefficient is 0: no KL, and no reference")
    if in_loss:
        _kl_term(settings, draft, "loss", (use_loss, *loss_keys))
    elif in_reward:
        _kl_term(settings, draft, "reward", (use_reward, *reward_keys))
    if in_loss and in_reward:
        draft.differ(use_reward, "a job has one KL, in the loss or in the reward: that in the loss is taken")
    _adaptive(settings, draft, active=in_reward and not in_loss)
    for key in (use_loss, *loss_keys, use_reward, *reward_keys):
        if not draft.has_line(key):
            draft.leave(key, "no KL is taken there")


def _kl_term(settings: Settings, draft: Draft, placement: str, keys: tuple[str, str, str]) -> None:
    use, coefficient, kind = keys
    draft.set("reference", {}, use, remark="the weights that the actor begins with")
    draft.set("algorithm.kl_placement", placement, use)
    draft.set("algorithm.kl_coefficient", settings.number(coefficient), coefficient)
    name = settings.text(kind) or ""
    straight_through = name.endswith("+")
    estimator = KL_ESTIMATORS.get(name.removesuffix("+"))
    if estimator is None:
        remark = f"{name} has no counterpart: k1, k2 and k3 are kl, mse and low_var_kl"
        draft.set(
            "algorithm.kl_estimator",
            "k3" if placement == "loss" else "k1",
            kind,
            remark=remark,
            fits=False,
        )
    elif straight_through and placement == "loss":
        draft.set("algorithm.kl_estimator", "k2", kind, remark=f"the gradient of {name} is that of k2")
    else:
        draft.set("algorithm.kl_estimator", estimator, kind)


def _adaptive(settings: Settings, draft: Draft, *, active: bool) -> None:
    kind, target, horizon = (f"algorithm.kl_ctrl.{name}" for name in ("type", "target_kl", "horizon"))
    if active and settings.text(kind) == "adaptive":
        draft.set("algorithm.kl_target", settings.number(target), kind, target)
        draft.set("algorithm.kl_horizon", settings.integer(horizon), horizon)
    for key in (kind, target, horizon):
        if not draft.has_line(key):
            draft.leave(key, "the coefficient is constant")


def filter_groups(settings: Settings, draft: Draft) -> None:
    """Dynamic sampling."""
    enable, metric, most = (f"algorithm.filter_groups.{name}" for name in ("enable", "metric", "max_num_gen_batches"))
    enabled = bool(settings.truth(enable))
    draft.set("algorithm.filter_groups_enable", enabled, enable)
    if enabled:
        name = settings.text(metric) or "reward"
        known = name in METRICS
        remark = "" if known else f"{name} is not known: reward stands there"
        draft.set("algorithm.filter_groups_metric", METRICS.get(name, "reward"), metric, remark=remark, fits=known)
        batches = settings.integer(most) or 0
        bounded = batches > 0
        remark = "then a step trains on what it has; verl stops" if bounded else "0 or less is without bound there"
        draft.set("algorithm.filter_groups_max_batches", batches if bounded else MOST_BATCHES, most, remark=remark)
    for key in (metric, most):
        if not draft.has_line(key):
            draft.leave(key, "dynamic sampling is off")


def overlong_buffer(settings: Settings, draft: Draft) -> None:
    """Soft overlong punishment."""
    for prefix in OVERLONG:
        enable, width, factor = (f"{prefix}.{name}" for name in ("enable", "len", "penalty_factor"))
        if not settings.is_given(enable):
            continue
        enabled = bool(settings.truth(enable))
        draft.set("algorithm.overlong_buffer_enable", enabled, enable)
        if enabled and settings.is_given(width):
            draft.set("algorithm.overlong_buffer", settings.integer(width), width)
        if enabled and settings.is_given(factor):
            draft.set("algorithm.overlong_buffer_penalty_factor", settings.number(factor), factor)
        break
    for prefix in OVERLONG:
        for key in (f"{prefix}.{name}" for name in ("enable", "len", "penalty_factor", "log")):
            if not draft.has_line(key):
                draft.leave(
                    key,
                    "the overlong buffer is off, or set elsewhere"
                    if not key.endswith("log")
                    else "metrics always have it",
                )
    for prefix in ("reward.reward_kwargs", "reward_model.reward_kwargs"):
        key, longest = f"{prefix}.max_resp_len", settings.integer("data.max_response_length")
        if settings.is_given(key) and settings.integer(key) != longest:
            draft.differ(key, f"the overlong buffer ends at rollout.rollout_max_tokens ({longest})")
        else:
            draft.leave(key, "the overlong buffer ends at rollout.rollout_max_tokens")


def correction(settings: Settings, draft: Draft) -> None:
    """Policy that the loss's ratio is relative to, and the weights between engine and trainer."""
    bypass, level, cap = (f"{CORRECTION}.{name}" for name in ("bypass_mode", "rollout_is", "rollout_is_threshold"))
    bypassed = bool(settings.truth(bypass))
    remark = "" if bypassed else "verl's old log-probs are the trainer's"
    draft.set("algorithm.proximal_policy", "inference" if bypassed else "trainer", bypass, remark=remark)
    granularity = settings.text(level)
    if granularity is None or bypassed:
        reason = "the ratio is relative to the engine's policy" if bypassed and granularity else "no correction"
        draft.leave(level, reason)
        draft.leave(cap, reason)
    else:
        _weights(settings, draft, granularity, level, cap)
    rejection, batch = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_is_batch_normalize"
    threshold = f"{CORRECTION}.rollout_rs_threshold"
    for key in (rejection, threshold):
        draft.leave(
            key,
            "rejection of samples has no counterpart; importance_correction masked leaves out tokens",
            fits=not (settings.is_given(rejection) and settings.is_given(key)),
        )
    draft.leave(batch, "weights are not normalized over the batch", fits=not (settings.truth(batch)))
    loss_type = f"{CORRECTION}.loss_type"
    plain = settings.text(loss_type) in {None, "ppo_clip"} or not bypassed
    draft.leave(loss_type, "the loss is algorithm.loss", fits=plain)


def _weights(settings: Settings, draft: Draft, granularity: str, level: str, cap: str) -> None:
    bounds = str(settings.value(cap)).split("_")
    try:
        numbers = [float(bound) for bound in bounds]
    except ValueError:
        draft.differ(level, f"the threshold {settings.value(cap)} is not understood")
        draft.differ(cap, "must be a number, or lower_upper")
        return
    masked = len(numbers) == 2
    draft.set("algorithm.importance_correction", "masked" if masked else "truncated", level)
    draft.set("algorithm.importance_level", "sequence" if granularity == "sequence" else "token", level)
    draft.set("algorithm.importance_weight_cap", numbers[-1], cap)
    if masked:
        draft.set("algorithm.importance_weight_floor", numbers[0], cap)
