"""Takes a job's tasks from their stream and sends the sampled groups on."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from redis.asyncio import Redis

from services.common.errors import EntryError
from services.common.redis.connection import BLOCK_S
from services.common.redis.fencing import LEASE_S, Fence
from services.common.redis.keys import Stage
from services.common.service.lifecycle import Drain
from services.common.service.logs import log_context
from services.common.streams import codec
from services.common.streams.consumer import MAX_DELIVERIES, Consumer, Entry, require_place
from services.common.streams.stream import MAX_STREAM_LENGTH
from services.common.streams.types import RolloutGroup, Task
from services.rollout import metrics
from services.rollout.engine.version import Version, VersionLabel
from services.rollout.sampling.sampler import Sampler

log = logging.getLogger(__name__)

CONSUMER_GROUP = "rollout"
READ_COUNT = 32


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """How much the loop takes on."""

    max_groups: int
    """Groups sampled at once."""
    lease_s: float = LEASE_S
    bound: int = MAX_STREAM_LENGTH
    """Most entries that the rollouts stream may hold."""


class TaskLoop:
    """One job's tasks; `run` until the drain, or cancelled."""

    def __init__(
        self, commands: Redis, blocking: Redis, sampler: Sampler, label: VersionLabel, *, job_id: str, name: str,
        limits: TaskLimits, drain: Drain, fence: Fence | None = None,
    ) -> None:  # fmt: skip
        """Reads under the stable name of this server, to which `fence` is; `label`: the version that the sampler's engine holds."""
        self._sampler, self._label = sampler, label
        self._job_id, self._limits, self._drain = job_id, limits, drain
        self._consumer = Consumer(
            commands, blocking, job_id, Stage.TASKS,
            group=CONSUMER_GROUP, name=name, lease_s=limits.lease_s, fence=fence,
        )  # fmt: skip
        self._handling: set[asyncio.Task[None]] = set()

    @property
    def groups(self) -> int:
        """Groups being worked on."""
        return sum(not handling.done() for handling in self._handling)

    async def run(self) -> None:
        """Takes tasks and sends groups on.

        Consumes: the tasks stream. Waits for: the first weights, then entries, while fewer than `max_groups` are worked on.
        Unblocked by: the weights loop, then the learner. Produces: groups on the rollouts stream. Returns on drain, when what it
        had taken is done; entries that are not done when it is cancelled stay pending, for others.
        """
        if not await self._caught_up():
            return
        renewing = asyncio.create_task(self._consumer.keep_renewing(), name="renew")
        try:
            while not self._drain.requested:
                await self._take()
                self._reap(renewing)
            if self._handling:
                await asyncio.wait(self._handling)
            self._reap(renewing)
        finally:
            for task in (renewing, *self._handling):
                task.cancel()
            await asyncio.gather(renewing, *self._handling, return_exceptions=True)

    async def _caught_up(self) -> bool:
        """Waits for the weights; False when the drain came first. The server takes nothing before it holds the current version."""
        while not self._drain.requested:
            if await self._label.wait_for(Version(0, 0), timeout_s=BLOCK_S / 4):
                return True
        return False

    async def _take(self) -> None:
        """Reads as many entries as there is room for, or waits for room."""
        room = self._limits.max_groups - len(self._handling)
        if room <= 0:
            await asyncio.wait(self._handling, return_when=asyncio.FIRST_COMPLETED, timeout=BLOCK_S)
            return
        idle, started = not self._handling, time.monotonic()
        entries = await self._consumer.read(min(READ_COUNT, room), BLOCK_S)
        if idle:
            metrics.IDLE_SECONDS.inc(time.monotonic() - started)
        for entry in entries:
            self._handling.add(asyncio.create_task(self._handle(entry), name=f"group {entry.member}"))

    def _reap(self, renewing: asyncio.Task[None]) -> None:
        """Lets finished groups go, and raises what one of them raised."""
        for task in [renewing, *self._handling]:
            if task.done() and not task.cancelled():
                self._handling.discard(task)
                task.result()

    async def _handle(self, entry: Entry) -> None:
        """One entry, from delivery to what becomes of it."""
        try:
            task = self._open(entry)
            if entry.deliveries > MAX_DELIVERIES:
                reason = f"delivered {entry.deliveries} times without success"
                payload = codec.encode(self._sampler.failed(task, reason, permanent=True))
                await self._consumer.give_up(entry, Stage.ROLLOUTS, payload, reason, bound=self._limits.bound)
            with log_context(group_id=task.group_id):
                await self._answer(entry, task)
        except EntryError as error:
            log.warning("entry %s (%s) is put aside: %s", entry.id, entry.member, error)
            await self._consumer.dead_letter(entry, str(error))
            metrics.GROUPS.labels(outcome="dead_letter").inc()

    def _open(self, entry: Entry) -> Task:
        task = codec.decode(Task, entry.payload)
        require_place(entry, task, self._job_id)
        return task

    async def _answer(self, entry: Entry, task: Task) -> None:
        group = await self._sample(task)
        if group is None or self._stale(task):
            await self._consumer.ack(entry)
            metrics.GROUPS.labels(outcome="stale_lineage").inc()
            log.info("dropped: lineage %d is over", task.lineage)
            return
        try:
            payload = codec.encode(group)
        except EntryError as error:
            group = self._sampler.failed(task, f"the group is too large: {error}")
            payload = codec.encode(group)
        if await self._consumer.hop_with_room(
            entry, Stage.ROLLOUTS, payload, bound=self._limits.bound, drain=self._drain, blocked=metrics.BLOCKED_SECONDS
        ):
            metrics.GROUPS.labels(outcome=_outcome(group)).inc()

    async def _sample(self, task: Task) -> RolloutGroup | None:
        """The group; None when the task's lineage ended before it did."""
        if self._stale(task):
            return None
        wanted = Version(task.lineage, task.min_policy_version)
        if not await self._label.wait_for(wanted, task.timeout_s):
            return self._sampler.failed(
                task, f"policy version {tuple(wanted)} did not arrive within {task.timeout_s:g} s"
            )
        if self._stale(task):
            return None
        sampling = asyncio.create_task(self._sampler.sample(task), name=f"sample {task.member}")
        ended = asyncio.create_task(self._label.wait_for(Version(task.lineage + 1, 0)), name="lineage")
        try:
            await asyncio.wait({sampling, ended}, return_when=asyncio.FIRST_COMPLETED)
            return sampling.result() if sampling.done() else None
        finally:
            for waiting in (sampling, ended):
                waiting.cancel()
            await asyncio.gather(sampling, ended, return_exceptions=True)

    def _stale(self, task: Task) -> bool:
        version = self._label.version
        return version is not None and task.lineage < version.lineage


def _outcome(group: RolloutGroup) -> str:
    if group.failure is not None:
        return "failed"
    return "sampled" if len(group.rollouts) == group.task.group_size else "closed_early"
