"""What the reward service does for one running job."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import NoReturn

from redis.asyncio import Redis

from services.common.errors import EntryError
from services.common.redis.connection import BLOCK_S
from services.common.redis.fencing import LEASE_S, Fence
from services.common.redis.keys import Stage
from services.common.service.lifecycle import Drain
from services.common.service.logs import log_context
from services.common.spec import RewardSpec
from services.common.streams import codec
from services.common.streams.consumer import MAX_DELIVERIES, Consumer, Entry, require_place
from services.common.streams.stream import MAX_STREAM_LENGTH
from services.common.streams.types import RolloutGroup, ScoredGroup
from services.reward import metrics
from services.reward.judging import judge_group, without_text
from services.reward.pool.pool import Pool
from services.reward.samples import keep_sample

log = logging.getLogger(__name__)

CONSUMER_GROUP = "reward"
MAX_GROUPS = 64
"""Groups of a job held at once."""

READ_COUNT = 16


class Attachment:
    """Judges one job's groups.

    rollouts stream ── read ──► decode ── verdicts (pool) ── hop ──► scored stream
                                   └─ cannot be used ──► dead letters
    """

    def __init__(
        self,
        commands: Redis,
        blocking: Redis,
        pool: Pool,
        job_id: str,
        spec: RewardSpec,
        *,
        name: str,
        drain: Drain,
        lease_s: float = LEASE_S,
        bound: int = MAX_STREAM_LENGTH,
        fence: Fence | None = None,
    ) -> None:
        """Reads under the stable name of this server, to which `fence` is; `bound` is the most entries the scored stream may hold.

        `pool` is started and closed by `run`: another job's checks do not wait for this one's.
        """
        self._commands = commands
        self.pool = pool
        self._job_id = job_id
        self._spec = spec
        self._drain = drain
        self._bound = bound
        self._consumer = Consumer(
            commands, blocking, job_id, Stage.ROLLOUTS, group=CONSUMER_GROUP, name=name, lease_s=lease_s, fence=fence
        )

    @property
    def in_flight(self) -> int:
        """Groups delivered and not yet sent on."""
        return self._consumer.held

    async def run(self) -> None:
        """Consumes the rollouts stream; waits for entries; unblocked by rollout servers; produces scored groups. Returns on drain."""
        with log_context(job_id=self._job_id):
            async with self.pool, asyncio.TaskGroup() as tasks:
                renewing = tasks.create_task(self._consumer.keep_renewing())
                groups: set[asyncio.Task[None]] = set()
                while not self._drain.requested:
                    if len(groups) >= MAX_GROUPS:
                        await asyncio.wait(groups, return_when=asyncio.FIRST_COMPLETED, timeout=BLOCK_S)
                    else:
                        count = min(READ_COUNT, MAX_GROUPS - len(groups))
                        entries = await self._consumer.read(count, BLOCK_S)
                        groups |= {tasks.create_task(self._handle(entry)) for entry in entries}
                    groups = {group for group in groups if not group.done()}
                if groups:
                    await asyncio.wait(groups)
                renewing.cancel()

    async def _handle(self, entry: Entry) -> None:
        try:
            group = self._open(entry)
            with log_context(group_id=group.task.group_id):
                if entry.deliveries > MAX_DELIVERIES:
                    await self._give_up(entry, group)
                scored = group_failed(group) or await judge_group(self.pool, group, self._spec)
                payload = codec.encode(without_text(scored))
                await self._send_on(entry, payload, scored)
        except EntryError as error:
            log.warning("entry %s (%s) is put aside: %s", entry.id, entry.member, error)
            await self._consumer.dead_letter(entry, str(error))
            metrics.GROUPS.labels(result="dead_letter").inc()

    def _open(self, entry: Entry) -> RolloutGroup:
        group = codec.decode(RolloutGroup, entry.payload)
        require_place(entry, group.task, self._job_id, "task.")
        return group

    async def _give_up(self, entry: Entry, group: RolloutGroup) -> NoReturn:
        reason = f"delivered to be judged {entry.deliveries} times without success"
        failed = replace(group, rollouts=(), failure=reason, permanent=True)
        payload = codec.encode(ScoredGroup(failed, (), 0.0))
        await self._consumer.give_up(entry, Stage.SCORED, payload, reason, bound=self._bound)

    async def _send_on(self, entry: Entry, payload: bytes, scored: ScoredGroup) -> None:
        moved = await self._consumer.hop_with_room(
            entry, Stage.SCORED, payload, bound=self._bound, drain=self._drain, blocked=metrics.BLOCKED_SECONDS
        )
        if moved is None:
            return
        metrics.GROUPS.labels(result="passed_on" if scored.group.failure else "judged").inc()
        if not scored.group.failure:
            metrics.JUDGE_SECONDS.observe(scored.judge_s)
            metrics.VERIFIED_TOKENS.inc(sum(len(rollout.tokens) for rollout in scored.group.rollouts))
            if moved:
                await keep_sample(self._commands, scored)


def group_failed(group: RolloutGroup) -> ScoredGroup | None:
    """A group that could not be sampled, as it passes through: nothing to judge. None when there is."""
    return ScoredGroup(group, (), 0.0) if group.failure is not None and not group.rollouts else None
