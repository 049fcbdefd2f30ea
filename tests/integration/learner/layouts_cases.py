"""The jobs whose checkpoints go from layout to layout, and the layouts, in their order."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.integration.learner.roles_cases import tokens_of

MODELS = ("llama", "qwen2", "qwen3")
"""Tied; untied with biases; tied with norms on query and key."""
VOCABULARY = 320
"""More than the tokenizer's tokens."""
QUICK_CASES = [("llama", "ppo", "float32")]
CASES = [
    *QUICK_CASES,
    ("qwen2", "rloo", "bfloat16"),
    ("qwen2", "ppo", "float32"),
    ("qwen3", "rloo", "float32"),
    ("llama", "ppo", "bfloat16"),
]
"""Model, job of `roles_cases`, dtype; those of slow tests too. PPO has a critic and a reference, RLOO a reference."""
STEPS = 2
"""Training steps before the first checkpoint."""
CHAINS: dict[str, tuple[str, ...]] = {
    "one": ("one",),
    "two": ("tp", "pp", "dp", "dist", "cp", "tp"),
    "four": ("sp_pp", "cp_dp", "sp_dist"),
    "again": ("one",),
}
"""Set of ranks → the layouts that its checkpoints go through; each set begins with the last checkpoint of the set before it."""


def batch_of(step: int) -> list[dict[str, Any]]:
    """A step's sequences, with log-probs near a uniform policy's."""
    batch = tokens_of(step)
    for item in batch:
        item["inference_logprobs"] = (item.pop("noise") - 4.9).astype(np.float32)
    return batch
