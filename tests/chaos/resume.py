"""Stop at step k, resume, and compare with the run that was not stopped: the same groups at each step, the same weights, bit for bit.

The learner service is the real one, Megatron ranks and all: one alone, and two by tensor, pipeline and data parallelism and with the
distributed optimizer. A script answers for rollout and reward. `max_off_policy_steps` is 0, so that which groups a step trains does not
hang on when they come in: both runs must make the same journal.

Each stop is kill -9 of every rank as soon as step k is done, while its checkpoint may still be written; ranks in new processes load what
is on the disk, train what only the journal has, and go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.checkpoints.manifest import CHECKPOINTS_DIR, verify_files
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.redis.connection import connect
from services.common.spec.job import JobSpec
from services.common.streams.codec import decode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.storage.checkpoints import CheckpointStore
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import Journal
from tests.chaos.faults import Options
from tests.chaos.result import Result, summary
from tests.integration.learner.peers import ROOT, Learner, peers_of, until
from tests.own_redis import OwnRedis

STEPS = 24
WAIT_S = 600.0
"""Longest wait for ranks that start on a busy machine."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "DP 2": {"data_parallel_size": 2},
    "DP 2, distributed optimizer": {"data_parallel_size": 2, "use_distributed_optimizer": True},
}
MAKE_MODEL = "import sys, pathlib; from tests.integration.rollout.conftest import write_model; write_model(pathlib.Path(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Course:
    """What a run did, by what it left on the disk."""

    folder: Path
    groups: dict[int, list[int]]
    """By step, in the order in which they were trained."""
    digests: dict[int, str]
    """Of the weights that each step began with, by step."""
    heads: int
    """How often a head began: once more than it was stopped."""


def resume(options: Options) -> Result:
    """`count` values of k below STEPS in each layout."""
    started, result = time.monotonic(), Result("stop at step k and resume", 0, options.seed)
    dice = random.Random(options.seed)
    command = [sys.executable, "-c", MAKE_MODEL, str(options.home / "models" / "tiny")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=WAIT_S)
    seconds: dict[str, dict[str, float]] = {}
    with redis_server(options.home / "redis") as url:
        for layout, sizes in LAYOUTS.items():
            stops = sorted(dice.sample(range(1, STEPS), options.count))
            straight, _ = asyncio.run(run(options.home, url, sizes, []))
            stopped, times = asyncio.run(run(options.home, url, sizes, stops))
            seconds[layout] = summary(times)
            result.count += len(stops)
            result.progress_s += times
            result.violations += [
                f"{layout}, stopped at {stops}: {what}" for what in differences(straight, stopped, stops)
            ]
    result.extra = {"layouts": seconds}
    result.seconds = time.monotonic() - started
    return result


async def run(home: Path, url: str, sizes: dict[str, Any], stops: list[int]) -> tuple[Course, list[float]]:
    """Trains a job from beginning to end; gives its course, and of each stop the seconds until the step after it was done."""
    redis = connect(url, block_s=2.0)
    learner, store = Learner(url, home), JobStore(redis)
    job_id = (await store.create(job_spec(sizes))).id
    times = []
    try:
        async with peers_of(redis, url, job_id, delay_s=0.0) as peers:
            peers.last_version = stops[0] if stops else None
            learner.start()
            for k, following in zip(stops, [*stops, None][1:], strict=True):
                await until(store, job_id, lambda job, k=k: job.step == k, learner, WAIT_S)  # type: ignore[misc]
                learner.kill_ranks()
                killed, peers.last_version = time.monotonic(), following
                await until(store, job_id, lambda job, k=k: job.step > k, learner, WAIT_S)  # type: ignore[misc]
                times.append(time.monotonic() - killed)
            record = await until(store, job_id, lambda job: job.state.ended, learner, WAIT_S)
    finally:
        learner.kill()
        await redis.aclose()
    return course(home / "jobs" / job_id, record), times


def job_spec(sizes: dict[str, Any]) -> JobSpec:
    """The job; a checkpoint every fourth step, so that most stops leave steps that only the journal has."""
    return JobSpec.model_validate(
        {
            "name": "resuming",
            "model": {"path": "tiny", "dtype": "float32"},
            "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 500}},
            "rollout": {"group_size": 4, "rollout_max_tokens": 8},
            "algorithm": {"filter_groups_train_batch_size": 2},
            "off_policy": {"max_off_policy_steps": 0},
            "learner": {"steps": STEPS, "lr": 1e-3, "lr_warmup_steps": 3, **sizes},
            "checkpoint": {"interval_steps": 4, "keep_last": 1000, "export": False},
        }
    )


def course(folder: Path, record: JobRecord) -> Course:
    """What the journal says.

    Raises:
        AssertionError: the job did not succeed.
    """
    assert record.state is JobState.SUCCEEDED, record
    groups, digests = {}, {}
    for batch in Journal(folder / JOURNAL_DIR).records():
        if batch.groups:
            groups[batch.step] = [
                decode(ScoredGroup, payload, MIN_ENTRY_BYTES).group.task.group_id for payload in batch.groups
            ]
            digests[batch.step] = batch.weights_digest
    return Course(folder, groups, digests, record.incarnation)


def differences(straight: Course, stopped: Course, stops: list[int]) -> list[str]:
    """How the run that was stopped differs from the other one, and whatever makes the comparison worth nothing."""
    found = []
    if (straight.heads, stopped.heads) != (1, 1 + len(stops)):
        found.append(f"heads began {straight.heads} and {stopped.heads} times")
    if list(straight.groups) != list(range(1, STEPS + 1)) or len(set(straight.digests.values())) != STEPS:
        found.append("the run that was not stopped did not train each step, or a step changed nothing")
    for step in range(1, STEPS + 1):
        if stopped.groups.get(step) != straight.groups.get(step):
            found.append(f"step {step} trained groups {stopped.groups.get(step)}, not {straight.groups.get(step)}")
        if stopped.digests.get(step) != straight.digests.get(step):
            found.append(f"the weights before step {step} differ")
    return found + _checkpoint_differences(straight.folder, stopped.folder)


def _checkpoint_differences(straight: Path, stopped: Path) -> list[str]:
    from tests.integration.learner.rank_files import same

    saved = [
        {checkpoint.step: checkpoint for checkpoint in CheckpointStore(folder / CHECKPOINTS_DIR, keep=1000).manifests()}
        for folder in (straight, stopped)
    ]
    common = saved[0].keys() & saved[1].keys()
    found = [] if STEPS in common else ["there is no last checkpoint"]
    for step in sorted(common):
        one, other = saved[0][step], saved[1][step]
        verify_files(one)
        verify_files(other)
        files = sorted(path.name for path in one.path.glob("rank-*.safetensors"))
        if not files or files != sorted(path.name for path in other.path.glob("rank-*.safetensors")):
            found.append(f"the checkpoints of step {step} are not of the same ranks")
        found += [f"{name} of step {step} differs" for name in files if not same(one.path / name, other.path / name)]
    return found


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A Redis of our own; its URL."""
    server = OwnRedis(folder)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()
