"""The agent of a learner node: takes a job, starts its ranks, and is idle between jobs.

queue ─► claim ─► check ─► torchelastic ─► ranks ─► succeeded | failed | cancelled      (node 0)
         the job that node 0 has ─► torchelastic ─► ranks                               (the other nodes, if there are any)
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path

from redis.asyncio import Redis

from services.common import workers
from services.common.data import open_source
from services.common.errors import ConfigError, JobConflict, MillraceError
from services.common.job_records import LIVE, JobRecord, JobState
from services.common.jobs import JobStore
from services.common.lifecycle import Drain, every
from services.common.logs import log_context
from services.common.models import check_parallel_sizes, inspect_model, resolve_model
from services.common.restore import Restorer
from services.common.settings import Settings
from services.common.workers import WorkerKind, WorkerStatus
from services.learner.books import close_books
from services.learner.folder import ERROR_FILE, FENCED_FILE
from services.learner.folder_lock import FolderLock
from services.learner.journal_key import journal_key
from services.learner.launch import rank_command, rank_environment
from services.learner.nodes import Nodes
from services.learner.pulse import FOLDER, RanksWatch

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
RESTARTS = 3
"""Times a job's ranks are restarted without doing a step in between before the job fails."""


class Agent:
    """One learner: one job at a time."""

    def __init__(self, settings: Settings, redis: Redis, drain: Drain, metrics_dir: Path, metrics_port: int) -> None:
        """Takes no job before `work_loop`."""
        self._learner = settings.worker_name("learner")
        self._nodes = Nodes.of(settings)
        self.name = self._nodes.own_name(self._learner)
        self._settings = settings
        self._redis = redis
        jobs_dir = settings.home / "jobs"
        self._store = JobStore(redis, jobs_dir)
        self._restorer = Restorer(redis, jobs_dir, self.name, self._owns)
        self._drain = drain
        self._metrics_dir = metrics_dir
        self._metrics_port = metrics_port
        self._job: str | None = None

    async def work_loop(self) -> None:
        """Runs jobs, one after the other.

        consumes:     queue
        waits for:    a job, a second at a time
        unblocked by: POST /jobs
        produces:     trained policies
        """
        while not self._drain.requested:
            record = await self._next_job()
            if record is None:
                await self._drain.wait(LOOK_AGAIN_S)
                continue
            self._job = record.id
            with log_context(job_id=record.id):
                await (self._run(record) if self._nodes.leads else self._follow(record))
            self._job = None

    def _owns(self, record: JobRecord) -> bool:
        return record.learner == self._learner and record.state in LIVE

    async def _next_job(self) -> JobRecord | None:
        await self._restorer.look()
        return await (self._store.claim(self._learner) if self._nodes.leads else self._store.held_by(self._learner))

    async def beat_loop(self) -> None:
        """Tells who is there, until the drain, or until a newer agent of this name has begun."""
        fence = await workers.begin(self._redis, self.name)

        async def beat() -> None:
            state = "idle" if self._job is None else await self._state_of(self._job)
            status = WorkerStatus(self.name, WorkerKind.LEARNER, state, self._job, metrics_port=self._metrics_port)
            await workers.beat(self._redis, status, fence)

        await every(workers.HEARTBEAT_S, self._drain, beat)
        await workers.leave(self._redis, self.name, fence)

    async def _state_of(self, job_id: str) -> str:
        record = await self._store.find(job_id)
        return "paused" if record is not None and record.state is JobState.PAUSED else "training"

    async def _run(self, record: JobRecord) -> None:
        folder = self._settings.job_dir(record.id)
        await self._store.save(record.id)
        for name in (ERROR_FILE, FENCED_FILE):
            (folder / name).unlink(missing_ok=True)
        try:
            await asyncio.to_thread(self._check, record)
        except ConfigError as error:
            await self._fail(record, str(error))
            return
        code = await self._run_ranks(record)
        ended = (await self._newest(record)).state.ended
        if (folder / FENCED_FILE).exists():
            log.error("another process runs the job: %s", (folder / FENCED_FILE).read_text())
        elif not ended and not self._drain.requested:
            said = folder / ERROR_FILE
            await self._fail(record, said.read_text() if said.exists() else f"the ranks ended with exit code {code}")

    async def _follow(self, record: JobRecord) -> None:
        """Runs this node's ranks of node 0's job; whether it failed is for node 0 to say. Until it has ended, they are started again."""
        code = await self._run_ranks(record)
        log.info("this node's ranks ended with exit code %d", code)
        await self._drain.wait(LOOK_AGAIN_S)

    def _check(self, record: JobRecord) -> None:
        """Finds a person's mistakes before any rank is started."""
        spec = record.spec
        self._nodes.ranks_here(spec.learner.world_size)
        check_parallel_sizes(inspect_model(resolve_model(spec.model.path, self._settings)), spec)
        for name, source in (("train", spec.data.train), ("eval", spec.data.eval)):
            if source is not None:
                open_source(source, self._settings, field=f"data.{name}")

    async def _run_ranks(self, record: JobRecord) -> int:
        """Runs torchelastic until it succeeds, or has restarted the ranks in vain. Each step that they do gives it all its restarts again.

        Returns its exit code.
        """
        launches = 0
        while True:
            before = await self._newest(record)
            code = await self._launch(record)
            after = await self._newest(record)
            launches = 0 if after.step > before.step else launches + 1
            # It ends by a signal when it was killed itself, which says nothing of the ranks.
            in_vain = launches > (RESTARTS if code < 0 else 0)
            if code == 0 or in_vain or self._drain.requested or after.state.ended:
                return code
            log.warning("torchelastic ended with exit code %d: it is started again", code)

    async def _newest(self, record: JobRecord) -> JobRecord:
        """The job's record as it is now, put back first if Redis had lost it."""
        await self._restorer.look()
        return await self._store.find(record.id) or record

    async def _launch(self, record: JobRecord) -> int:
        with tempfile.TemporaryDirectory(prefix="millrace-beats-") as beats:
            return await self._watched(record, Path(beats))

    async def _watched(self, record: JobRecord, beats: Path) -> int:
        """Runs torchelastic once, and kills what hangs of it; returns its exit code."""
        shutil.rmtree(self._metrics_dir, ignore_errors=True)
        self._metrics_dir.mkdir(parents=True)
        watch = RanksWatch(beats)
        command = rank_command(self._nodes, record.id, record.spec.learner.world_size, RESTARTS)
        environment = rank_environment(self._settings, record.id, record.spec, self._metrics_dir)
        process = await asyncio.create_subprocess_exec(
            *command, env={**environment, FOLDER: str(beats)}, start_new_session=True
        )
        waiter = asyncio.create_task(process.wait())
        while not waiter.done():
            await asyncio.wait({waiter}, timeout=LOOK_AGAIN_S)
            for trouble in watch.look(process.pid):
                log.error("%s: killed", trouble)
            if not waiter.done() and (self._drain.requested or await self._left_behind(record)):
                log.info("draining the ranks")
                await self._stop(process, waiter)
        return waiter.result()

    async def _left_behind(self, record: JobRecord) -> bool:
        """Whether this node's ranks would wait for a job that node 0 has ended: its own ranks end by themselves."""
        if self._nodes.leads:
            return False
        found = await self._store.find(record.id)
        return found is not None and found.state.ended

    async def _stop(self, process: asyncio.subprocess.Process, waiter: asyncio.Task[int]) -> None:
        process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait({waiter}, timeout=self._settings.drain_timeout_s)
        if not done:
            log.warning("the ranks did not drain within %.0f s", self._settings.drain_timeout_s)
            os.killpg(process.pid, signal.SIGKILL)
            await waiter

    async def _fail(self, record: JobRecord, cause: str) -> None:
        log.error("job %s failed: %s", record.id, cause)
        await self._close_books(record, f"the job failed: {cause}")
        await self._store.retire(record.id)
        try:  # last: until the job has ended, an agent that comes after this one fails it again
            await self._store.transition(record.id, JobState.FAILED, allowed=LIVE, cause=cause)
        except JobConflict as error:
            log.warning("%s", error)

    async def _close_books(self, record: JobRecord, reason: str) -> None:
        """Gives what is left of a job without a head its fate; nothing here may keep it from ending.

        Neither a damaged journal, nor a full disk, nor a head that is left over and still writes.
        """
        folder, issued = self._settings.job_dir(record.id), record.groups.get("issued", 0)
        try:
            with await asyncio.to_thread(FolderLock.take, folder):
                groups = await asyncio.to_thread(close_books, folder, issued, reason, journal_key(self._settings))
        except (MillraceError, OSError) as error:
            log.warning("the ledger could not be closed: %s", error)
        else:
            await self._store.update(record.id, groups=json.dumps(groups))
