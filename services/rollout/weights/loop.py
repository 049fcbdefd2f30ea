"""Weight loop: keeps the engine's weights at the learner's newest version."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from functools import partial

from services.common.errors import WeightSyncError
from services.common.weight_sync.staging import Stage
from services.common.weights.snapshot import PolicyVersion
from services.rollout import metrics
from services.rollout.engine.engine import Engine
from services.rollout.weights.client import WeightReceiver
from services.rollout.weights.relaying import Relaying

log = logging.getLogger(__name__)

_UNREACHABLE_S = 30.0
_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


class WeightLoop:
    """One job's weights; `run` until cancelled."""

    def __init__(
        self,
        engine: Engine,
        stage: Stage,
        relay: Relaying,
        address: str,
        *,
        job_id: str,
        server: str,
        token: str | None,
    ) -> None:
        """`address`: host:port of the learner's gRPC server; `move` changes it."""
        self._engine, self._stage, self._relay = engine, stage, relay
        self._address, self._job_id, self._server, self._token = address, job_id, server, token
        self._moved = asyncio.Event()
        self.updating = False
        """Whether the engine's weights are being changed."""

    def move(self, address: str) -> None:
        """Takes the learner's address, which may be a new one after a restart."""
        if address != self._address:
            self._address = address
            self._moved.set()

    async def run(self) -> None:
        """Keeps the engine up to date.

        Consumes:     announcements of the learner.
        Waits for:    a version newer than the engine's, which keeps its weights meanwhile.
        Unblocked by: the learner's publish, or its restart (the watch is retried with a back-off, at the newest address).
        Produces:     fetched, verified, activated versions, and a report of each to the learner.
        """
        backoff = _BACKOFF_S
        while True:
            receiver = WeightReceiver(self._address, self._job_id, self._server, self._stage, self._token, self._relay)
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
        """Activates the newest version whenever there is one; those announced meanwhile are skipped.

        Nothing is sampled in the learner's turns.
        """
        try:
            async for version, learner_computes in receiver.watch(unreachable_s=_UNREACHABLE_S):
                if self._engine.version is None or version > self._engine.version:
                    await self._fetch_and_activate(receiver, version)
                if learner_computes:
                    await self._engine.hold()
                    await _send(partial(receiver.report_yielded, version))
                else:
                    await self._engine.release()
        finally:
            await self._engine.release()

    async def _fetch_and_activate(self, receiver: WeightReceiver, version: PolicyVersion) -> None:
        report, failure = partial(receiver.report, *version), "fetch_failed"
        try:
            staged = await asyncio.to_thread(receiver.fetch, *version)
            metrics.FETCH_SECONDS.observe(staged.fetch_s)
            metrics.WIRE_BYTES.inc(staged.wire_bytes)
            failure, self.updating = "activate_failed", True
            done = await self._engine.activate(staged)
        except WeightSyncError as error:
            metrics.WEIGHT_SYNCS.labels(outcome=failure).inc()
            await _send(partial(report, error=str(error)))
            raise
        finally:
            self.updating = False
        metrics.WEIGHT_SYNCS.labels(outcome="activated").inc()
        metrics.PAUSE_SECONDS.observe(done.pause_s)
        metrics.APPLY_SECONDS.observe(done.apply_s)
        metrics.POLICY_VERSION.set(done.version.n)
        metrics.LINEAGE.set(done.version.lineage)
        log.info(
            "policy version %s: fetched in %.3f s, %d bytes; paused %.3f s", version, staged.fetch_s, staged.wire_bytes,
            done.pause_s,
        )  # fmt: skip
        report = partial(report, fetch_s=staged.fetch_s, wire_bytes=staged.wire_bytes)
        await _send(partial(report, pause_s=done.pause_s, apply_s=done.apply_s))


async def _send(report: Callable[[], object]) -> None:
    """Sends a report to the learner. A failure is only logged: the next watch detects a learner that is gone."""
    try:
        await asyncio.to_thread(report)
    except WeightSyncError as failure:
        log.warning("weights: %s", failure)
