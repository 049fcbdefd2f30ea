"""The agent of a learner node: takes a job, starts its ranks, and is idle between jobs.

queue ─► claim ─► check ─► torchelastic ─► ranks ─► succeeded | failed | cancelled      (node 0)
         the job that node 0 has ─► torchelastic ─► ranks                               (the other nodes, if there are any)
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from pathlib import Path

from redis.asyncio import Redis

from services.common import workers
from services.common.data import open_source
from services.common.errors import ConfigError, JobConflict
from services.common.jobs import LIVE, JobRecord, JobState, JobStore
from services.common.lifecycle import Drain, every
from services.common.logs import log_context
from services.common.models import check_parallel_sizes, inspect_model, resolve_model
from services.common.settings import Platform, Settings
from services.common.spec import dump_spec
from services.common.workers import WorkerKind, WorkerStatus
from services.learner.folder import ERROR_FILE, SPEC_FILE
from services.learner.launch import rank_command
from services.learner.nodes import Nodes

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
RESTARTS = 3
"""Times torchelastic restarts a job's ranks before the job fails."""


class Agent:
    """One learner: one job at a time."""

    def __init__(self, settings: Settings, redis: Redis, drain: Drain, metrics_dir: Path, metrics_port: int) -> None:
        """Takes no job before `work_loop`."""
        self._learner = settings.worker_name("learner")
        self._nodes = Nodes.of(settings)
        self.name = self._nodes.own_name(self._learner)
        self._settings = settings
        self._redis = redis
        self._store = JobStore(redis)
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

    async def _next_job(self) -> JobRecord | None:
        return await (self._store.claim(self._learner) if self._nodes.leads else self._store.held_by(self._learner))

    async def beat_loop(self) -> None:
        """Tells who is there, until the drain."""

        async def beat() -> None:
            state = "idle" if self._job is None else await self._state_of(self._job)
            status = WorkerStatus(self.name, WorkerKind.LEARNER, state, self._job, metrics_port=self._metrics_port)
            await workers.beat(self._redis, status)

        await every(workers.HEARTBEAT_S, self._drain, beat)
        await workers.leave(self._redis, self.name)

    async def _state_of(self, job_id: str) -> str:
        record = await self._store.find(job_id)
        return "paused" if record is not None and record.state is JobState.PAUSED else "training"

    async def _run(self, record: JobRecord) -> None:
        folder = self._settings.job_dir(record.id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SPEC_FILE).write_text(dump_spec(record.spec))
        (folder / ERROR_FILE).unlink(missing_ok=True)
        try:
            await asyncio.to_thread(self._check, record)
        except ConfigError as error:
            await self._fail(record, str(error))
            return
        code = await self._run_ranks(record)
        ended = (await self._store.get(record.id)).state.ended
        if not ended and not self._drain.requested:
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
        shutil.rmtree(self._metrics_dir, ignore_errors=True)
        self._metrics_dir.mkdir(parents=True)
        command = rank_command(self._nodes, record.id, record.spec.learner.world_size, RESTARTS)
        process = await asyncio.create_subprocess_exec(
            *command, env=self._rank_environment(record), start_new_session=True
        )
        waiter = asyncio.create_task(process.wait())
        while not waiter.done():
            await asyncio.wait({waiter}, timeout=LOOK_AGAIN_S)
            if not waiter.done() and (self._drain.requested or await self._left_behind(record)):
                log.info("draining the ranks")
                await self._stop(process, waiter)
        return waiter.result()

    async def _left_behind(self, record: JobRecord) -> bool:
        """Whether this node's ranks would wait for a job that node 0 has ended: its own ranks end by themselves."""
        return not self._nodes.leads and (await self._store.get(record.id)).state.ended

    async def _stop(self, process: asyncio.subprocess.Process, waiter: asyncio.Task[int]) -> None:
        process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait({waiter}, timeout=self._settings.drain_timeout_s)
        if not done:
            log.warning("the ranks did not drain within %.0f s", self._settings.drain_timeout_s)
            os.killpg(process.pid, signal.SIGKILL)
            await waiter

    def _rank_environment(self, record: JobRecord) -> dict[str, str]:
        threads = str(record.spec.learner.threads_per_rank)
        variables = {
            "MILLRACE_JOB": record.id, "MILLRACE_HOME": str(self._settings.home.resolve()), "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GOMP_SPINCOUNT": "0",
            "PROMETHEUS_MULTIPROC_DIR": str(self._metrics_dir),
            # A store of their own for ranks that were started again: in a shared one they would find the dead ones' addresses.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        if self._settings.platform is not Platform.NPU:
            variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        return {**os.environ, **variables}

    async def _fail(self, record: JobRecord, cause: str) -> None:
        log.error("job %s failed: %s", record.id, cause)
        try:
            await self._store.transition(record.id, JobState.FAILED, allowed=LIVE, cause=cause)
        except JobConflict as error:
            log.warning("%s", error)
        await self._store.retire(record.id)
