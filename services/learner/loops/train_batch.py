"""Training of one batch: the same for a batch that has just been journalled and for one that is trained again after a restart."""

from __future__ import annotations

import time
from dataclasses import dataclass

from services.learner.groups.batch import Batch
from services.learner.loops.state import JobContext
from services.learner.megatron.stats import StepStats


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch, and what the step on it gave."""

    batch: Batch
    ages: list[int]
    """policy_age of each group when the step began."""
    stats: StepStats
    train_s: float
    """Wall-clock seconds of the ranks."""


async def train_batch(job: JobContext, batch: Batch) -> Trained:
    """Takes the job's next optimizer step; `job.progress.step` counts it."""
    ages = [job.progress.step - judged.scored.group.min_policy_version for judged in batch.groups]
    began = time.monotonic()
    stats = await job.ranks.train(job.progress.step + 1, batch.sequences)
    job.progress.step += 1
    job.progress.notice_skip(stats)
    return Trained(batch, ages, stats, time.monotonic() - began)
