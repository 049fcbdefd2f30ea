"""Scorers that are models: sections `reward.judges` and `reward.reward_models`, by name."""

from __future__ import annotations

from services.common.spec.base import Section


class JudgeSpec(Section):
    """Section `reward.judges.<name>`: a language model that grades a response."""


class RewardModelSpec(Section):
    """Section `reward.reward_models.<name>`: a model whose head scores a response."""
