"""Collect loop: receives judged groups; each gets its fate at once, or waits for a step."""

from __future__ import annotations

import time

from services.common.errors import EntryError
from services.common.jobs.fates import Fate
from services.common.redis.connection import BLOCK_S
from services.common.service.lifecycle import Drain
from services.common.streams.codec import decode
from services.common.streams.consumer import Entry, require_match
from services.common.streams.types import Purpose, ScoredGroup
from services.learner.groups.buffer import Judged
from services.learner.loops import metrics
from services.learner.loops.state import JobContext

READ_COUNT = 64
RENEW_INTERVAL_S = 15.0


async def collect_loop(job: JobContext, drain: Drain) -> None:
    """Receives judged groups.

    consumes:     scored stream
    waits for:    an entry, at most BLOCK_S at a time
    unblocked by: the reward service
    produces:     ready groups and fates; entries stay held until the journal has them
    """
    await job.progress.recovered(drain)
    renewed = time.monotonic()
    while not drain.requested:
        for entry in await job.consumer.read(READ_COUNT, BLOCK_S):
            await _receive(job, entry)
        if time.monotonic() - renewed > RENEW_INTERVAL_S:
            await job.consumer.renew()
            renewed = time.monotonic()


async def _receive(job: JobContext, entry: Entry) -> None:
    """Receives one entry: a training group, an evaluation's answer, or a dead letter."""
    try:
        scored = decode_entry(job.job_id, entry, job.consumer.limit_bytes)
    except EntryError as error:
        await job.consumer.dead_letter(entry, str(error))
        metrics.DEAD_LETTERS.inc()
        await job.store.event("dead_letter", {"stage": "scored", "entry": entry.id, "message": str(error)})
        return
    task = scored.group.task
    if task.lineage != job.progress.lineage:
        await job.consumer.ack(entry)
        return
    job.activity.arrived += 1
    job.activity.occupancy.note(scored, entry)
    if task.purpose is Purpose.EVAL:
        job.evals.answers.setdefault(task.group_id, Judged(scored, entry.payload, entry))
    else:
        tokens = scored.group.sampled_tokens
        job.activity.flow.count(scored)
        metrics.GENERATED_TOKENS.inc(tokens)
        metrics.JUDGE_SECONDS.observe(scored.judge_s)
        judged = Judged(scored, entry.payload, entry)
        job.traces.arrived(judged)
        fate = job.buffer.arrived(judged)
        if fate in {Fate.DEGENERATE, Fate.STALE, Fate.FAILED}:
            job.activity.flow.wasted_tokens += tokens
    job.activity.moved()


def decode_entry(job_id: str, entry: Entry, limit_bytes: int) -> ScoredGroup:
    """Decodes the entry; EntryError if it is no scored group, exceeds the limit, or is not of this job and of the entry's member."""
    scored = decode(ScoredGroup, entry.payload, limit_bytes)
    require_match(entry, scored.group.task, job_id, "group.task.")
    return scored
