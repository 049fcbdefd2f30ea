"""Step record: the figures of one step from the job's state."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from services.common.jobs.step_record import StepRecord
from services.learner.loops.state import JobContext
from services.learner.loops.train_batch import Trained


@dataclass(slots=True)
class StepTimes:
    """Where a step's wall-clock time went, seconds."""

    wait_s: float
    """The learner stood idle, waiting for a batch."""
    step_s: float = 0.0
    """From asking for the batch to the published version."""


def step_record(job: JobContext, trained: Trained, times: StepTimes, record_digest: str, *, lineage: int) -> StepRecord:
    """Record of the step that `job.progress.step` counts.

    Args:
        job: its state when the step has ended.
        trained: the batch and what training it gave.
        times: of this step.
        record_digest: of the batch's journal record.
        lineage: in which the batch was journalled.
    """
    flow = job.activity.flow
    groups, ages = trained.batch.groups, trained.ages
    trained_tokens = sum(sequence.response_len for sequence in trained.batch.sequences)
    elapsed = max(time.monotonic() - flow.since, 1e-9)
    rollouts = [rollout for judged in groups for rollout in judged.scored.group.rollouts]
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
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
        accept_rate=round(job.intake.accept_rate.value, 4),
        groups_trained=len(groups),
        groups_judged=flow.groups,
        policy_age_mean=fmean(ages),
        policy_age_max=max(ages),
        response_length_mean=float(lengths.mean()),
        response_length_p95=float(np.percentile(lengths, 95)),
        truncated_share=fmean(rollout.finish_reason.truncated for rollout in rollouts),
        generated_tokens_per_s=flow.generated_tokens / elapsed,
        wasted_tokens=flow.wasted_tokens,
        trained_tokens=trained_tokens,
        trained_tokens_per_s=trained_tokens / max(times.step_s, 1e-9),
        wait_s=times.wait_s,
        train_s=trained.train_s,
        step_s=times.step_s,
        sync_s=max((r.fetch_s + r.pause_s for r in reports), default=None),
        pause_s=max((r.pause_s for r in reports), default=None),
        groups=job.intake.ledger.summary(),
        record_digest=record_digest,
        **trained.stats.as_record(),
    )
