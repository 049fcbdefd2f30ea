"""Agent of a learner node: takes a job, starts its ranks, and is idle between jobs.

queue ─► claim ─► check ─► torchelastic ─► ranks ─► succeeded | failed | cancelled      (node 0)
         the job of node 0 ─► torchelastic ─► ranks                                     (other nodes, if there are any)
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from redis.asyncio import Redis

from services.common.config.settings import Settings
from services.common.errors import ConfigError, JobConflict, MillraceError, SandboxError
from services.common.jobs import deaths as job_deaths
from services.common.jobs.deaths import Death
from services.common.jobs.folder import is_deleted
from services.common.jobs.record import LIVE, JobRecord, JobState
from services.common.jobs.restore import Restorer
from services.common.jobs.store import JobStore
from services.common.sandbox.pool import Sandbox
from services.common.service import heartbeat
from services.common.service.heartbeat import WorkerKind, WorkerStatus
from services.common.service.lifecycle import Drain, every
from services.common.service.logs import log_context
from services.learner.agent.starts import MAX_STARTS, NamedWait, count_start, forget_starts, report_cause
from services.learner.groups.data import JobData
from services.learner.ranks import launch
from services.learner.ranks.deaths import RankDeath, RankDeaths
from services.learner.ranks.heartbeat import HEARTBEAT_DIR_VARIABLE, RanksWatchdog
from services.learner.ranks.launch import Nodes, launch_command, rank_environment
from services.learner.storage.folder import ERROR_FILE, FENCED_FILE
from services.learner.storage.journal_key import journal_key
from services.learner.storage.lock import FolderLock
from services.learner.storage.offline import close_ledger

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
CANCEL_AFTER_S = 15.0
"""Ranks that still start so long after a cancel are stopped: their head, which would end the job, may never run."""
CANCELLED = "cancelled on request"
KILLED = "the learner was killed each time, or its machine failed"
MAX_LOAD_FAILURES = 2
"""Failures of a job's ranks before it ever ran after which another attempt to load it would not help."""
MAX_RESTARTS = 3
"""Restarts of a job's ranks without a step in between before the job fails."""


@dataclass(slots=True)
class _Deaths:
    """Deaths of one job's ranks under this agent."""

    newest: str = ""
    """Cause of the newest."""
    loading: int = 0
    """Those before the job ran that no kill from outside caused."""

    @property
    def hopeless(self) -> bool:
        """The ranks cannot load the job's model."""
        return self.loading >= MAX_LOAD_FAILURES


