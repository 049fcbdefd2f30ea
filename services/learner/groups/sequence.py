"""Sequence: a prompt and one response, as the ranks receive it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.common.streams.types import BoolArray, Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt and one response, with all inputs of the loss; R is the response's length.

    Example: Sequence(tokens=[5, 9, 3, 7, 2], prompt_len=3, inference_logprobs=[-0.1, -1.2], advantage=[0.7, 0.7],
    loss_mask=[True, True], group_id=17, reward=1.0)
    """

    tokens: Int32Array
    """Prompt and response, [T] with T = prompt_len + R."""
    prompt_len: int
    """At least 1: the first response token is predicted from the prompt's last."""
    inference_logprobs: Float32Array
    """The engine's log-prob of each response token, [R]."""
    advantage: Float32Array
    """Per response token, [R]; not used where the ranks compute advantages (`JobSpec.ranks_estimate`)."""
    loss_mask: BoolArray
    """True for the response tokens that count, [R]."""
    group_id: int
    reward: float = 0.0
    """Of the response, after length shaping."""
    versions: Int32Array | None = None
    """The policy version that sampled each response token, [R]; only where the objective needs it."""

    def __post_init__(self) -> None:
        """Raises ValueError, which names group and field, if lengths disagree or a number is not finite."""
        response = len(self.tokens) - self.prompt_len
        if self.prompt_len < 1 or response < 1:
            raise ValueError(f"group {self.group_id}: {len(self.tokens)} tokens with prompt_len {self.prompt_len}")
        for name in ("inference_logprobs", "advantage", "loss_mask"):
            values = getattr(self, name)
            if len(values) != response:
                raise ValueError(f"group {self.group_id}: {name} has {len(values)} items for {response} tokens")
            if values.dtype != bool and not np.isfinite(values).all():
                raise ValueError(f"group {self.group_id}: {name} is not finite")

    @property
    def response_len(self) -> int:
        """R."""
        return len(self.tokens) - self.prompt_len

    @property
    def row_len(self) -> int:
        """Positions that the model computes: the last token is only predicted, never an input."""
        return len(self.tokens) - 1
