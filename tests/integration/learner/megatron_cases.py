"""The batch and the settings that the clean reference process and the Megatron ranks both train on."""

from __future__ import annotations

from typing import Any

import numpy as np

VOCABULARY = 128
MODELS = ("llama", "qwen2", "qwen3")
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
STEPS = 2


def arrays(count: int = 11, *, seed: int = 5) -> list[dict[str, Any]]:
    """Sequences of very different lengths, some tokens masked, inference log-probs near a uniform policy's."""
    rng = np.random.default_rng(seed)
    batch: list[dict[str, Any]] = []
    for i in range(count):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 30))
        mask = rng.random(response) > 0.15
        mask[0] = True
        batch.append(
            {
                "tokens": rng.integers(0, VOCABULARY, prompt + response).astype(np.int32),
                "prompt_len": prompt,
                "inference_logprobs": (rng.normal(-4.9, 0.3, response)).astype(np.float32),
                "advantage": rng.normal(0.3, 1.0, response).astype(np.float32),
                "loss_mask": mask,
                "group_id": i // 2,
            }
        )
    return batch
