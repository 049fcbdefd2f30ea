"""Advantages of a step's responses, one for each token, from rewards, KL penalties and values.

rewards ── outcome − Σ KL, of the group ──► outcomes ──────────────┐
        └─ at the last token, − KL at each ► token_rewards ────────┼──► clip ─► float32 [R] of each response
Responses ── installed estimator, checked ─────────────────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import numpy as np
import numpy.typing as npt

from services.common.config.plugins import ADVANTAGES
from services.common.errors import ConfigError
from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import AdvantageEstimator
from services.common.streams.types import Float32Array
from services.learner.algorithms.outcomes import Float64Array, batch_advantages, grpo_of_turns
from services.learner.algorithms.plugins import load
from services.learner.algorithms.token_rewards import advantages_and_returns, discounted_returns, whitened

BoolArray = npt.NDArray[np.bool_]
FIELD = "algorithm.advantage_estimator"


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of one response; one that is no episode has one."""

    lengths: list[int]
    """Tokens of each turn, observed and sampled, which sum to R_i."""
    rewards: list[float]
    """Of each turn alone; the last one has the response's reward besides."""


@dataclass(frozen=True, slots=True)
class Responses:
    """The N responses of a step, in the order of its groups; R_i is the number of tokens of response i.

    Example: Responses(group_ids=[17, 17], rewards=[1.0, 0.0], masks=[[True, True], [True]])
    """

    group_ids: list[int]
    """[N], those of a group adjacent."""
    rewards: list[float]
    """[N], after length shaping."""
    masks: list[BoolArray]
    """The tokens that count, one [R_i] per response. R_i may be 0: the reward of a response without a token still counts in its group."""
    kl_penalties: list[Float64Array] | None = None
    """One [R_i] per response: β · KL of each token. None: the KL is not in the reward."""
    values: list[Float32Array] | None = None
    """One [R_i] per response: the critic's values. None without a critic."""
    turns: list[Turns] | None = None
    """[N]; only for `algorithm.turn_credit` turn."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an estimator makes of responses."""

    advantages: list[Float32Array]
    """One [R_i] per response."""
    returns: list[Float32Array] | None = None
    """One [R_i] per response: the critic's targets. None from an estimator without values."""


Estimator = Callable[[Responses, AlgorithmSpec], Estimate]
"""An installed estimator (entry-point group `millrace.advantages`): pure, since steps are replayed."""


def estimate(responses: Responses, algorithm: AlgorithmSpec) -> Estimate:
    """Advantages of the responses of a whole step by `algorithm.advantage_estimator`, within ± `algorithm.advantage_clip`.

    Outcome estimators (see outcomes.py) repeat a response's advantage over all its tokens; its outcome is the reward less its unmasked
    penalties. reinforce_plus_plus and gae (see token_rewards.py) have one for each token, and 0 at masked ones.

    Raises:
        ValueError: the lists differ in length, a group has fewer than 2 responses (outcome estimators only) or a reward that is not
            finite, or there are no values for gae.
        ConfigError: an installed estimator does not exist, or its result does not fit the responses; names it.
    """
    _check_lengths(responses)
    found = _unclipped(responses, algorithm)
    bound = algorithm.advantage_clip
    if bound is None:
        return found
    return replace(found, advantages=[values.clip(-bound, bound) for values in found.advantages])


def _unclipped(responses: Responses, algorithm: AlgorithmSpec) -> Estimate:
    if responses.turns is not None:
        return _of_turns(responses, responses.turns)
    match algorithm.advantage_estimator:
        case AdvantageEstimator.GAE:
            return _gae(responses, algorithm)
        case AdvantageEstimator.REINFORCE_PLUS_PLUS:
            return _reinforce_plus_plus(responses, algorithm)
        case AdvantageEstimator() as estimator:
            return _of_outcomes(responses, estimator, algorithm.revision)
        case name:
            return _installed(responses, algorithm, name)


