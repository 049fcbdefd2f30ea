"""Head of a job: rank 0's I/O, in a thread with its own event loop. The ranks only train.

tasks stream ◄── issue ◄─┐                               ┌─► journal, checkpoints
                         │                               │
scored stream ─► collect ─► buffer ─► train ─► ranks ────┼─► publisher ── gRPC ─► rollout servers
                         ▲             ▲                 │
                         └─ monitor ───┘                 └─► job record, step history, events
"""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from pathlib import Path

from redis.asyncio import Redis

from services.common.checkpoints.fingerprint import identity_of
from services.common.checkpoints.manifest import CHECKPOINTS_DIR
from services.common.config.settings import Settings
from services.common.jobs.fates import FATES_FILE
from services.common.jobs.versions import record_versions
from services.common.models.directory import inspect_model
from services.common.models.weight_files import version_bytes
from services.common.redis import keys
from services.common.redis.connection import BLOCK_S, connect
from services.common.sandbox.pool import Sandbox
from services.common.service.lifecycle import Drain, run_service
from services.common.service.logs import log_context
from services.common.service.tracing import close_tracing, configure_tracing
from services.common.spec.job import JobSpec
from services.common.streams.consumer import Consumer
from services.common.streams.limits import entry_limit
from services.common.weight_sync.server import KEEP
from services.common.weight_sync.staging import Stage, default_stage_directory, remove_abandoned
from services.learner.groups.buffer import GroupBuffer
from services.learner.groups.data import JobData, TaskFactory
from services.learner.groups.ledger import Ledger
from services.learner.groups.validate import Limits
from services.learner.loops.collect import collect_loop
from services.learner.loops.issue import issue_loop
from services.learner.loops.monitor import monitor_loop
from services.learner.loops.state import JobContext, Progress
from services.learner.loops.train import train_loop
from services.learner.ranks.client import Ranks
from services.learner.storage.checkpoints import CheckpointStore
from services.learner.storage.fates import FateLog
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.job_store import HeadStore
from services.learner.storage.journal import Journal
from services.learner.storage.journal_key import journal_key
from services.learner.storage.lineage import FIRST
from services.learner.storage.lock import FolderLock
from services.learner.weights.messages import Serve
from services.learner.weights.publisher import Publisher

log = logging.getLogger(__name__)

REPLACED_S = 5.0
"""Time for an older head of the job to release the folder; then it is killed."""
_STAGES = "weights-"
"""Prefix of the names of the directories that versions are published from."""
BLOCKED_S = 900.0
"""The head's event loop may hash and write large files itself."""


class Head:
    """One job's loops, in a thread beside rank 0's main thread."""

    def __init__(self, job_id: str, spec: JobSpec, model_dir: Path, settings: Settings, ranks: Ranks) -> None:
        self._job_id, self._spec, self._model_dir, self._settings = job_id, spec, model_dir, settings
        self.ranks = ranks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: Drain | None = None
        self._lock: FolderLock | None = None
        self._thread = threading.Thread(target=self._main, name="head", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def drain(self) -> None:
        """Requests the end of the loops at the next step boundary; safe from any thread and from signal handlers."""
        if self._loop is not None and self._drain is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain.request)

    def join(self, timeout_s: float) -> None:
        """Waits until the thread has ended."""
        self._thread.join(timeout_s)

    def release(self) -> None:
        """Releases the job's folder to another head. A head that died holds it until its process ends: its ranks may still write."""
        if self._lock is not None:
            self._lock.release()

    def _main(self) -> None:
        try:
            with log_context(job_id=self._job_id):
                asyncio.run(self._run())
        except BaseException as error:
            log.exception("the head died")
            self.ranks.fail(error)
        else:
            self.release()

    async def _run(self) -> None:
        self._loop, self._drain = asyncio.get_running_loop(), Drain()
        settings, drain = self._settings, self._drain
        redis = connect(settings.redis_url, password=settings.redis_password)
        blocking = connect(settings.redis_url, password=settings.redis_password, block_s=BLOCK_S)
        sandbox = Sandbox(service="learner-data", log_level=settings.log_level)
        configure_tracing(settings, "learner")
        data = JobData(sandbox, self._spec, settings)
        publisher: Publisher | None = None
        try:
            store = await HeadStore.begin(redis, settings.home / "jobs", self._job_id)
            log.info("incarnation %d of this job's head", store.fence.incarnation)
            folder = settings.job_dir(self._job_id)
            self._lock = await asyncio.to_thread(FolderLock.take, folder, kill_after_s=REPLACED_S)
            await asyncio.to_thread(record_versions, folder, "learner")
            publisher = self._publisher(store.fence.incarnation)
            await asyncio.gather(data.open(), publisher.start(self._serve()))
            job = self._wire(redis, blocking, publisher, store, data)
            store.on_restored = job.activity.work_lost
            loops = {"step": train_loop, "issue": issue_loop, "collect": collect_loop, "monitor": monitor_loop}
            bound = {name: partial(loop, job, drain) for name, loop in loops.items()}
            await run_service(drain, bound, drain_timeout_s=settings.drain_timeout_s, blocked_s=BLOCKED_S)
        finally:
            if publisher is not None:
                await publisher.stop()
            await data.close()
            await sandbox.stop()
            await redis.aclose()
            await blocking.aclose()
            await asyncio.to_thread(close_tracing)

    def _publisher(self, incarnation: int) -> Publisher:
        """The publisher, with a stage of this head's own: an older head that is cut off may still have its files open."""
        settings = self._settings
        need = (KEEP + 1) * version_bytes(self._model_dir, self._spec.model.dtype)
        name = f"{_STAGES}{self._job_id}-{incarnation}"
        directory = default_stage_directory(name, settings.home.resolve(), need, settings.shared_memory)
        remove_abandoned(directory.parent, directory.name.partition(_STAGES)[0] + _STAGES)
        return Publisher(Stage(directory, KEEP))

    def _serve(self) -> Serve:
        settings, token = self._settings, self._settings.internal_token
        return Serve(
            job_id=self._job_id, host=settings.bind_host, advertise_host=settings.advertise_host,
            token=token.get_secret_value() if token else None, log_level=settings.log_level,
        )  # fmt: skip

    def _wire(self, redis: Redis, blocking: Redis, publisher: Publisher, store: HeadStore, data: JobData) -> JobContext:
        job_id, settings, spec = self._job_id, self._settings, self._spec
        folder = settings.job_dir(job_id)
        journal = Journal(folder / JOURNAL_DIR, journal_key(settings))
        journal.on_append = FateLog(folder / FATES_FILE, journal.records).append
        journal.guard = store.require_newest
        consumer = Consumer(
            redis, blocking, job_id, keys.Stage.SCORED,
            group="learner", name="learner", limit_bytes=entry_limit(spec.rollout, spec.eval), fence=store.fence,
        )  # fmt: skip
        return JobContext(
            job_id=job_id,
            spec=spec,
            folder=folder,
            identity=identity_of(job_id, spec, self._model_dir, data.fingerprint),
            model_dir=self._model_dir,
            settings=settings,
            redis=redis,
            store=store,
            ranks=self.ranks,
            buffer=GroupBuffer(spec, Limits.of(inspect_model(self._model_dir), spec), Ledger()),
            tasks=TaskFactory(job_id, spec, lineage=FIRST.lineage, data=data),
            journal=journal,
            checkpoints=CheckpointStore(
                folder / CHECKPOINTS_DIR, keep=spec.checkpoint.keep_last, guard=store.require_newest
            ),
            publisher=publisher,
            consumer=consumer,
            progress=Progress(FIRST.lineage),
        )
