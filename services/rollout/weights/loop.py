"""Keeps the engine's weights as new as the learner's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine

from services.common.errors import WeightSyncError
from services.common.weights.version import PolicyVersion
from services.rollout import metrics
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import StagedWeights
from services.rollout.engine.update import Activation
from services.rollout.weights.client import WeightReceiver
from services.rollout.weights.staging import Stage

log = logging.getLogger(__name__)

UNREACHABLE_S = 30.0
_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


class WeightLoop:
    """One job's weights; `run` until cancelled."""

    def __init__(
        self, engine: Engine, stage: Stage, address: str, *, job_id: str, server: str, token: str | None
    ) -> None:
        """`address`: host:port of the learner's gRPC; it may change (`move`)."""
        self._engine, self._stage = engine, stage
        self._address, self._job_id, self._server, self._token = address, job_id, server, token
        self._moved = asyncio.Event()
        self.updating = False
        """Whether the engine is being changed right now."""

    def move(self, address: str) -> None:
        """The learner listens elsewhere now (it was started again)."""
        if address != self._address:
            self._address = address
            self._moved.set()

    async def run(self) -> None:
        """Keeps the engine up to date.

        Consumes: announcements of the learner. Waits for: a version newer than the engine's; the whole old weights stay meanwhile.
        Unblocked by: the learner's publish, or its coming back (asked again with a back-off, at the address that holds then).
        Produces: fetched, verified, activated versions, and a report of each to the learner.
        """
        backoff = _BACKOFF_S
        while True:
            receiver = WeightReceiver(self._address, self._job_id, self._server, self._stage, self._token)
            self._moved.clear()
            try:
                before = self._engine.version
                await self._until_moved(self._follow(receiver))
            except WeightSyncError as error:
                log.warning("weights: %s", error)
            finally:
                receiver.close()
            backoff = _BACKOFF_S if self._engine.version != before else min(2 * backoff, _MAX_BACKOFF_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), backoff * random.uniform(0.5, 1.0))  # noqa: S311

    async def _until_moved(self, following: Coroutine[None, None, None]) -> None:
        follow = asyncio.create_task(following, name="follow")
        moved = asyncio.create_task(self._moved.wait(), name="moved")
        try:
            await asyncio.wait({follow, moved}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (follow, moved):
                task.cancel()
            await asyncio.gather(follow, moved, return_exceptions=True)
        if not follow.cancelled():
            follow.result()

    async def _follow(self, receiver: WeightReceiver) -> None:
        """Brings in the newest version each time there is one; those announced meanwhile are skipped."""
        async for version in receiver.watch(unreachable_s=UNREACHABLE_S):
            if self._engine.version is None or version > self._engine.version:
                await self._bring(receiver, version)

    async def _bring(self, receiver: WeightReceiver, version: PolicyVersion) -> None:
        try:
            staged = await asyncio.to_thread(receiver.fetch, version.lineage, version.n)
        except WeightSyncError as error:
            metrics.WEIGHT_SYNCS.labels(outcome="fetch_failed").inc()
            await self._report(receiver, version, error=str(error))
            raise
        metrics.FETCH_SECONDS.observe(staged.fetch_s)
        metrics.WIRE_BYTES.inc(staged.wire_bytes)
        self.updating = True
        try:
            done = await self._engine.activate(staged)
        except WeightSyncError as error:
            metrics.WEIGHT_SYNCS.labels(outcome="activate_failed").inc()
            await self._report(receiver, version, error=str(error))
            raise
        finally:
            self.updating = False
        _observe(done)
        log.info(
            "policy version %s: fetched in %.3f s, %d bytes; paused %.3f s", version, staged.fetch_s, staged.wire_bytes,
            done.pause_s,
        )  # fmt: skip
        await self._report(receiver, version, staged=staged, done=done)

    async def _report(
        self, receiver: WeightReceiver, version: PolicyVersion, *, error: str = "", staged: StagedWeights | None = None,
        done: Activation | None = None,
    ) -> None:  # fmt: skip
        """Tells the learner. That it does not listen is no reason to stop: the next watch finds out."""
        try:
            await asyncio.to_thread(
                receiver.report,
                version.lineage,
                version.n,
                error=error,
                fetch_s=staged.fetch_s if staged else 0.0,
                wire_bytes=staged.wire_bytes if staged else 0,
                pause_s=done.pause_s if done else 0.0,
                apply_s=done.apply_s if done else 0.0,
            )
        except WeightSyncError as failure:
            log.warning("weights: %s", failure)


def _observe(done: Activation) -> None:
    metrics.WEIGHT_SYNCS.labels(outcome="activated").inc()
    metrics.PAUSE_SECONDS.observe(done.pause_s)
    metrics.APPLY_SECONDS.observe(done.apply_s)
    metrics.POLICY_VERSION.set(done.version.n)
    metrics.LINEAGE.set(done.version.lineage)
