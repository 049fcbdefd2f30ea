"""Which judged groups the ranks can train: a batch in the journal that breaks a rank would break it at every replay.

Nothing that a group holds is believed for having come off a stream: its server may run another model, or be broken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from services.common.models.directory import ModelInfo
from services.common.spec.job import JobSpec
from services.common.streams.types import Int32Array, RolloutGroup, ScoredGroup, VerdictStatus

LARGEST_REWARD = 1e9
"""Beyond it squares and sums over a batch would no longer be sure to fit into the float32 of an advantage."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model takes."""

    vocab_size: int
    """Token ids are below it."""
    positions: int
    """Longest prompt + response, tokens."""

    @classmethod
    def of(cls, model: ModelInfo, spec: JobSpec) -> Self:
        """Those of a job."""
        return cls(
            model.vocab_size,
            min(spec.model.max_model_len or model.max_position_embeddings, model.max_position_embeddings),
        )


def unfit(scored: ScoredGroup, spec: JobSpec, limits: Limits) -> str:
    """Why nothing can be learned from the group, or empty."""
    group = scored.group
    if group.failure is not None:
        return group.failure
    return _unjudged(scored, spec) or _unsound(group, limits)


def _unjudged(scored: ScoredGroup, spec: JobSpec) -> str:
    count = len(scored.group.rollouts)
    broken = [verdict for verdict in scored.verdicts if verdict.status is VerdictStatus.FAILED]
    if broken and count - len(broken) < min(spec.rollout.fewest_rollouts, count):
        return f"{len(broken)} of {count} checks failed: {broken[0].detail}"
    pairs = zip(scored.group.rollouts, scored.verdicts, strict=True)
    judged = [(rollout, verdict.reward) for rollout, verdict in pairs if verdict.reward is not None]
    if len(judged) < 2:
        return f"only {len(judged)} of {count} rollouts could be judged"
    if not all(math.isfinite(reward) and abs(reward) <= LARGEST_REWARD for _, reward in judged):
        return f"a reward is not finite, or beyond ±{LARGEST_REWARD:g}"
    if not any(rollout.token_ids for rollout, _ in judged):
        return "no rollout that was judged has a token"
    return ""


def _unsound(group: RolloutGroup, limits: Limits) -> str:
    prompt = group.prompt_tokens
    if not len(prompt):
        return "the prompt has no token"
    if strange := _strange(prompt, limits):
        return f"the prompt has token {strange}"
    for rollout in group.rollouts:
        if len(prompt) + len(rollout.tokens) > limits.positions:
            length = len(prompt) + len(rollout.tokens)
            return f"prompt and response have {length} tokens; the model takes {limits.positions}"
        if strange := _strange(rollout.tokens, limits):
            return f"a response has token {strange}"
        if not np.isfinite(rollout.logprobs).all():
            return "a log-prob of the engine's is not finite"
    return ""


def _strange(tokens: Int32Array, limits: Limits) -> str:
    """The first token that the model does not know, in words; empty without one."""
    outside = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
    return f"{outside[0]}, and the model knows 0 to {limits.vocab_size - 1}" if len(outside) else ""
