"""Random responses, and their advantages once more, one token at a time in Python floats: the independent reference of the tests."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from services.learner.algorithms.advantages import Responses


def random_responses(
    seed: int, *, groups: int = 4, longest: int = 7, penalties: bool = True, values: bool = True
) -> Responses:
    """Groups of 2 to 4 responses of 0 to `longest` tokens, a quarter of them masked, with rewards on both sides of 0."""
    random = np.random.default_rng(seed)
    group_ids = [100 + group for group in range(groups) for _ in range(int(random.integers(2, 5)))]
    lengths = random.integers(0, longest + 1, len(group_ids)).tolist()
    return Responses(
        group_ids=group_ids,
        rewards=random.normal(size=len(group_ids)).tolist(),
        masks=[random.random(length) < 0.75 for length in lengths],
        kl_penalties=[random.normal(scale=0.1, size=length) for length in lengths] if penalties else None,
        values=[random.normal(size=length).astype(np.float32) for length in lengths] if values else None,
    )


@dataclass(frozen=True, slots=True)
class TokenEstimate:
    """A response's results, at each token; 0 where masked."""

    advantages: list[float]
    returns: list[float]


def naive_token_rewards(responses: Responses, i: int) -> list[float]:
    """What each unmasked token of response i earns."""
    places = [t for t, counts in enumerate(responses.masks[i]) if counts]
    penalties = responses.kl_penalties
    rewards = [0.0 if penalties is None else -float(penalties[i][t]) for t in places]
    if rewards:
        rewards[-1] += responses.rewards[i]
    return rewards


def naive_reinforce_plus_plus(responses: Responses, gamma: float) -> list[TokenEstimate]:
    """Σ γ^(s−t) r_s over the tokens from t on, by the definition, whitened over the batch."""
    returns = []
    for i in range(len(responses.masks)):
        rewards = naive_token_rewards(responses, i)
        returns.append(
            [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]
        )
    return placed(responses, naive_whitened(returns), returns)


def naive_gae(responses: Responses, gamma: float, lam: float) -> list[TokenEstimate]:
    """Σ (γλ)^(s−t) δ_s, by the definition, whitened over the batch."""
    assert responses.values is not None
    advantages, returns = [], []
    for i, mask in enumerate(responses.masks):
        rewards = naive_token_rewards(responses, i)
        values = [float(value) for value, counts in zip(responses.values[i], mask, strict=True) if counts]
        following = [*values[1:], 0.0]
        deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=False)]
        of_response = [
            sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas))) for t in range(len(deltas))
        ]
        advantages.append(of_response)
        returns.append([a + v for a, v in zip(of_response, values, strict=True)])
    return placed(responses, naive_whitened(advantages), returns)


def naive_whitened(of_responses: list[list[float]]) -> list[list[float]]:
    everywhere = [value for values in of_responses for value in values]
    if not everywhere:
        return of_responses
    mean = statistics.fmean(everywhere)
    scale = math.sqrt(statistics.variance(everywhere) + 1e-8) if len(everywhere) > 1 else 1.0
    return [[(value - mean) / scale for value in values] for values in of_responses]


def placed(responses: Responses, advantages: list[list[float]], returns: list[list[float]]) -> list[TokenEstimate]:
    """The values at their tokens, 0 at masked ones."""
    found = []
    for mask, ours, targets in zip(responses.masks, advantages, returns, strict=True):
        left = [iter(ours), iter(targets)]
        found.append(TokenEstimate(*([next(values) if counts else 0.0 for counts in mask] for values in left)))
    return found
