"""Which CPU cores the learner and the rollout servers compute on, so that they do not take turns on one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores of each; empty sets where there is nothing to share out."""

    learner: frozenset[int]
    rollout: tuple[frozenset[int], ...]
    """One set per server."""


def available_cores() -> list[int]:
    """Cores that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return []  # where affinity is unknown, nothing is pinned


def plan_cores(cores: Sequence[int], servers: int) -> CorePlan:
    """The lower half of the cores (rounded down) to the rollout servers, the rest to the learner.

    Servers get equal, separate shares; when there are fewer cores than servers, they share them all.
    """
    if len(cores) < 2:
        return CorePlan(frozenset(), (frozenset(),) * servers)
    half = len(cores) // 2
    shared, learner = list(cores[:half]), frozenset(cores[half:])
    share = len(shared) // max(1, servers)
    if not share:
        return CorePlan(learner, (frozenset(shared),) * servers)
    return CorePlan(learner, tuple(frozenset(shared[i * share : (i + 1) * share]) for i in range(servers)))
