"""Section `placement`: which roles have devices of their own, and which take turns on the same ones."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from services.common.spec.base import Section


class RolloutPlacement(StrEnum):
    """Values of `placement.rollout`."""

    SEPARATE = "separate"
    """Engine and learner have devices of their own, and work at the same time."""
    COLOCATED = "colocated"
    """They take turns on the same devices."""


class PlacementSpec(Section):
    """Section `placement`."""

    rollout: RolloutPlacement = Field(
        default=RolloutPlacement.SEPARATE,
        strict=False,
        description="separate: the engine samples on devices of its own while the learner trains. colocated: they take turns on the "
        "same ones; while a step is trained the engine samples nothing and keeps its requests, and each has all cores. On CPUs only.",
    )
