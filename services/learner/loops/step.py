"""Step of a job: training of one batch, the same for a newly journalled batch and for one of the journal, and its record."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from services.common.jobs.step_record import StepRecord
from services.learner.groups.batch import Batch
from services.learner.loops.state import JobContext
from services.learner.training.stats import StepStats


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch, and the results of the step on it."""

    batch: Batch
    ages: list[int]
    """policy_age of each group when the step began."""
    stats: StepStats
    train_s: float
    """Wall-clock seconds of the ranks."""


async def train_batch(job: JobContext, batch: Batch) -> Trained:
    """Runs the job's next optimizer step; `job.progress.step` counts it."""
    ages = [job.progress.step - judged.scored.group.min_policy_version for judged in batch.groups]
    started = time.monotonic()
    stats = await job.ranks.train(job.progress.step + 1, batch.sequences)
    job.progress.step += 1
    job.progress.count_skip(stats)
    return Trained(batch, ages, stats, time.monotonic() - started)


def step_record(
    job: JobContext, trained: Trained, record_digest: str, *, lineage: int, wait_s: float, step_s: float
) -> StepRecord:
    """Record of the step that has just ended; `record_digest` and `lineage`: of the batch's journal record."""
    flow, occupied = job.activity.flow, job.activity.occupancy.take()
    groups, ages = trained.batch.groups, trained.ages
    trained_tokens = trained.batch.sampled_tokens
    elapsed = max(time.monotonic() - flow.since, 1e-9)
    rollouts = [rollout for judged in groups for rollout in judged.scored.group.rollouts]
    verdicts = [verdict for judged in groups for verdict in judged.scored.verdicts if verdict.reward is not None]
    lengths = np.array([rollout.sampled_tokens for rollout in rollouts])
    reports = list(job.publisher.reports.values())
    return StepRecord(
        step=job.progress.step,
        lineage=lineage,
        at=time.time(),
        policy_version=job.progress.step,
        weights_digest=job.publisher.digest or None,
        reward=flow.reward_sum / flow.rollouts if flow.rollouts else None,
        accuracy=flow.accuracy_sum / flow.rollouts if flow.rollouts else None,
        rollouts_judged=flow.rollouts,
        rollouts_not_judged=flow.not_judged,
        checks_over_limit=flow.over_limit,
        trained_reward=fmean(verdict.reward or 0.0 for verdict in verdicts) if verdicts else None,
        trained_accuracy=fmean(verdict.accuracy or 0.0 for verdict in verdicts) if verdicts else None,
        accept_rate=round(job.buffer.accept_rate.value, 4),
        groups_trained=len(groups),
        groups_judged=flow.groups,
        policy_age_mean=fmean(ages),
        policy_age_max=max(ages),
        response_length_mean=float(lengths.mean()),
        response_length_p95=float(np.percentile(lengths, 95)),
        truncated_share=fmean(rollout.finish_reason.truncated for rollout in rollouts),
        turns_mean=trained.batch.turns_mean,
        generated_tokens_per_s=flow.generated_tokens / elapsed,
        wasted_tokens=flow.wasted_tokens,
        trained_tokens=trained_tokens,
        trained_tokens_per_s=trained_tokens / max(step_s, 1e-9),
        rollout_servers=occupied.servers,
        rollout_busy_s=occupied.busy_s,
        groups_sampled=occupied.sampled,
        generate_s_mean=occupied.generate_s / occupied.sampled if occupied.sampled else None,
        wait_s=wait_s,
        train_s=trained.train_s,
        step_s=step_s,
        sync_s=max((r.fetch_s + r.pause_s for r in reports), default=None),
        pause_s=max((r.pause_s for r in reports), default=None),
        groups=job.buffer.ledger.summary(),
        record_digest=record_digest,
        **trained.stats.as_record(),
    )
