"""The seam to the algorithms: what a token loss is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The response tokens of one micro-batch, those of each sequence next to one another; R in all.

    A loss is a sum over tokens, divided by `global_tokens` afterwards. One that means over sequences weighs its tokens accordingly:
    `global_tokens / (global_sequences · tokens of the sequence)`.
    """

    trainer_logprobs: torch.Tensor
    """float32 [R], of the weights being trained; the only input with a gradient."""
    old_logprobs: torch.Tensor
    """float32 [R], of the proximal policy: the engine's, or the trainer's own at the start of the step."""
    inference_logprobs: torch.Tensor
    """float32 [R], of the policy that sampled."""
    advantages: torch.Tensor
    """float32 [R]."""
    loss_mask: torch.Tensor
    """bool [R]; what a loss gives for a masked token is not looked at."""
    sequence_ids: torch.Tensor
    """int64 [R], 0 to sequences − 1 within this micro-batch, never falling."""
    global_tokens: int
    """Unmasked tokens of the whole global batch, at least 1."""
    global_sequences: int
    """Sequences of the whole global batch with at least one unmasked token."""


class LossFunction(Protocol):
    """A token loss. Pure; called for empty micro-batches too, with one masked token."""

    def __call__(self, inputs: LossInputs, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Gives the loss of each token, [R], and named metrics of each token, [R], whose mean over the global batch is reported."""
