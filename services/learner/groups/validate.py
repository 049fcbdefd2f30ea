"""Validation of judged groups before they are trained: a batch in the journal that breaks a rank would break it at every replay.

Nothing in a group is trusted because it came from a stream: its server may run another model, or be broken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from services.common.models.directory import ModelInfo
from services.common.spec.job import JobSpec
from services.common.streams.types import (
    LOGPROB_DTYPE,
    TOKEN_DTYPE,
    Int32Array,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    VerdictStatus,
)

MAX_ABS_REWARD = 1e9
"""Beyond it squares and sums over a batch would no longer be sure to fit into the float32 of an advantage."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a job's model."""

    vocab_size: int
    """Token ids are below it."""
    positions: int
    """Longest prompt + response, tokens."""

    @classmethod
    def of(cls, model: ModelInfo, spec: JobSpec) -> Self:
        """Limits of a job."""
        positions = model.max_position_embeddings
        return cls(model.vocab_size, min(spec.model.max_model_len or positions, positions))


def rejection_reason(scored: ScoredGroup, spec: JobSpec, limits: Limits) -> str:
    """Why the group cannot be trained; empty when it can."""
    if scored.group.failure is not None:
        return scored.group.failure
    return _verdict_fault(scored, spec) or _token_fault(scored.group, limits)


def judged_rollouts(scored: ScoredGroup) -> list[tuple[Rollout, float]]:
    """The rollouts that have a reward, with it."""
    pairs = zip(scored.group.rollouts, scored.verdicts, strict=True)
    return [(rollout, verdict.reward) for rollout, verdict in pairs if verdict.reward is not None]


def _verdict_fault(scored: ScoredGroup, spec: JobSpec) -> str:
    count = len(scored.group.rollouts)
    broken = [verdict for verdict in scored.verdicts if verdict.status is VerdictStatus.FAILED]
    if broken and count - len(broken) < min(spec.rollout.fewest_rollouts, count):
        return f"{len(broken)} of {count} checks failed: {broken[0].detail}"
    judged = judged_rollouts(scored)
    if len(judged) < (2 if spec.algorithm.compares_group else 1):
        return f"only {len(judged)} of {count} rollouts could be judged"
    if not all(math.isfinite(reward) and abs(reward) <= MAX_ABS_REWARD for _, reward in judged):
        return f"a reward is not finite, or beyond ±{MAX_ABS_REWARD:g}"
    if not any(rollout.token_ids for rollout, _ in judged):
        return "no rollout that was judged has a token"
    return ""


def _token_fault(group: RolloutGroup, limits: Limits) -> str:
    prompt = group.prompt_tokens
    if not len(prompt):
        return "the prompt has no token"
    if unknown := _unknown_token(prompt, limits):
        return f"the prompt has token {unknown}"
    longest = max((len(rollout.token_ids) // TOKEN_DTYPE.itemsize for rollout in group.rollouts), default=0)
    if len(prompt) + longest > limits.positions:
        return f"prompt and response have {len(prompt) + longest} tokens; the model takes {limits.positions}"
    responses = np.frombuffer(b"".join(rollout.token_ids for rollout in group.rollouts), TOKEN_DTYPE)
    if unknown := _unknown_token(responses, limits):
        return f"a response has token {unknown}"
    logprobs = np.frombuffer(b"".join(rollout.inference_logprobs for rollout in group.rollouts), LOGPROB_DTYPE)
    return "" if np.isfinite(logprobs).all() else "a log-prob of the engine's is not finite"


def _unknown_token(tokens: Int32Array, limits: Limits) -> str:
    outside = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
    return f"{outside[0]}, and the model knows 0 to {limits.vocab_size - 1}" if len(outside) else ""
