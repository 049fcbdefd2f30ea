"""Session of the reward service: one running job, group by group, from rollouts to verdicts."""

from __future__ import annotations

import time
from dataclasses import replace

from redis.asyncio import Redis

from services.common.redis.keys import Stage
from services.common.service.lifecycle import Drain
from services.common.service.logs import log_context
from services.common.service.tracing import Attributes, GroupSpan, is_tracing, trace
from services.common.streams import codec
from services.common.streams.consumer import Consumer, Entry, require_match
from services.common.streams.types import Purpose, RolloutGroup, ScoredGroup
from services.common.streams.worker import MAX_DELIVERIES, StreamWorker, WorkerCounters, WorkerLimits
from services.reward import metrics
from services.reward.dispatch import Dispatch
from services.reward.samples import SampleBudget, keep_sample

CONSUMER_GROUP = "reward"
MAX_GROUPS = 64
"""Most groups of a job in flight."""
IN_FLIGHT_BYTES = 256 * 1024**2
"""Most bytes of their entries: with a higher limit of an entry fewer groups are in flight."""
READ_COUNT = 16
"""Most groups of one read."""
COUNTERS = WorkerCounters(blocked_s=metrics.BLOCKED_SECONDS, dead_letters=metrics.GROUPS.labels(result="dead_letter"))


class JobSession:
    """Judges one job's groups.

    rollouts stream ── read ──► decode ── verdicts (dispatch) ── send ──► scored stream
                                   └─ unusable ──► dead letters
    """

    def __init__(self, commands: Redis, consumer: Consumer, dispatch: Dispatch, *, drain: Drain, bound: int) -> None:
        """`dispatch`: the job's own, opened and closed by `run`, so that no other job waits; `bound`: most entries of the scored stream."""
        self._commands, self.dispatch = commands, dispatch
        self._job_id, self._limit_bytes = consumer.job_id, consumer.limit_bytes
        groups = max(1, min(MAX_GROUPS, IN_FLIGHT_BYTES // consumer.limit_bytes))
        limits = WorkerLimits(entries=groups, read_count=READ_COUNT, bound=bound)
        self._samples = SampleBudget()
        self._worker = StreamWorker(consumer, Stage.SCORED, limits, COUNTERS, drain)

    @property
    def in_flight(self) -> int:
        """Groups delivered and not yet sent on."""
        return self._worker.in_flight

    async def run(self) -> None:
        """Judges groups.

        Consumes:     the rollouts stream.
        Waits for:    groups, while fewer than MAX_GROUPS, of IN_FLIGHT_BYTES at most, are in flight.
        Unblocked by: rollout servers.
        Produces:     scored groups on the scored stream, and samples for people.
        """
        with log_context(job_id=self._job_id):
            async with self.dispatch:
                await self._worker.run(self._handle)

    async def _handle(self, entry: Entry) -> None:
        group = codec.decode(RolloutGroup, entry.payload, self._limit_bytes)
        require_match(entry, group.task, self._job_id, "task.")
        with log_context(group_id=group.task.group_id):
            if entry.deliveries > MAX_DELIVERIES:
                reason = f"delivered to be judged {entry.deliveries} times without success"
                failed = replace(group, rollouts=(), failure=reason, permanent=True)
                payload = codec.encode(ScoredGroup(failed, (), 0.0), self._limit_bytes)
                await self._worker.reject(entry, payload, reason)
            scored, ended = await self.dispatch.judge(group), time.time()
            moved = await self._worker.send(entry, codec.encode(without_text(scored), self._limit_bytes))
            if moved is not None:
                await self._record(scored, moved=moved)
                _trace(scored, ended)

    async def _record(self, scored: ScoredGroup, *, moved: bool) -> None:
        """Counts a group that was sent on, and keeps a sample of it."""
        failed = scored.group.failure
        metrics.GROUPS.labels(result="passed_on" if failed else "judged").inc()
        if not failed:
            metrics.JUDGE_SECONDS.observe(scored.judge_s)
            metrics.VERIFIED_TOKENS.inc(scored.group.sampled_tokens)
            if moved and self._samples.take():
                await keep_sample(self._commands, scored)


def _trace(scored: ScoredGroup, ended: float) -> None:
    """The span of a training group's verdicts, of which the last came at `ended` (Unix seconds)."""
    task, verdicts = scored.group.task, scored.verdicts
    if is_tracing() and task.purpose is Purpose.TRAIN:
        about: Attributes = {
            "attempt": task.attempt, "lineage": task.lineage, "verifiers": ",".join(sorted({verdict.verifier for verdict in verdicts})),
            "not_judged": sum(verdict.reward is None for verdict in verdicts),
        }  # fmt: skip
        trace(GroupSpan("judge", task.job_id, task.group_id, ended - scored.judge_s, ended, about))


def without_text(scored: ScoredGroup) -> ScoredGroup:
    """The group as the learner receives it: it needs tokens, not text."""
    rollouts = tuple(rollout.without_text for rollout in scored.group.rollouts)
    return replace(scored, group=replace(scored.group, rollouts=rollouts))
