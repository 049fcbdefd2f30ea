"""What a learner, a reward service and the workers write, as tests need it."""

from __future__ import annotations

import json
from typing import Any

from redis.asyncio import Redis

from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.service.heartbeat import WorkerKind, WorkerStatus, write_heartbeat
from services.common.spec.job import JobSpec

HOSTILE = (
    '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script> [a](javascript:pwned) \u202e\x00 ' + "w" * 400
)


async def started(store: JobStore, document: dict[str, Any]) -> str:
    """A job that runs."""
    job = await store.create(JobSpec.model_validate(document))
    await store.transition(job.id, JobState.STARTING, allowed=[JobState.QUEUED], learner="learner-0")
    await store.transition(job.id, JobState.RUNNING, allowed=[JobState.STARTING])
    return job.id


async def make_step(store: JobStore, job_id: str, step: int, **figures: float) -> None:
    """A step as the learner tells of it."""
    groups = {"issued": 80 * step, "active": 3, "trained": 64 * step, "degenerate": 16 * step - 3}
    record = {
        "step": step, "at": 1_800_000_000.0 + step, "reward": 0.5, "accuracy": 0.5, "accept_rate": 0.8, "policy_age_mean": 1.2,
        "policy_age_max": 2, "generated_tokens_per_s": 900.0, "trained_tokens_per_s": 1200.0, "sync_s": 0.05, "pause_s": 0.04,
        "step_s": 0.8, "wait_s": 0.1, "loss": 0.01, "mismatch_kl_k3": 0.004, "entropy": 0.5, "grad_norm": 2.0,
        "response_length_mean": 2.5, "response_length_p95": 4.0, **figures,
    }  # fmt: skip
    await store.update(job_id, step=step, policy_version=step, groups=json.dumps(groups))
    await store.history.append_step(job_id, step, record)


async def make_eval(store: JobStore, job_id: str, step: int, avg: float) -> None:
    await store.history.append_eval(job_id, {"step": step, "k": 8, "tasks": 200, "avg_at_k": avg, "pass_at_k": 0.9})


async def keep_group(redis: Redis, job_id: str, group_id: int, rollouts: list[dict[str, Any]], **fields: Any) -> None:
    """A judged group as the reward service keeps it."""
    group = {
        "group_id": group_id, "lineage": 0, "attempt": 1, "purpose": "train", "prompt": "2 + 3 =", "ground_truth": "5",
        "data_source": "chain_sum", "server": "rollout-0", "at": 1_800_000_000.0 + group_id, "rollouts": rollouts, **fields,
    }  # fmt: skip
    await redis.lpush(keys.samples(job_id), json.dumps(group))


def rollout(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "text": text, "reward": 0.0, "accuracy": 0.0, "status": "scored", "verifier": "reasoning_gym", "detail": "",
        "finish_reason": "stop", "min_policy_version": 1, "max_policy_version": 1, "tokens": 3, **fields,
    }  # fmt: skip


def turn(number: int, said: str, text: str, **fields: Any) -> dict[str, Any]:
    """A turn of an episode as the reward service keeps it."""
    return {
        "turn": number, "said": [{"role": "tool" if number > 1 else "user", "content": said}], "text": text, "observed": 4 * (number > 1),
        "sampled": 3, "finish_reason": "stop", "reward": None, **fields,
    }  # fmt: skip


async def staffed(redis: Redis, job_id: str) -> None:
    """One worker of each kind, the rollout server a version behind."""
    await write_heartbeat(
        redis, WorkerStatus("learner-0", WorkerKind.LEARNER, "training", job_id, 3, detail={"restarts": 0})
    )
    await write_heartbeat(
        redis, WorkerStatus("rollout-0", WorkerKind.ROLLOUT, "sampling", job_id, 2, detail={"groups": 24})
    )
    await write_heartbeat(
        redis, WorkerStatus("reward-0", WorkerKind.REWARD, "judging", job_id, detail={"note": HOSTILE})
    )
    await write_heartbeat(
        redis, WorkerStatus("environment-0", WorkerKind.ENVIRONMENT, "playing", detail={"episodes_in_flight": 8})
    )


async def crowded(store: JobStore, redis: Redis, document: dict[str, Any]) -> str:
    """A running job with some of everything, each text hostile and longer than a line."""
    job_id = await started(store, {**document, "name": "n" * 63})
    for step in range(1, 6):
        await make_step(store, job_id, step)
    await make_eval(store, job_id, 0, 0.4)
    await make_eval(store, job_id, 5, 0.6)
    texts = [
        rollout(HOSTILE),
        rollout("5", reward=1.0, accuracy=1.0),
        rollout("x", status="timeout", reward=None, accuracy=None),
    ]
    await keep_group(redis, job_id, 7, texts, prompt=HOSTILE, ground_truth=HOSTILE, data_source=HOSTILE, server=HOSTILE)
    episode = rollout(HOSTILE, turns=[turn(number, HOSTILE, HOSTILE, reward=0.5) for number in range(2, 12)])
    await keep_group(redis, job_id, 8, [episode, rollout("x")], environment=HOSTILE, environment_seed=17)
    await store.transition(job_id, JobState.STALLED, allowed=[JobState.RUNNING], cause=f"waits for {HOSTILE}")
    await store.history.event(job_id, "note", {"message": HOSTILE})
    await store.history.event(job_id, HOSTILE, {HOSTILE: HOSTILE})
    await staffed(redis, job_id)
    return job_id