class Agent:
    """One learner node: one job at a time."""

    def __init__(self, settings: Settings, redis: Redis, drain: Drain, metrics_dir: Path, metrics_port: int) -> None:
        self._learner = settings.worker_name("learner")
        self._nodes = Nodes.of(settings)
        self.name = self._nodes.own_name(self._learner)
        self._settings, self._redis, self._drain = settings, redis, drain
        self._metrics_dir, self._metrics_port = metrics_dir, metrics_port
        jobs_dir = settings.home / "jobs"
        self._store = JobStore(redis, jobs_dir)
        self._restorer = Restorer(redis, jobs_dir, self.name, self._owns)
        self._job: str | None = None
        self._deaths = _Deaths()

    async def work_loop(self) -> None:
        """Runs jobs, one after the other.

        consumes:     queue
        waits for:    a job, POLL_INTERVAL_S at a time
        unblocked by: POST /jobs
        produces:     trained policies
        """
        while not self._drain.requested:
            await self._restorer.restore_lost()
            leads = self._nodes.leads
            record = await (self._store.claim(self._learner) if leads else self._store.held_by(self._learner))
            if record is None:
                await self._drain.wait(POLL_INTERVAL_S)
                continue
            self._job = record.id
            with log_context(job_id=record.id):
                await (self._run(record) if leads else self._follow(record))
            self._job = None

    def _owns(self, record: JobRecord) -> bool:
        return record.learner == self._learner and record.state in LIVE

    async def beat_loop(self) -> None:
        """Writes this agent's heartbeat until the drain, or until a newer agent of this name begins."""
        fence = await heartbeat.take_incarnation(self._redis, self.name)

        async def beat() -> None:
            state = "idle"
            if self._job is not None:
                record = await self._store.find(self._job)
                state = "paused" if record is not None and record.state is JobState.PAUSED else "training"
            status = WorkerStatus(self.name, WorkerKind.LEARNER, state, self._job, metrics_port=self._metrics_port)
            await heartbeat.write_heartbeat(self._redis, status, fence)

        await every(heartbeat.HEARTBEAT_S, self._drain, beat)
        await heartbeat.remove_worker(self._redis, self.name, fence)

    async def _run(self, record: JobRecord) -> None:
        folder = self._settings.job_dir(record.id)
        await self._store.records.save(record.id)
        for name in (ERROR_FILE, FENCED_FILE):
            (folder / name).unlink(missing_ok=True)
        self._deaths = _Deaths()
        try:
            ready = await self._check(record)
        except (ConfigError, SandboxError) as error:
            await self._end(record, JobState.FAILED, str(error))
            return
        code = await self._run_ranks(record) if ready else 0
        newest = await self._newest(record)
        if (folder / FENCED_FILE).exists():
            log.error("another process runs the job: %s", (folder / FENCED_FILE).read_text())
        elif newest.state.ended or self._drain.requested:
            return
        elif newest.cancel_requested:
            await self._end(record, JobState.CANCELLED, CANCELLED)
        else:
            error_file = folder / ERROR_FILE
            cause = error_file.read_text() if error_file.exists() else f"the ranks ended with exit code {code}"
            await self._end(record, JobState.FAILED, self._deaths.newest or cause)

    async def _follow(self, record: JobRecord) -> None:
        """Runs this node's ranks of node 0's job until it has ended. Node 0 alone decides whether the job failed."""
        code = await self._run_ranks(record)
        log.info("this node's ranks ended with exit code %d", code)
        await self._drain.wait(POLL_INTERVAL_S)

    async def _check(self, record: JobRecord) -> bool:
        """Finds errors in the user's model and data before any rank is started, in a child process that can be killed.

        Returns False when the learner drains, or the job was cancelled before it ever ran or while the check hangs.

        Raises:
            ConfigError: names the field.
            SandboxError: no child can be started.
        """
        self._nodes.ranks_here(record.spec.world_size)
        began, wait = time.monotonic(), NamedWait(self._store, record, "its model and data are being read")
        async with Sandbox(service="learner-check", log_level=self._settings.log_level) as sandbox:
            data = JobData(sandbox, record.spec, self._settings)
            checking = asyncio.create_task(data.check())
            try:
                while not checking.done():
                    await asyncio.wait({checking}, timeout=POLL_INTERVAL_S)
                    await wait.report()
                    newest = await self._newest(record)
                    hangs = time.monotonic() - began > CANCEL_AFTER_S
                    never_ran = newest.state is JobState.STARTING
                    if self._drain.requested or (newest.cancel_requested and (never_ran or hangs)):
                        return False
                checking.result()
                return True
            finally:
                checking.cancel()
                await asyncio.gather(checking, return_exceptions=True)
                await data.close()

    async def _run_ranks(self, record: JobRecord) -> int:
        """Runs torchelastic until it succeeds or its restarts are used up; each step done gives all restarts back.

        Returns its exit code.
        """
        launches, folder = 0, self._settings.job_dir(record.id)
        while True:
            before = await self._newest(record)
            if before.state is JobState.PAUSED:
                forget_starts(folder)
            if count_start(folder, before.step) > MAX_STARTS:
                forget_starts(folder)
                newest = self._deaths.newest or KILLED
                self._deaths.newest = f"the ranks were started {MAX_STARTS} times, and did no step; {newest}"
                return 1
            code = await self._launch(record)
            after = await self._newest(record)
            launches = 0 if after.step > before.step else launches + 1
            # A negative code: torchelastic itself was killed by a signal, which is no failure of the ranks.
            in_vain = self._deaths.hopeless or launches > (MAX_RESTARTS if code < 0 else 0)
            if self._drain.requested or after.state.ended:
                forget_starts(folder)
                return code
            # The ranks were stopped for a cancel before their head ran.
            stopped = after.state is JobState.STARTING and after.cancel_requested
            if code == 0 or in_vain or stopped:
                return code
            log.warning("torchelastic ended with exit code %d: it is started again", code)

    async def _newest(self, record: JobRecord) -> JobRecord:
        """The job's current record, restored first if Redis has lost it. A job deleted meanwhile counts as cancelled."""
        await self._restorer.restore_lost()
        newest = await self._store.find(record.id)
        if newest is None and is_deleted(self._settings.job_dir(record.id)):
            return replace(record, state=JobState.CANCELLED, cause="deleted")
        return newest or record

    async def _launch(self, record: JobRecord) -> int:
        """Runs torchelastic once and kills what hangs; returns its exit code. All its files are in a temporary folder."""
        shutil.rmtree(self._metrics_dir, ignore_errors=True)
        self._metrics_dir.mkdir(parents=True)
        world_size = record.spec.world_size
        first_rank = self._nodes.index * self._nodes.ranks_here(world_size)
        arguments = self._nodes.torchrun_arguments(record.id, world_size)
        command = launch_command(arguments, MAX_RESTARTS, launch.RANK_MODULE)
        environment = rank_environment(self._settings, record.id, record.spec, self._metrics_dir)
        with tempfile.TemporaryDirectory(prefix="millrace-ranks-", ignore_cleanup_errors=True) as temporary:
            beats = Path(temporary) / "beats"
            beats.mkdir()
            watchdog = RanksWatchdog(beats)
            deaths = RankDeaths(beats, first_rank)
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**environment, HEARTBEAT_DIR_VARIABLE: str(beats), "TMPDIR": temporary},
                start_new_session=True,
            )
            waiter = asyncio.create_task(process.wait())
            wait = NamedWait(self._store, record, "its ranks load the model")
            while not waiter.done():
                await asyncio.wait({waiter}, timeout=POLL_INTERVAL_S)
                for fault in watchdog.check(process.pid):
                    log.error("%s: killed", fault)
                await self._report_deaths(record, deaths.check())
                if self._nodes.leads:
                    await wait.report()
                useless = self._deaths.hopeless or wait.cancelled_s > CANCEL_AFTER_S
                if not waiter.done() and (self._drain.requested or useless or await self._ended_by_node_0(record)):
                    log.info("draining the ranks")
                    await self._stop(process, waiter)
            await self._report_deaths(record, deaths.check())
            return waiter.result()

    async def _report_deaths(self, record: JobRecord, deaths: list[RankDeath]) -> None:
        """Reports deaths at once: in the job's events, among its deaths, and as its cause while it starts.

        Deaths after the job has ended, or can no longer load, carry no news: its ranks are about to be stopped.
        """
        for death in deaths:
            if self._deaths.hopeless:
                return
            newest = await self._newest(record)
            if newest.state.ended:
                return
            loading = newest.state is JobState.STARTING
            self._deaths.newest = death.cause
            self._deaths.loading += loading and not death.killed
            log.error("the ranks failed: %s", death.cause)
            await self._store.history.event(record.id, "rank_died", {"message": death.cause})
            await job_deaths.report(self._redis, record.id, Death(self.name, death.cause, time.time(), loading))
            if loading and not self._deaths.hopeless:
                await report_cause(self._store, newest, f"{death.cause}; the ranks are started again")

    async def _ended_by_node_0(self, record: JobRecord) -> bool:
        """Whether node 0 has ended the job, for which another node's ranks would wait; node 0's own ranks end by themselves."""
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

    async def _end(self, record: JobRecord, state: JobState, cause: str) -> None:
        """Ends a job that has no head, as failed or cancelled."""
        log.error("job %s %s: %s", record.id, state, cause)
        await self._close_ledger(record, f"the job {state}: {cause}")
        await self._store.retire(record.id)
        try:  # last: if this agent dies before it, the next one ends the job again
            await self._store.transition(record.id, state, allowed=LIVE, cause=cause)
        except JobConflict as error:
            log.warning("%s", error)

    async def _close_ledger(self, record: JobRecord, reason: str) -> None:
        """Gives the remaining groups of a job without a head their fate.

        The job ends even if this fails: with a damaged journal, a full disk, or an old head that still writes.
        """
        folder, issued = self._settings.job_dir(record.id), record.groups.get("issued", 0)
        try:
            with await asyncio.to_thread(FolderLock.take, folder):
                groups = await asyncio.to_thread(close_ledger, folder, issued, reason, journal_key(self._settings))
        except (MillraceError, OSError) as error:
            log.warning("the ledger could not be closed: %s", error)
        else:
            await self._store.update(record.id, groups=json.dumps(groups))
