"""Deaths of a real rank within a training step of actor, critic and reference: after a pass, and between two optimizer steps."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.redis.connection import connect
from services.common.spec.job import JobSpec
from services.learner.audit.files import audit_job
from tests.chaos import failpoints
from tests.chaos.faults import Options
from tests.chaos.result import Result
from tests.chaos.resume import MAKE_MODEL, WAIT_S, redis_server
from tests.chaos.stack import REAL
from tests.integration.learner.peers import ROOT, Learner, peers_of, until

PLACES = {
    "training.passes.collect:after": "after the reference's pass",
    "training.critic.update:after": "between the critic's optimizer step and the actor's",
    "training.actor.update:after": "between two mini-batches",
}
"""Fail points, and what a rank that dies at the first passing has done of its step."""


def training(options: Options) -> Result:
    """One death at each place, in one PPO job; then its audit."""
    started, result = time.monotonic(), Result("killed within a training step", 0, options.seed)
    command = [sys.executable, "-c", MAKE_MODEL, str(options.home / "models" / "tiny")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=WAIT_S)
    with redis_server(options.home / "redis") as url:
        record = asyncio.run(_run(options.home, url, result))
    report = audit_job(options.home / "jobs" / record.id, reported_state="succeeded")
    result.violations += [f"{found.breach} in {found.where}: {found.message}" for found in report.violations]
    if (record.state, record.lineage, record.incarnation) != (JobState.SUCCEEDED, 1, 1 + len(PLACES)):
        result.violations.append(f"{record.state} with lineage {record.lineage}, incarnation {record.incarnation}")
    if report.steps != 1 + len(PLACES):
        result.violations.append(f"{report.steps} steps were trained, not {1 + len(PLACES)}")
    result.groups = {"issued": report.issued, **{fate.value: count for fate, count in report.fates.items() if count}}
    result.seconds = time.monotonic() - started
    return result


async def _run(home: Path, url: str, result: Result) -> JobRecord:
    """Trains a step, then one more for each death in it; the record of the ended job."""
    redis = connect(url, block_s=2.0)
    store, learner = JobStore(redis), Learner(url, home, "tests.chaos.entry.learner", **{REAL: "1"})
    job_id = (await store.create(_spec())).id
    (home / "chaos" / "fail").mkdir(parents=True)
    try:
        async with peers_of(redis, url, job_id, delay_s=0.0) as peers:
            peers.last_version = 1
            learner.start()
            for done, place in enumerate(PLACES, 1):
                await until(store, job_id, lambda job, done=done: job.step == done, learner, WAIT_S)  # type: ignore[misc]
                armed = failpoints.arm(home / "chaos", place)
                struck, peers.last_version = time.monotonic(), done + 1
                await until(store, job_id, lambda job, done=done: job.step > done, learner, WAIT_S)  # type: ignore[misc]
                result.count += 1
                result.progress_s.append(time.monotonic() - struck)
                result.violations += [f"nobody came by {place}"] * armed.exists()
            return await until(store, job_id, lambda job: job.state.ended, learner, WAIT_S)
    finally:
        learner.kill()
        await redis.aclose()


def _spec() -> JobSpec:
    spec: dict[str, Any] = {
        "name": "ppo",
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 500}},
        "rollout": {"group_size": 4, "rollout_max_tokens": 8},
        "algorithm": {"preset": "ppo", "filter_groups_train_batch_size": 2, "kl_target": 0.01},
        "learner": {"steps": 1 + len(PLACES), "lr": 1e-3, "mini_batch_size": 1, "ppo_epochs": 2},
        "critic": {"lr": 1e-3},
        "reference": {"rebase_interval_steps": 2},
        "off_policy": {"max_off_policy_steps": 0},
        "checkpoint": {"interval_steps": 2, "export": False},
    }
    return JobSpec.model_validate(spec)
