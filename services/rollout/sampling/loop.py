"""Task loop: samples the groups of a job's tasks stream."""

from __future__ import annotations

import logging
import time

from services.common.errors import EntryError
from services.common.redis.connection import BLOCK_S
from services.common.redis.keys import Stage
from services.common.service.lifecycle import Drain, unless
from services.common.service.logs import log_context
from services.common.service.tracing import Attributes, GroupSpan, is_tracing, trace
from services.common.streams import codec
from services.common.streams.consumer import Consumer, Entry, require_match
from services.common.streams.types import Purpose, RolloutGroup, Task
from services.common.streams.worker import MAX_DELIVERIES, StreamWorker, WorkerCounters, WorkerLimits
from services.common.weights.snapshot import PolicyVersion
from services.rollout import metrics
from services.rollout.engine.update import VersionLabel
from services.rollout.sampling.sampler import Sampler

log = logging.getLogger(__name__)

CONSUMER_GROUP = "rollout"
READ_COUNT = 32
"""Most tasks of one read."""
_COUNTERS = WorkerCounters(
    blocked_s=metrics.BLOCKED_SECONDS,
    dead_letters=metrics.GROUPS.labels(outcome="dead_letter"),
    idle_s=metrics.IDLE_SECONDS,
)


class TaskLoop:
    """Loop over one job's tasks."""

    def __init__(
        self, consumer: Consumer, sampler: Sampler, label: VersionLabel, limits: WorkerLimits, drain: Drain
    ) -> None:
        """`consumer`: of the job's tasks; `label`: the version that the sampler's engine holds."""
        self._sampler, self._label, self._drain = sampler, label, drain
        self._job_id, self._limit_bytes = consumer.job_id, consumer.limit_bytes
        self._worker = StreamWorker(consumer, Stage.ROLLOUTS, limits, _COUNTERS, drain)

    @property
    def groups(self) -> int:
        """Groups in flight."""
        return self._worker.in_flight

    async def run(self) -> None:
        """Samples groups.

        Consumes:     the tasks stream.
        Waits for:    the first weights, then tasks, while fewer than `limits.entries` groups are in flight.
        Unblocked by: the weight loop, then the learner.
        Produces:     groups on the rollouts stream. Returns on drain.
        """
        while not self._drain.requested:  # the server takes no task before it has a version
            if await self._label.wait_for(PolicyVersion(0, 0), timeout_s=BLOCK_S / 4):
                await self._worker.run(self._handle)
                return

    async def _handle(self, entry: Entry) -> None:
        """Handles one task, from its delivery to its group."""
        task = codec.decode(Task, entry.payload, self._limit_bytes)
        require_match(entry, task, self._job_id)
        if entry.deliveries > MAX_DELIVERIES:
            reason = f"delivered {entry.deliveries} times without success"
            failed = self._sampler.failed(task, reason, permanent=True)
            await self._worker.reject(entry, codec.encode(failed, self._limit_bytes), reason)
        with log_context(group_id=task.group_id):
            await self._sample_and_send(entry, task)

    async def _sample_and_send(self, entry: Entry, task: Task) -> None:
        group, ended = await self._sample(task), time.time()
        if group is None or self._stale(task):
            await self._worker.drop(entry)
            metrics.GROUPS.labels(outcome="stale_lineage").inc()
            log.info("dropped: lineage %d is over", task.lineage)
            return
        try:
            payload = codec.encode(group, self._limit_bytes)
        except EntryError as error:
            group = self._sampler.failed(task, f"the group is too large: {error}")
            payload = codec.encode(group, self._limit_bytes)
        if await self._worker.send(entry, payload):
            metrics.GROUPS.labels(outcome=_outcome(group)).inc()
            _trace(group, ended)

    async def _sample(self, task: Task) -> RolloutGroup | None:
        """Samples the group; None when the task's lineage ended first."""
        if self._stale(task):
            return None
        wanted = PolicyVersion(task.lineage, task.min_policy_version)
        if not await self._label.wait_for(wanted, task.timeout_s):
            return self._sampler.failed(task, f"policy version {wanted} did not arrive within {task.timeout_s:g} s")
        if self._stale(task):
            return None
        next_lineage = self._label.wait_for(PolicyVersion(task.lineage + 1, 0))
        return await unless(next_lineage, self._sampler.sample(task), f"sample {task.member}")

    def _stale(self, task: Task) -> bool:
        version = self._label.version
        return version is not None and task.lineage < version.lineage


def _trace(group: RolloutGroup, ended: float) -> None:
    """The span of a training group's sampling, which ended at `ended` (Unix seconds)."""
    task = group.task
    if is_tracing() and task.purpose is Purpose.TRAIN:
        about: Attributes = {
            "attempt": task.attempt, "lineage": task.lineage, "server": group.server, "rollouts": len(group.rollouts),
            "tokens": group.sampled_tokens,
            "min_policy_version": group.min_policy_version, "max_policy_version": group.max_policy_version,
        }  # fmt: skip
        start, error = ended - group.generate_s, group.failure or ""
        trace(GroupSpan("sample", task.job_id, task.group_id, start, ended, about, error))


def _outcome(group: RolloutGroup) -> str:
    if group.failure is not None:
        return "failed"
    return "sampled" if len(group.rollouts) == group.task.group_size else "closed_early"
