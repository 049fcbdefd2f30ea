"""Conversions that several sources need: mini-batches, schedules, experts and names."""

from __future__ import annotations

import re
from collections.abc import Callable

from services.cli.imports.draft import Draft
from services.cli.imports.settings import Settings

SCHEDULES = frozenset({"constant", "linear", "cosine"})
MOST_BATCHES = 10_000
"""In place of an unbounded number of batches for one step: the most that a job may have."""


def fitting_mini_batch(groups: int, size: int) -> tuple[int, str]:
    """The largest divisor of `groups` that is at most `size`, and a remark if that is another number."""
    if size >= groups:
        remark = "" if size == groups else f"a batch has {groups} groups"
        return groups, remark
    fitting = next(number for number in range(max(1, size), 0, -1) if groups % number == 0)
    return fitting, "" if fitting == size else f"{size} does not divide the batch of {groups} groups"


def schedule(settings: Settings, draft: Draft, section: str, style: str, ratio: str, least: str, lr: str) -> None:
    """Learning rate after the warm-up. `ratio` is the key of the last rate ÷ lr, `least` that of the last rate."""
    name = settings.text(style) or "constant"
    if name not in SCHEDULES:
        draft.set(f"{section}.lr_schedule", "constant", style, remark=f"{name} has no counterpart", fits=False)
    else:
        draft.set(f"{section}.lr_schedule", name, style)
    falls = name in {"linear", "cosine"}
    top = settings.number(lr) or 0.0
    if falls and settings.is_given(least) and top > 0.0:
        share = min(1.0, (settings.number(least) or 0.0) / top)
        draft.set(f"{section}.lr_min_ratio", share, least, remark="÷ lr")
    elif falls and settings.is_given(ratio):
        draft.set(f"{section}.lr_min_ratio", settings.number(ratio), ratio)
    for key in (ratio, least):
        if not draft.has_line(key):
            draft.leave(key, "the rate ends at 0" if falls else "the rate does not fall")


def job_name(text: str) -> str:
    """A job's name that this text gives: lower case, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-")


def experts(settings: Settings, draft: Draft, key: str) -> None:
    """Expert parallelism, once the learner's other sizes are known."""
    size = settings.integer(key) or 1
    sizes = {
        name: int(str(draft.fields[field].value)) if (field := f"learner.{name}_parallel_size") in draft.fields else 1
        for name in ("tensor", "data", "context")
    }
    if size == 1:
        draft.leave(key, "each rank has all experts of its layers")
    elif sizes["tensor"] > 1:
        draft.differ(key, "the learner does not train mixtures of experts with tensor parallelism")
    elif (replicas := sizes["data"] * sizes["context"]) % size:
        draft.differ(
            key, f"{size} does not divide the {replicas} data- and context-parallel ranks, which share experts"
        )
    else:
        draft.set("learner.expert_parallel_size", size, key)


def router_losses(settings: Settings, draft: Draft, key: Callable[[str], str]) -> None:
    """Losses of the routers, by Megatron's names, under the source's keys."""
    names = ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_z_loss_coeff")
    coefficient, balancing, z_loss = map(key, names)
    value, kind = settings.number(coefficient), settings.text(balancing)
    if value and kind != "none":
        remark = "" if kind else "there it counts unless moe_router_load_balancing_type is none"
        draft.set("learner.router_aux_loss_coef", value, coefficient, remark=remark)
    else:
        draft.leave(coefficient, "there is no load-balancing loss")
    same = kind in {None, "none"} or (kind == "aux_loss" and value is not None)
    draft.leave(balancing, "learner.router_aux_loss_coef is that of aux_loss, 0 by default", fits=same)
    draft.leave(z_loss, "routers have no z-loss", fits=not settings.number(z_loss))
