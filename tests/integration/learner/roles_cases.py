"""The jobs that the clean reference process and the ranks of either back end train: settings, written out in full, and batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.integration.learner.trainer_cases import VOCABULARY

MODELS = ("llama", "qwen2")
"""Tied, and untied with biases."""
DTYPES = ("float32", "bfloat16")
QUICK_DTYPES = DTYPES[1:]
"""Those that are saved and loaded, by more than one rank, in tests that are not slow."""
TEMPERATURE = 0.8
STEPS = 3
GROUPS = (4, 4, 3)
"""Groups of each step's batch; the last is not full."""

# A large eps keeps Adam's update smooth in the gradient. The roles differ in everything.
ACTOR: dict[str, Any] = {
    "lr": 0.06, "lr_warmup_steps": 2, "lr_schedule": "cosine", "lr_min_ratio": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.99, "adam_eps": 0.1,
    "weight_decay": 0.01, "clip_grad": 0.5, "steps": 8,
}  # fmt: skip
CRITIC: dict[str, Any] = {
    "lr": 0.1, "lr_warmup_steps": 0, "lr_warmup_share": 0.25, "lr_schedule": "linear", "lr_min_ratio": 0.2, "adam_beta1": 0.8,
    "adam_beta2": 0.95, "adam_eps": 0.2, "weight_decay": 0.05, "clip_grad": 0.3, "value_clip": 0.05,
}  # fmt: skip
_TWICE = {"mini_batch_size": 2, "ppo_epochs": 2}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {
        "algorithm": {
            "advantage_estimator": "gae", "gamma": 0.98, "lam": 0.9, "advantage_clip": 2.0, "proximal_policy": "trainer",
            "clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "kl_coefficient": 0.2, "kl_placement": "reward", "kl_estimator": "k1",
            "kl_target": 0.01, "kl_horizon": 50, "entropy_coefficient": 0.02, "token_level_loss": True,
        },
        "learner": _TWICE,
        "critic": CRITIC,
        "reference": {"rebase_interval_steps": 2},
    },
    "grpo": {
        "algorithm": {
            "proximal_policy": "trainer", "importance_correction": "decoupled", "importance_level": "sequence", "clip_ratio_low": 0.05,
            "clip_ratio_high": 0.05, "kl_coefficient": 0.3, "kl_placement": "loss", "kl_estimator": "k3", "token_level_loss": False,
        },
        "learner": _TWICE,
        "reference": {},
    },
    "m2po": {
        "algorithm": {
            "proximal_policy": "trainer", "importance_correction": "m2po", "importance_m2_threshold": 0.008, "clip_ratio_low": 0.1,
            "clip_ratio_high": 0.1,
        },
        "learner": {"mini_batch_size": 2},
    },
    "interpolated": {
        "algorithm": {
            "proximal_policy": "interpolated", "importance_correction": "truncated", "importance_weight_cap": 1.02,
            "clip_ratio_low": 0.05, "clip_ratio_high": 0.05,
        },
        "learner": _TWICE,
    },
    "rloo": {
        "algorithm": {
            "advantage_estimator": "rloo", "kl_coefficient": 0.2, "kl_placement": "reward", "kl_estimator": "k2",
            "token_level_loss": False, "constant_length": 24, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2,
        },
        "learner": {"mini_batch_size": 2},
        "reference": {},
    },
}  # fmt: skip


def tokens_of(step: int) -> list[dict[str, Any]]:
    """A step's batch without log-probs: groups of 2 to 4 responses, 1 to 12 tokens long, some of them masked, one response wholly."""
    rng = np.random.default_rng(40 + step)
    batch: list[dict[str, Any]] = []
    for group in range(GROUPS[step - 1]):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(1, 9))).astype(np.int32)
        for place in range(int(rng.integers(2, 5))):
            size = 1 if (group, place) == (1, 0) else int(rng.integers(2, 13))
            mask = rng.random(size) > 0.15
            mask[0] = True
            batch.append(
                {
                    "tokens": np.concatenate([prompt, rng.integers(0, VOCABULARY, size).astype(np.int32)]),
                    "prompt_len": len(prompt),
                    "noise": rng.normal(0.0, 0.12, size),
                    "advantage": rng.normal(0.2, 1.0, size).astype(np.float32),
                    "loss_mask": mask & ((group, place) != (2, 1)),
                    "group_id": 10 * step + group,
                    "reward": float(rng.random()),
                    "versions": rng.integers(0, step, size).astype(np.int32),
                }
            )
    return batch
