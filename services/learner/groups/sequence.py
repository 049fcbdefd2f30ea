"""Sequence: a prompt and one response, as the ranks are given it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.streams.types import Float32Array, Int32Array

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt and one response, with all that the loss needs; R is the response's length.

    Example: Sequence(tokens=[5, 9, 3, 7, 2], prompt_len=3, inference_logprobs=[-0.1, -1.2], advantage=[0.7, 0.7],
    loss_mask=[True, True], group_id=17)
    """

    tokens: Int32Array
    """Prompt and response, [T] with T = prompt_len + R."""
    prompt_len: int
    """At least 1: the first response token is predicted from the prompt's last."""
    inference_logprobs: Float32Array
    """The engine's log-prob of each response token, [R]."""
    advantage: Float32Array
    """Per response token, [R]."""
    loss_mask: BoolArray
    """Which response tokens count, [R]."""
    group_id: int

    def __post_init__(self) -> None:
        """Checks that the lengths agree and the numbers are finite.

        Raises:
            ValueError: names the group and the field.
        """
        response = len(self.tokens) - self.prompt_len
        if self.prompt_len < 1 or response < 1:
            raise ValueError(f"group {self.group_id}: {len(self.tokens)} tokens with prompt_len {self.prompt_len}")
        for name in ("inference_logprobs", "advantage", "loss_mask"):
            if len(getattr(self, name)) != response:
                raise ValueError(
                    f"group {self.group_id}: {name} has {len(getattr(self, name))} items for {response} tokens"
                )
        for name in ("inference_logprobs", "advantage"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"group {self.group_id}: {name} is not finite")

    @property
    def response_len(self) -> int:
        """R."""
        return len(self.tokens) - self.prompt_len

    @property
    def row_len(self) -> int:
        """Positions that the model runs: the last token is only ever predicted."""
        return len(self.tokens) - 1