def _of_outcomes(responses: Responses, estimator: AdvantageEstimator, revision: int) -> Estimate:
    outcomes = np.array(responses.rewards, np.float64)
    if responses.kl_penalties is not None:
        pairs = zip(responses.kl_penalties, responses.masks, strict=True)
        outcomes -= np.array([penalties[mask].sum() for penalties, mask in pairs], np.float64)
    sizes = [len(list(group)) for _, group in groupby(responses.group_ids)]
    ends = np.cumsum(sizes)[:-1]
    # Where all of a response is masked, as one that was cut may be, it weighs as if nothing were.
    lengths = np.array([int(mask.sum()) or len(mask) for mask in responses.masks])
    rewards = np.split(outcomes, ends) if sizes else []
    advantages = batch_advantages(rewards, estimator, np.split(lengths, ends), revision=revision)
    each = (float(advantage) for group in advantages for advantage in group)
    return Estimate([np.full(len(mask), value, np.float32) for mask, value in zip(responses.masks, each, strict=True)])


def _of_turns(responses: Responses, turns: list[Turns]) -> Estimate:
    together = groupby(zip(responses.group_ids, turns, strict=True), key=lambda pair: pair[0])
    grouped = grpo_of_turns([[one.rewards for _, one in group] for _, group in together])
    each = (advantages for group in grouped for advantages in group)
    return Estimate(
        [np.repeat(advantages.astype(np.float32), one.lengths) for advantages, one in zip(each, turns, strict=True)]
    )


def _reinforce_plus_plus(responses: Responses, algorithm: AlgorithmSpec) -> Estimate:
    rewards, lengths = _token_rewards(responses)
    returns = discounted_returns(rewards, lengths, algorithm.gamma)
    return Estimate(_at_tokens(whitened(returns), responses.masks))


def _gae(responses: Responses, algorithm: AlgorithmSpec) -> Estimate:
    if responses.values is None:
        raise ValueError("advantage_estimator gae needs the critic's value of each token")
    rewards, lengths = _token_rewards(responses)
    values = _joined(responses.values, responses.masks)
    advantages, returns = advantages_and_returns(rewards, values, lengths, gamma=algorithm.gamma, lam=algorithm.lam)
    return Estimate(_at_tokens(whitened(advantages), responses.masks), _at_tokens(returns, responses.masks))


def _token_rewards(responses: Responses) -> tuple[Float64Array, npt.NDArray[np.int64]]:
    """The rewards of all unmasked tokens in one row, and how many each response has: −penalty, plus the reward at the last.

    The reward of a response without an unmasked token is at none.
    """
    if not np.isfinite(responses.rewards).all():
        raise ValueError(f"a reward of the batch is not finite: {responses.rewards}")
    lengths = np.array([int(mask.sum()) for mask in responses.masks], np.int64)
    rewards = np.zeros(int(lengths.sum()))
    if responses.kl_penalties is not None:
        rewards -= _joined(responses.kl_penalties, responses.masks)
    some = lengths > 0
    rewards[np.cumsum(lengths)[some] - 1] += np.array(responses.rewards, np.float64)[some]
    return rewards, lengths


def _joined(of_responses: Iterable[npt.NDArray[np.floating]], masks: list[BoolArray]) -> Float64Array:
    """The values of all unmasked tokens, one after the other."""
    parts = [np.asarray(values[mask], np.float64) for values, mask in zip(of_responses, masks, strict=True)]
    return np.concatenate([np.zeros(0), *parts])


def _at_tokens(joined: Float64Array, masks: list[BoolArray]) -> list[Float32Array]:
    """The inverse of `_joined`, with 0 at masked tokens."""
    placed = np.zeros(sum(map(len, masks)), np.float32)
    placed[np.concatenate([np.zeros(0, bool), *masks])] = joined
    return np.split(placed, np.cumsum([len(mask) for mask in masks])[:-1]) if masks else []


