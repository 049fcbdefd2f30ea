"""Soft overlong punishment: what a response loses for coming close to the token limit (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations


def overlong_penalty(length: int, *, rollout_max_tokens: int, overlong_buffer: int, penalty_factor: float) -> float:
    """What is added to the reward of a response: 0 at first, then falling linearly over the buffer, −`penalty_factor` from its end on.

    It is part of the reward, never of the accuracy that dynamic sampling looks at.

    Args:
        length: response tokens, |y|.
        rollout_max_tokens: L, where the buffer ends.
        overlong_buffer: B, its width in tokens, 1 to L; nothing is lost up to L − B.
        penalty_factor: largest punishment, at least 0 (`overlong_buffer_penalty_factor`).

    Raises:
        ValueError: the buffer does not fit, or the factor is negative.
    """
    if not 1 <= overlong_buffer <= rollout_max_tokens:
        raise ValueError(
            f"overlong_buffer must be 1 to rollout_max_tokens ({rollout_max_tokens}), not {overlong_buffer}"
        )
    if not penalty_factor >= 0.0:
        raise ValueError(f"overlong_buffer_penalty_factor must not be negative, and is {penalty_factor}")
    excess = length - (rollout_max_tokens - overlong_buffer)
    if excess <= 0:
        return 0.0
    return -penalty_factor * min(excess / overlong_buffer, 1.0)
