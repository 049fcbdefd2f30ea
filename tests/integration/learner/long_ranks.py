"""What the ranks of the test of long responses run: `make` makes the model; else two steps on a response of 32 k tokens and a short one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

TOKENS = 32_768
SHORT = 100


def make(folder: Path) -> None:
    """A model of one layer, in a process without Megatron."""
    from tests.integration.learner.trainer_reference import build

    torch.manual_seed(3)
    build("llama", layers=1).save_pretrained(folder)


def train(folder: Path, out: Path, ranks: int) -> None:
    """Rank 0 writes the records, log-probs before the steps, and weights after them."""
    from services.learner.groups.sequence import Sequence
    from tests.integration.learner.trainer_ranks import BASE, dapo, variant, write
    from tests.integration.learner.trainers import trainer_of

    torch.set_num_threads(1)

    rng = np.random.default_rng(11)
    prompt = rng.integers(0, 128, 50)
    batch = [
        Sequence(
            np.concatenate([prompt, rng.integers(0, 128, length)]).astype(np.int32),
            len(prompt),
            rng.normal(-4.9, 0.3, length).astype(np.float32),
            rng.normal(0.3, 1.0, length).astype(np.float32),
            np.ones(length, bool),
            0,
        )
        for length in (TOKENS, SHORT)
    ]
    most = 2 * TOKENS // ranks
    spec = variant(BASE, context_parallel_size=ranks, shared_prompts=True, max_tokens_per_micro_batch=most)
    trainer = trainer_of(folder, spec, dapo)
    logprobs = torch.from_numpy(np.concatenate(trainer.logprobs(batch)))
    records = [trainer.train(batch).as_record() for _ in range(2)]
    if trainer.layout.rank == 0:
        write({"logprobs": logprobs}, out / f"{ranks}.logprobs.safetensors")
        (out / f"{ranks}.json").write_text(json.dumps(records))
    write(trainer.export(), out / f"{ranks}.safetensors")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    if sys.argv[2:] == ["make"]:
        make(root / "model")
    else:
        train(root / "model", root, int(os.environ.get("WORLD_SIZE", "1")))