def _installed(responses: Responses, algorithm: AlgorithmSpec, name: str) -> Estimate:
    result = cast("Estimator", load(ADVANTAGES, name, FIELD))(responses, algorithm)
    if not isinstance(result, Estimate):
        raise ConfigError(f"estimator {name!r} returned {type(result).__name__}, not an Estimate", field=FIELD)
    advantages = _fitting(result.advantages, responses.masks, f"advantages of estimator {name!r}")
    if result.returns is None:
        return Estimate(advantages)
    return Estimate(advantages, _fitting(result.returns, responses.masks, f"returns of estimator {name!r}"))


def _fitting(arrays: list[Float32Array], masks: list[BoolArray], what: str) -> list[Float32Array]:
    """The arrays in float32; ConfigError unless there is a finite one for each response, with its shape."""
    try:
        fitting = [np.asarray(values, np.float32) for values in arrays]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the {what} are no arrays of numbers: {error}", field=FIELD) from error
    if len(fitting) != len(masks):
        raise ConfigError(f"the {what} are {len(fitting)} for {len(masks)} responses", field=FIELD)
    for place, (values, mask) in enumerate(zip(fitting, masks, strict=True)):
        if values.shape != mask.shape:
            shapes = f"shape {values.shape} for {len(mask)} tokens"
            raise ConfigError(f"the {what} have {shapes} at response {place}", field=FIELD)
        if not np.isfinite(values).all():
            raise ConfigError(f"the {what} are not finite at response {place}", field=FIELD)
    return fitting


def _check_lengths(responses: Responses) -> None:
    tokens = [len(mask) for mask in responses.masks]
    for name in ("rewards", "masks"):
        if len(getattr(responses, name)) != len(responses.group_ids):
            raise ValueError(f"{len(getattr(responses, name))} {name} for {len(responses.group_ids)} responses")
    for name in ("kl_penalties", "values"):
        arrays = getattr(responses, name)
        if arrays is not None and [len(values) for values in arrays] != tokens:
            raise ValueError(f"{name} are not one for each token of each response")


def overlong_penalty(length: int, *, rollout_max_tokens: int, overlong_buffer: int, penalty_factor: float) -> float:
    """Length term of a response's reward: 0 up to the buffer, then decreasing linearly over it, −`penalty_factor` from its end on.

    It is part of the reward, never of the accuracy that dynamic sampling compares.

    Args:
        length: response tokens, |y|.
        rollout_max_tokens: L, the end of the buffer.
        overlong_buffer: B, its width in tokens, 1 to L; the term is 0 up to L − B.
        penalty_factor: largest penalty, at least 0 (`overlong_buffer_penalty_factor`).

    Raises:
        ValueError: the buffer does not fit, or the factor is negative.
    """
    if not 1 <= overlong_buffer <= rollout_max_tokens:
        allowed = f"1 to rollout_max_tokens ({rollout_max_tokens})"
        raise ValueError(f"overlong_buffer must be {allowed}, not {overlong_buffer}")
    if not penalty_factor >= 0.0:
        raise ValueError(f"overlong_buffer_penalty_factor must not be negative, and is {penalty_factor}")
    excess = length - (rollout_max_tokens - overlong_buffer)
    if excess <= 0:
        return 0.0
    return -penalty_factor * min(excess / overlong_buffer, 1.0)


def is_degenerate(values: Iterable[float]) -> bool:
    """Whether all values of a group are equal, that is std = 0: nothing to learn from. A group of none or one is degenerate too.

    Compared exactly: the computed std of equal floats need not be 0 (three times 0.1 gives 1.4e-17).

    Raises:
        ValueError: a value is not finite.
    """
    seen = list(values)
    if not all(math.isfinite(value) for value in seen):
        raise ValueError(f"a group's values must be finite, not {seen}")
    return len(set(seen)) < 2
