"""Delivery of one job's history to one tracker: drives the child process that does it, and kills one that takes too long."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.common.config.settings import Settings
from services.common.errors import SandboxError, TrackerError
from services.common.jobs.elements import json_objects
from services.common.jobs.folder import HISTORY_FILE
from services.common.jobs.kept_samples import KeptSamples
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.sandbox.limits import MIB, Limits
from services.common.sandbox.pool import Child, Sandbox
from services.gateway.metrics import GatewayMetrics
from services.gateway.trackers.available import options_of
from services.gateway.trackers.sink import Run

log = logging.getLogger(__name__)

FOLLOWER = "services.gateway.trackers.follower:Follower"
POLL_INTERVAL_S = 1.0
"""Between two looks at the job's state: its end is sent at once."""
MAX_PAUSE_S = 300.0
"""Longest pause after failed batches."""
MEMORY_MIB = 16 * 1024
"""Address space: clients start helpers of their own, which reserve much more than they use."""
FILE_BYTES = 4096 * MIB
_SHARES = {"files": 4.0, "tensorboard": 1 / 3}
"""What writes into the job's folder has an interval of its own, relative to that of the others."""


class Delivery:
    """One job and one tracker."""

    def __init__(
        self,
        record: JobRecord,
        name: str,
        *,
        redis: Redis,
        store: JobStore,
        settings: Settings,
        metrics: GatewayMetrics,
        sandbox: Sandbox,
        sink: str | None = None,
    ) -> None:
        """`sink`: the class of the client, as in `Follower`; None: the tracker's own."""
        self._job_id, self._name, self._sink = record.id, name, sink
        self._redis, self._store, self._metrics, self._sandbox = redis, store, metrics, sandbox
        folder, trackers = settings.job_dir(record.id), record.spec.trackers
        self._history = folder / HISTORY_FILE
        self._run = Run(
            record.id, str(folder.absolute()), trackers.project, trackers.run_name or record.id, list(trackers.tags),
            record.spec.model_dump(mode="json"), options_of(name, settings),
        )  # fmt: skip
        self._samples_interval = trackers.samples_interval_steps
        self._kept: KeptSamples | None = None
        self._interval_s = settings.tracker_interval_s * _SHARES.get(name, 1.0)
        self._limits = Limits(settings.tracker_timeout_s, MEMORY_MIB, low_priority=True, file_bytes=FILE_BYTES)
        self._child: Child | None = None
        self._failures = 0

    async def run(self, turns: asyncio.Semaphore) -> None:
        """Delivers until the tracker has the job's end, or the job is gone.

        Consumes:     the job's history.
        Waits for:    the tracker's interval, longer after failed batches; a turn, `tracker_timeout_s` for each of the others.
        Unblocked by: time.
        Produces:     batches; the figures of `GatewayMetrics`; an event of the job at the first failure, and when it is over.
        """
        seen: tuple[str, int] | None = None
        before, due = "", 0.0
        try:
            while (ended := await self.ended()) is not None:
                now = (ended, await asyncio.to_thread(_size, self._history))
                if now != seen and (ended != before or time.monotonic() >= due):
                    async with turns:
                        more = await self._advance(ended)
                    before, seen, due = ended, None if more else now, time.monotonic() + self._pause_s
                    if ended and not more:
                        return
                await asyncio.sleep(min(POLL_INTERVAL_S, self._interval_s))
        finally:
            await self._close()

    @property
    def _pause_s(self) -> float:
        return min(self._interval_s * 2.0**self._failures, max(self._interval_s, MAX_PAUSE_S))

    async def ended(self) -> str | None:
        """The state of a job that has ended, else empty; None when there is no such job any more. While Redis is away: empty."""
        try:
            found = await self._redis.hget(keys.record(self._job_id), "state")
        except RedisError:
            return ""
        if found is None:  # deleted, or Redis has lost it and it is being restored
            return "" if await asyncio.to_thread(self._history.parent.is_dir) else None
        state = JobState(text(found))
        return str(state) if state.ended else ""

    async def _advance(self, ended: str) -> bool:
        """Sends batches until there is none; whether more remains, since one failed or another gateway does it."""
        try:
            if self._name == "files":
                await self._keep_samples(ended=bool(ended))
            while True:
                sent, more = await self._request(ended)
                self._metrics.tracker_points.labels(self._name).inc(sent)
                if not (sent and more):
                    break
        except (TrackerError, SandboxError, OSError, RedisError) as error:
            await self._failed(error)
            return True
        await self._recovered()
        return bool(more)

    async def _request(self, ended: str) -> tuple[int, bool]:
        if self._child is None or not self._child.alive:
            arguments = self._name, asdict(self._run), self._sink
            self._child = await self._sandbox.spawn(FOLLOWER, *arguments, limits=self._limits)
        sent, more = await self._child.request("advance", ended)
        return int(sent), bool(more)

    async def _keep_samples(self, *, ended: bool) -> None:
        """Keeps samples in the job's folder, which Redis forgets after a while; oldest first."""
        newest = json_objects(reversed(await self._redis.lrange(keys.samples(self._job_id), 0, -1)))
        if self._kept is None:
            self._kept = await asyncio.to_thread(KeptSamples, self._history.parent, self._samples_interval)
        await asyncio.to_thread(self._kept.add, newest, ended=ended)

    async def _failed(self, error: Exception) -> None:
        """A failed batch: the child goes, and the next one begins at the recorded position."""
        await self._close()
        self._metrics.tracker_failures.labels(self._name).inc()
        self._failures += 1
        log.warning("%s did not take a batch of points, failure %d in a row: %s", self._name, self._failures, error)
        if self._failures == 1:
            await self._tell(
                f"{self._name} does not take this job's figures: {error}; they are sent again until it does"
            )

    async def _recovered(self) -> None:
        if self._failures:
            self._failures = 0
            await self._tell(f"{self._name} has this job's figures again, all of them")

    async def _tell(self, message: str) -> None:
        data: dict[str, Any] = {"tracker": self._name, "message": message}
        try:
            await self._store.history.event(self._job_id, "tracker", data)
        except RedisError as error:
            log.warning("an event of the job was not written: %s", type(error).__name__)

    async def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.close()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
