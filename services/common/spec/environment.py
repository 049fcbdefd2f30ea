"""Section `environment`: limits of the episodes in which rollouts take turns with an environment."""

from __future__ import annotations

from pydantic import Field

from services.common.spec.base import Section


class EnvironmentSpec(Section):
    """Section `environment`; needed where a source of `data` is one, `environment:<name>`."""

    max_turns: int = Field(default=8, ge=1, le=32, description="Most turns that the policy samples in an episode.")
    max_turn_tokens: int = Field(
        default=512,
        ge=1,
        le=1_048_576,
        description="Most tokens of one of them; rollout.rollout_max_tokens bounds all of them together, observed tokens included.",
    )
    max_observation_tokens: int = Field(
        default=1024,
        ge=1,
        le=1_048_576,
        description="Most tokens that an environment may say at once; more, and the episode has failed.",
    )
    step_timeout_s: float = Field(
        default=10.0, ge=0.1, le=3600.0, description="Longest wait for an answer of the environment."
    )
