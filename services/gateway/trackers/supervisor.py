"""Supervisor of the trackers: in the gateway, one delivery for each job and tracker.

    jobs that a learner holds ─┐                          ┌─► child of (job, tracker): `Follower.advance`, batch by batch
    jobs that ended lately ────┴─► a task for each: `Delivery`
                                                          └─► too late ─► killed; a new child goes on from the recorded position

The learner, which writes the history, knows nothing of it: a tracker that hangs, fails or is gone delays no step, and loses no point.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.common.config.settings import Settings
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.sandbox.pool import Sandbox
from services.common.service.logs import log_context
from services.gateway.metrics import GatewayMetrics
from services.gateway.trackers.available import obstacle, wanted
from services.gateway.trackers.delivery import Delivery
from services.gateway.trackers.history import Position

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
SCAN_INTERVAL_S = 180.0
"""Between two looks at all jobs, for those that ended while nobody followed them."""
LATELY_S = 7 * 24 * 3600.0
"""Jobs that ended longer ago stay as they are."""
END_S = 8.0
"""What a gateway that ends gives the deliveries of jobs that have just ended; the next gateway sends the rest."""
AT_ONCE = 4
"""Batches of one tracker at the same time."""


class Trackers:
    """All trackers of all jobs. Each gateway may have one: of two that follow the same job, one has the follower's lock."""

    def __init__(
        self, redis: Redis, store: JobStore, settings: Settings, metrics: GatewayMetrics, sandbox: Sandbox
    ) -> None:
        """The caller stops the sandbox, whose children are the followers."""
        self._redis, self._store, self._settings = redis, store, settings
        self._deliver = partial(Delivery, redis=redis, store=store, settings=settings, metrics=metrics, sandbox=sandbox)
        self._tasks: dict[tuple[str, str], tuple[Delivery, asyncio.Task[None]]] = {}
        self._done: set[str] = set()
        """Jobs whose trackers have everything, or will never have more."""
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        self._next_scan = 0.0

    async def run(self) -> None:
        """Follows jobs until it is cancelled.

        Consumes:     the jobs that learners hold, and those that ended lately.
        Waits for:    POLL_INTERVAL_S.
        Unblocked by: time.
        Produces:     a delivery for each job and tracker.
        """
        try:
            while True:
                try:
                    for job_id in await self._new_jobs():
                        await self._begin(job_id)
                except RedisError as error:
                    log.warning("cannot look for jobs to track: %s", type(error).__name__)
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """Ends all deliveries; those of jobs that have ended get END_S for what they have not sent yet."""
        ending = [task for delivery, task in self._tasks.values() if await delivery.ended()]
        if ending:
            await asyncio.wait(ending, timeout=END_S)
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _new_jobs(self) -> list[str]:
        """Jobs that are not followed yet: those that a learner holds; now and then, also those that ended lately."""
        found = [text(raw) for raw in await self._redis.zrange(keys.HELD, 0, -1)]
        if time.monotonic() >= self._next_scan:
            oldest, offset = time.time() - LATELY_S, 0
            while rows := await self._store.list(offset=offset, limit=500):
                found += [row.id for row in rows if row.state.ended and (row.finished_at or 0.0) > oldest]
                offset += len(rows)
            self._next_scan = time.monotonic() + SCAN_INTERVAL_S
        known = self._done | {job_id for job_id, _ in self._tasks}
        return [job_id for job_id in dict.fromkeys(found) if job_id not in known]

    async def _begin(self, job_id: str) -> None:
        record, folder = await self._store.find(job_id), self._settings.job_dir(job_id)
        if record is None or not await asyncio.to_thread(folder.is_dir):
            return
        names = ["files"]
        for name in wanted(record.spec.trackers):
            if reason := obstacle(name, self._settings):
                with log_context(job_id=job_id):
                    log.warning("%s gets nothing of this job: %s", name, reason)
            else:
                names.append(name)
        if record.state.ended and await asyncio.to_thread(_all_sent, folder, names):
            self._done.add(job_id)
            return
        for name in names:
            self._start(job_id, name, self._deliver(record, name))

    def _start(self, job_id: str, name: str, delivery: Delivery) -> None:
        async def deliver() -> None:
            with log_context(job_id=job_id):
                await delivery.run(self._turns[name])

        task = asyncio.create_task(deliver(), name=f"{name} of {job_id}")
        self._tasks[job_id, name] = delivery, task
        task.add_done_callback(partial(self._ended, job_id, name))

    def _ended(self, job_id: str, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[job_id, name]
        if not any(other == job_id for other, _ in self._tasks):
            self._done.add(job_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the delivery %s died", task.get_name(), exc_info=error)


def _all_sent(folder: Path, names: Sequence[str]) -> bool:
    """Whether every tracker has the end of the job."""
    return all(Position.load(folder / "trackers" / f"{name}.json").ended for name in names)
