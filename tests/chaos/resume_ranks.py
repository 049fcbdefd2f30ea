"""`torchrun … -m tests.chaos.resume_ranks MODEL OUT COUNT SEED`: what every rank of the resume row runs.

Trains COUNT + 1 steps and saves after each but the last; then, from each of what was saved, trains the rest again. Rank 0 writes the
digest of the last weights of each run.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from services.learner.megatron.platform import prepare

prepare("cpu", threads=1)

from megatron.core import parallel_state  # noqa: E402  Megatron comes after prepare

from services.common.spec import JobSpec  # noqa: E402
from services.learner.algorithms.losses import make_loss  # noqa: E402
from services.learner.megatron.batch import Sequence  # noqa: E402
from services.learner.megatron.collectives import gather_json  # noqa: E402
from services.learner.megatron.settings import TrainerSettings  # noqa: E402
from services.learner.megatron.trainer import MegatronTrainer  # noqa: E402
from tests.chaos.job import job_spec  # noqa: E402

VOCABULARY = 16
"""Of the batches: the tiny model has more."""
SEQUENCES = 8
BASE = TrainerSettings(
    dtype="float32", publish_dtype="float32", lr=1e-2, lr_warmup_steps=2, max_tokens_per_micro_batch=96
)
LAYOUTS = {
    1: {"one rank": BASE},
    2: {
        "TP 2": replace(BASE, tensor_parallel_size=2),
        "PP 2": replace(BASE, pipeline_parallel_size=2),
        "DP 2": BASE,
        "DP 2, distributed optimizer": replace(BASE, use_distributed_optimizer=True),
    },
}


def batch(step: int, seed: int) -> list[Sequence]:
    """The step's batch, the same whoever asks."""
    rng = np.random.default_rng((seed, step))
    sequences = []
    for group_id in range(SEQUENCES):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 24))
        sequences.append(
            Sequence(
                tokens=rng.integers(0, VOCABULARY, prompt + response).astype(np.int32),
                prompt_len=prompt,
                inference_logprobs=rng.normal(-2.8, 0.3, response).astype(np.float32),
                advantage=np.full(response, rng.normal(), np.float32),
                loss_mask=np.ones(response, bool),
                group_id=group_id,
            )
        )
    return sequences


def ends(model: Path, settings: TrainerSettings, out: Path, count: int, seed: int) -> dict[str, str]:
    """Digests of the last weights: of the straight run, and of each that was resumed."""
    loss = make_loss(JobSpec.model_validate(job_spec(steps=1)).algorithm)
    straight = MegatronTrainer(model, settings, loss)
    for step in range(1, count + 2):
        straight.train(batch(step, seed))
        if step <= count:
            straight.save(out / str(step))
            reports = straight.saved(wait=True)
            while reports is None:
                reports = straight.saved(wait=True)
    found = {"straight": digest(straight)}
    for stopped in range(1, count + 1):
        resumed = MegatronTrainer(model, settings, loss)
        resumed.load(out / str(stopped))
        for step in range(stopped + 1, count + 2):
            resumed.train(batch(step, seed))
        found[str(stopped)] = digest(resumed)
    return found


def digest(trainer: MegatronTrainer) -> str:
    """Of all weights, the same on every rank."""
    weights, mine = trainer._exporter.gather(None), ""
    if weights is not None:
        state = xxhash.xxh3_128()
        for name, tensor in sorted(weights.items()):
            state.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        mine = state.hexdigest()
    return str(gather_json(mine, trainer.device)[0])


def main(model: Path, out: Path, count: int, seed: int) -> None:
    """Every layout that the number of ranks allows."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    said = {}
    for name, settings in LAYOUTS[dist.get_world_size()].items():
        folder = out / "saved"
        said[name] = ends(model, settings, folder, count, seed)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()
        parallel_state.destroy_model_parallel()
        vars(parallel_state)["_POSITION_EMBEDDING_GLOBAL_RANKS"] = None  # which 0.12 leaves to the next layout
    if dist.get_rank() == 0:
        (out / "said.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
