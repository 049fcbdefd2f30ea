"""The batch and the settings that the clean reference process and the ranks of either back end train on."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.integration.learner.platforms import ON_CPU, runnable

VOCABULARY = 128
MODELS = ("llama", "qwen2", "qwen3")
LAYOUTS = runnable({
    "one": 1, "tp": 2, "pp": 2, "dp": 2, "dist": 2, "sp": 2, "cp": 2, "sp_pp": 4, "sp_dist": 4, "cp_sp": 4, "cp_pp": 4, "cp_dp": 4,
    "fsdp": 1, "fsdp_dp": 2, "hybrid": 4,
})  # fmt: skip
"""Ranks of each layout; sp is tp with sequence parallelism, dist is dp with the distributed optimizer, which cp and cp_dp have too; the
last three are FSDP2's."""
ON_FSDP2 = ("fsdp", "fsdp_dp", "hybrid")
QUICK = ("one", "pp", "dist", "sp", "cp", "fsdp_dp") if ON_CPU else tuple(LAYOUTS)
"""Layouts whose tests are not slow: sp is tp with more, and dist is dp with more."""
SHORT, LONG = 2048, 8192
MEASURED: dict[str, dict[str, tuple[int, ...]]] = {
    "one": {"rows": (SHORT, LONG), "shared": (SHORT, LONG)},
    "tp": {"shared": (SHORT,)},
    "sp": {"shared": (SHORT,)},
    "cp": {"shared": (SHORT,)},
}
"""Layouts whose memory is measured, with which rows, and their tokens."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TEMPERATURE = 0.8

# A large eps keeps Adam's update smooth in the gradient, so that weights after a step tell about gradients and not about their signs.
ADAM: dict[str, Any] = {
    "lr": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_eps": 0.1,
    "weight_decay": 0.01,
    "clip_grad": 0.5,
}
WARMUP_STEPS = 2
_FIRST_OF_GROUP, _ONE_TOKEN = (0, 4, 5, 8, 10), (2, 4)
STEPS = 2


def arrays(count: int = 11, *, seed: int = 5) -> list[dict[str, Any]]:
    """Groups of 1 to 4 sequences of very different lengths, some tokens masked, inference log-probs near a uniform policy's."""
    rng = np.random.default_rng(seed)
    batch: list[dict[str, Any]] = []
    prompt = np.zeros(0, np.int32)
    for i in range(count):
        if i in _FIRST_OF_GROUP:
            prompt = rng.integers(0, VOCABULARY, int(rng.integers(1, 9))).astype(np.int32)
        response = 1 if i in _ONE_TOKEN else int(rng.integers(2, 30))
        mask = rng.random(response) > 0.15
        mask[0] = True
        batch.append(
            {
                "tokens": np.concatenate([prompt, rng.integers(0, VOCABULARY, response).astype(np.int32)]),
                "prompt_len": len(prompt),
                "inference_logprobs": (rng.normal(-4.9, 0.3, response)).astype(np.float32),
                "advantage": rng.normal(0.3, 1.0, response).astype(np.float32),
                "loss_mask": mask,
                "group_id": sum(first <= i for first in _FIRST_OF_GROUP),
            }
        )
    return batch
