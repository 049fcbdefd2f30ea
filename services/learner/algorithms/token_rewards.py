"""Advantages from a reward at each token: discounted returns, generalised advantage estimation, whitening. All in float64.

A batch's unmasked tokens are in one row, [T], response after response; masked tokens are left out before, so that the token after t is
the next unmasked one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from services.learner.algorithms.outcomes import WHITEN_EPSILON, Float64Array

Lengths = npt.NDArray[np.int64]
"""Unmasked tokens of each response, [N], which sum to T; a response may have none."""


def discounted_returns(rewards: Float64Array, lengths: Lengths, discount: float) -> Float64Array:
    """G_t = r_t + discount · G_{t+1} within each response, and 0 after its last token, [T].

    The loop runs over distances from the end, over all responses at once.
    """
    returns = np.array(rewards, np.float64)
    longest_first = np.argsort(-lengths, kind="stable")
    sizes, last = lengths[longest_first], np.cumsum(lengths)[longest_first] - 1
    distances = np.arange(1, sizes[0] if len(sizes) else 0)
    # How many responses have a token at that distance from their last one.
    counts = np.searchsorted(-sizes, -distances)
    for distance, count in zip(distances.tolist(), counts.tolist(), strict=True):
        at = last[:count] - distance
        returns[at] += discount * returns[at + 1]
    return returns


def advantages_and_returns(
    rewards: Float64Array, values: Float64Array, lengths: Lengths, *, gamma: float, lam: float
) -> tuple[Float64Array, Float64Array]:
    """GAE (arXiv 1506.02438): δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1}; and the returns A + V. Each [T].

    After the last token of a response, V and A are 0.
    """
    next_values = np.append(values[1:], 0.0)[: len(values)]
    next_values[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    advantages = discounted_returns(rewards + gamma * next_values - values, lengths, gamma * lam)
    return advantages, advantages + values


def whitened(values: Float64Array) -> Float64Array:
    """(x − mean x) / sqrt(var x + 1e-8) with ddof = 1, [T]; fewer than two values are only centred."""
    if len(values) == 0:
        return values
    centred: Float64Array = values - values.mean()
    if len(values) < 2:
        return centred
    return centred / math.sqrt(float(centred @ centred) / (len(values) - 1) + WHITEN_EPSILON)
