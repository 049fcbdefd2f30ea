"""Policies for chats: the attached job's, or, while no job in training needs this server, the export of an ended job.

a job is activated ──► claim ──► chats in flight are aborted; the engine belongs to training
the job is retired ──► release ──► idle: the first chat with an ended job loads its export, the next ones use it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.common.config.inference import LOAD_LIMIT_S, RefusalReason
from services.common.jobs.record import JobRecord
from services.common.jobs.store import JobStore
from services.rollout.chat.queue import PACE_S, ChatQueue
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import ChatRefused
from services.rollout.engine.update import EngineError

log = logging.getLogger(__name__)

Load = Callable[[JobRecord, Path], Awaitable[None]]
"""Loads a job's export into the engine (`services.rollout.chat.exports.ExportLoader.load`)."""


class Policies:
    """The policy of one server. Training has precedence at any time."""

    def __init__(
        self, engine: Engine, queue: ChatQueue, store: JobStore, load: Load, *, load_limit_s: float = LOAD_LIMIT_S
    ) -> None:
        self._engine, self._queue, self._store, self._load = engine, queue, store, load
        self._load_limit_s = load_limit_s
        self._attached: str | None = None
        self._leaving = self._draining = False
        self._loading: asyncio.Task[None] | None = None
        self.hosted: str | None = None
        """The ended job whose export is loaded, or is being loaded."""
        self.fault: EngineError | None = None
        """Error of a load after which the engine cannot be used: the process must end."""
        self.epoch = 0
        """Increases whenever the engine's model may change."""

    @property
    def hosting(self) -> str | None:
        """State for the list of workers, while an export is loaded or loading."""
        if self.hosted is None:
            return None
        return "loading" if self._loading is not None else "serving"

    async def claim(self, job_id: str) -> None:
        """Gives the engine to training: ends all chats and any load."""
        self._attached = job_id
        self._queue.pace_s = PACE_S
        await self._end_chats("a job in training took this server: ask again, another may be free")

    async def clear(self, reason: str) -> None:
        """Aborts the chats in flight and refuses new ones, until the attached job is released."""
        self._leaving = True
        self.epoch += 1
        await self._queue.clear(reason)

    def release(self) -> None:
        """Makes the engine free for exports, after the attached job has ended."""
        self._attached, self._leaving = None, False
        self._queue.pace_s = 0.0

    async def drain(self) -> None:
        """Refuses new chats, and aborts those in flight."""
        self._draining = True
        await self._end_chats("this server shuts down: ask again")

    async def open(self, job_id: str) -> asyncio.Task[None] | None:
        """The load that a chat with this job must wait for (`loaded`), started now if necessary; None when the policy is ready.

        Raises:
            ChatRefused: this server has no policy of that job now.
        """
        if self._draining:
            raise ChatRefused("this server shuts down", RefusalReason.NOT_HERE)
        if self._attached == job_id:
            if self._engine.version is None or self._leaving:
                raise ChatRefused(f"the policy of job {job_id} is not loaded yet: try again", RefusalReason.NOT_HERE)
            return None
        if self._attached is not None:
            raise ChatRefused("this server is attached to another job", RefusalReason.NOT_HERE)
        if self.hosted == job_id:
            return self._loading
        return await self._start_load(job_id)

    async def loaded(self, job_id: str, loading: asyncio.Task[None]) -> None:
        """Waits for a load. Raises ChatRefused when it failed, training took the engine, or it exceeds the limit."""
        done, _ = await asyncio.wait([loading], timeout=self._load_limit_s)
        if not done:
            raise ChatRefused(
                f"the checkpoint of job {job_id} is not loaded after {self._load_limit_s:.0f} s; it goes on: try again",
                RefusalReason.NOT_LOADED,
            )
        if loading.cancelled():
            raise ChatRefused("training took this server while the checkpoint was loading", RefusalReason.NOT_HERE)
        error = loading.exception()
        if error is not None:
            raise ChatRefused(f"the checkpoint of job {job_id} cannot be loaded: {error}", RefusalReason.NOT_LOADED)

    async def _start_load(self, job_id: str) -> asyncio.Task[None] | None:
        """Starts to load a job's export, unless the present one has chats in flight."""
        record = await self._store.find(job_id)
        if record is None or record.export is None or not record.state.ended:
            raise ChatRefused(f"job {job_id} has no exported checkpoint to load", RefusalReason.NOT_FOUND)
        if self._attached is not None or self._draining:  # since the request for the record
            raise ChatRefused("this server is attached to another job", RefusalReason.NOT_HERE)
        if self.hosted == job_id:
            return self._loading
        if self._loading is not None or self._queue.chats:
            raise ChatRefused("this server serves another job's checkpoint", RefusalReason.BUSY)
        self.hosted = job_id
        self.epoch += 1
        self._loading = asyncio.create_task(self._host(record, Path(record.export)), name=f"load {job_id}")
        return self._loading

    async def _host(self, record: JobRecord, export: Path) -> None:
        log.info("loading the exported checkpoint of job %s", record.id)
        loaded = False
        try:
            await self._load(record, export)
            loaded = True
        except EngineError as error:
            self.fault = error
            raise
        except Exception:
            log.exception("the exported checkpoint of job %s cannot be loaded", record.id)
            raise
        finally:
            self._loading = None
            if not loaded:
                self.hosted = None

    async def _end_chats(self, reason: str) -> None:
        """Ends every chat and any load; the engine keeps running, without a label if an export was in it."""
        self.epoch += 1
        loading, hosted = self._loading, self.hosted
        self._loading = self.hosted = None
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        await self._queue.clear(reason)
        if hosted is not None:
            await self._engine.label.change(None)
