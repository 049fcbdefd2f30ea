"""A job whose learner is killed again and again ends, bit for bit, where ranks end that train the same journal without a break."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.common.checkpoints.manifest import verify_files
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.spec.job import JobSpec
from services.common.streams.codec import decode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.storage.checkpoints import CheckpointStore
from services.learner.storage.journal import Journal
from tests.integration.learner.peers import ROOT, Learner, peers_of, until
from tests.integration.learner.rank_files import same

STEPS = 30
WAIT_S = 400.0
"""Longest wait for ranks that start on a busy machine."""
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("redis_url", ["embedded"], indirect=True, scope="session"),
]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": {"learner": {"tensor_parallel_size": 2}},
    "pp": {"learner": {"pipeline_parallel_size": 2}},
    "dp": {"learner": {"data_parallel_size": 2, "use_distributed_optimizer": True}},
    "fsdp": {"learner": {"backend": "fsdp2", "data_parallel_size": 2}},
    "adapters": {"model": {"lora": {"rank": 4}}, "learner": {"backend": "fsdp2"}},
    "ppo": {
        "algorithm": {"preset": "ppo", "kl_coefficient": 0.1, "kl_target": 0.01, "kl_horizon": 50, "entropy_coefficient": 0.01},
        "learner": {"mini_batch_size": 1, "ppo_epochs": 2},
        "critic": {"lr": 1e-3, "warmup_steps": 3},
        "reference": {"rebase_interval_steps": 5},
    },
}  # fmt: skip
"""By layout or algorithm, what its job's sections say."""
KILLS = {
    "one": (2, 5, 7, 9, 12, 14, 17, 20, 22, 26), "tp": (3, 11, 19), "pp": (5, 13, 22), "dp": (7, 8, 16, 24), "ppo": (2, 11, 19),
    "fsdp": (2, 7, 8, 16), "adapters": (3, 11, 19),
}  # fmt: skip
"""Steps after which the learner is killed."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_killed_and_resumed_is_bitwise_the_uninterrupted_run(
    learner: Learner, redis: Redis, redis_url: str, tmp_path: Path, layout: str
) -> None:
    spec = job(LAYOUTS[layout])
    store = JobStore(redis)
    job_id = (await store.create(spec)).id
    async with peers_of(redis, redis_url, job_id, delay_s=0.05) as peers:
        for kill_at in KILLS[layout]:
            learner.start()
            await until(store, job_id, partial(has_done, kill_at), learner, WAIT_S)
            learner.kill()
        learner.start()
        record = await until(store, job_id, lambda job: job.state.ended, learner, WAIT_S)
    assert (record.state, record.lineage) == (JobState.SUCCEEDED, 1)
    assert len(peers.asked) == len(set(peers.asked)), "a group was generated twice"
    folder = tmp_path / "jobs" / job_id
    checkpoints = list(CheckpointStore(folder / "checkpoints", keep=1000).manifests())
    assert checkpoints[0].step == STEPS
    assert len(checkpoints) > 4
    straight = await asyncio.to_thread(train_straight, folder, tmp_path, spec, [c.step for c in checkpoints])
    for checkpoint in checkpoints:
        verify_files(checkpoint)
        for file in checkpoint.path.glob("rank-*.safetensors"):
            assert same(file, straight / str(checkpoint.step) / file.name), (checkpoint.step, file.name)
    trained = [group for record in Journal(folder / "journal").records() for group in record.groups]
    ids = [decode(ScoredGroup, payload, MIN_ENTRY_BYTES).group.task.group_id for payload in trained]
    assert len(ids) == len(set(ids)) == record.groups["trained"]


def job(sections: dict[str, Any]) -> JobSpec:
    spec: dict[str, Any] = {
        "name": "resuming",
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 500}},
        "rollout": {"group_size": 2, "rollout_max_tokens": 8},
        "algorithm": {"filter_groups_train_batch_size": 2},
        "learner": {"steps": STEPS, "lr": 1e-3},
        "checkpoint": {"interval_steps": 4, "keep_last": 1000, "export": False},
    }
    return JobSpec.model_validate(spec | {name: spec.get(name, {}) | given for name, given in sections.items()})


def has_done(steps: int, job: JobRecord) -> bool:
    return job.step >= steps


def train_straight(folder: Path, home: Path, spec: JobSpec, steps: list[int]) -> Path:
    """Where ranks that were never interrupted left what they held at these steps."""
    out = home / "straight"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.learner.world_size}"]
    script = [str(Path(__file__).with_name("journal_ranks.py")), str(folder), str(home / "models" / "tiny"), str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launch, *script, *map(str, steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return out
