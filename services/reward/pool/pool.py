"""The pool: checks go in, verdicts come out, and no check can hold up the others for longer than its limit.

    judge ──► queue ──► slot (one worker process each) ──► verdict        each job has a pool of its own on the same forkserver
                 ▲            │ limit passed, or the worker died
                 └── the batch's other checks ◄── kill, fork another

Workers take small batches, but report each check by itself: only the check that ran over its limit is lost with its worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from services.common.errors import VerifierError
from services.common.sandbox.processes import LOOK_S, Forkserver, computed_too_long
from services.common.streams.types import Verdict, VerdictStatus
from services.reward import metrics
from services.reward.pool.messages import Broken, Check, Outcome, OverLimit, Scored
from services.reward.pool.processes import Worker, WorkerDiedError

log = logging.getLogger(__name__)

BATCH = 16
"""Most checks handed to a worker at once."""

RECYCLE_AFTER = 2000
"""Checks after which a worker is replaced: what verifiers leak goes with it."""

ATTEMPTS = 2
"""Times a check is made when its verifier fails."""


def default_workers() -> int:
    """One worker for each core this process may use but one, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


@dataclass(slots=True)
class _Job:
    check: Check
    packed: bytes
    verdict: asyncio.Future[Verdict]
    attempts: int = 0


class Pool:
    """Judges checks in worker processes. `async with Pool(…) as pool: verdicts = await pool.judge(checks)`."""

    def __init__(
        self,
        workers: int | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        recycle_after: int = RECYCLE_AFTER,
        log_level: str = "INFO",
        forkserver: Forkserver | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            workers: worker processes at the most (default: `default_workers()`).
            environment: for the processes, on top of this one's.
            recycle_after: checks after which a worker is replaced.
            log_level: of the processes' logs.
            forkserver: another pool's, which outlives this one; None: one of its own.
        """
        self.workers = workers or default_workers()
        self._owns = forkserver is None
        self._forkserver = forkserver or Forkserver(
            "services.reward.pool.worker:work", prepare=["services.reward.pool.worker:prepare"], service="reward-verifier",
            log_level=log_level, environment=environment,
        )  # fmt: skip
        self._recycle_after = recycle_after
        self._queue: deque[_Job] = deque()
        self._filled = asyncio.Event()
        self._slots: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._running: dict[int, float] = {}
        self._failure: BaseException | None = None
        self.progress_at = time.monotonic()
        """When the newest verdict was given, or the newest checks came in."""

    async def __aenter__(self) -> Self:
        """Starts the processes.

        Raises:
            SandboxError: they do not start.
        """
        if self._owns:
            await self._forkserver.start()
            self._watching = asyncio.create_task(self._watch(), name="forkserver watch")
        self._slots = [asyncio.create_task(self._slot(number), name=f"slot-{number}") for number in range(self.workers)]
        for slot in self._slots:
            slot.add_done_callback(self._slot_ended)
        return self

    def beside(self) -> Pool:
        """Another pool, with slots of its own: however long its checks take, none of this one's waits for them."""
        return Pool(self.workers, recycle_after=self._recycle_after, forkserver=self._forkserver)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the processes; checks still waiting fail."""
        tasks = [*self._slots, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._owns:
            await self._forkserver.stop()

    @property
    def queued(self) -> int:
        """Checks waiting for a worker."""
        return len(self._queue)

    def trouble(self) -> str | None:
        """Why the pool judges nothing any more, or None."""
        if self._failure is not None:
            return f"the verifier pool failed: {self._failure}"
        overdue = [number for number, deadline in list(self._running.items()) if time.monotonic() > deadline]
        return f"the check in slot {overdue[0]} outlived its limit" if overdue else None

    async def judge(self, checks: Sequence[Check]) -> list[Verdict]:
        """One verdict for each check, in order. A check that cannot be made has a verdict too.

        That is TIMEOUT with accuracy 0 and the verifier's lowest reward where it went beyond its own limit, and FAILED without a reward
        where its verifier or process broke.

        Raises:
            VerifierError: the pool itself has failed; nothing was judged.
        """
        if self._failure is not None:
            raise VerifierError(f"the verifier pool failed: {self._failure}")
        self.progress_at = time.monotonic()
        waits = [self._submit(check) for check in checks]
        try:
            return await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()  # does nothing to those that are done

    def _submit(self, check: Check) -> asyncio.Future[Verdict]:
        job = _Job(check, b"", asyncio.get_running_loop().create_future())
        try:
            job.packed = check.pack()
        except VerifierError as error:
            self._answer(job, Verdict(VerdictStatus.FAILED, None, None, check.verifier, str(error)))
        else:
            self._queue.append(job)
            self._filled.set()
        return job.verdict

    async def _slot(self, number: int) -> None:
        """Consumes the queue; waits for checks; unblocked by `judge`; produces verdicts."""
        worker: Worker | None = None
        try:
            while True:
                batch = await self._take()
                try:
                    worker = worker or Worker(await self._forkserver.fork())
                    spent = await self._run(number, worker, batch)
                except BaseException:
                    self._requeue([job for job in batch if not job.verdict.done()])
                    raise
                finally:
                    self._running.pop(number, None)
                if spent is not None:
                    metrics.WORKER_RESTARTS.labels(reason=spent).inc()
                    await self._forkserver.kill(worker.forked)
                    worker = Worker(await self._forkserver.fork())
        finally:
            if worker is not None:
                await self._forkserver.kill(worker.forked)

    async def _watch(self) -> None:
        """Consumes nothing; waits for the next look; unblocked by time; produces another forkserver for one that hangs."""
        while True:
            self._forkserver.look()
            await asyncio.sleep(LOOK_S)

    async def _take(self) -> list[_Job]:
        while not self._queue:
            self._filled.clear()
            await self._filled.wait()
        batch: list[_Job] = []
        fair_share = max(1, min(BATCH, len(self._queue) // self.workers))
        while self._queue and len(batch) < fair_share:
            job = self._queue.popleft()
            if not job.verdict.done():  # whoever asked may have gone
                batch.append(job)
        return batch

    async def _run(self, number: int, worker: Worker, batch: list[_Job]) -> str | None:
        """Runs a batch on a worker; why the worker has to go, or None."""
        waiting = deque(batch)
        try:
            worker.send([job.packed for job in batch])
            while waiting:
                self._running[number] = time.monotonic() + waiting[0].check.timeout_s + 90.0
                outcome = await worker.outcome(waiting[0].check)
                self._settle(waiting.popleft(), outcome, worker)
        except TimeoutError:
            job = waiting.popleft()
            outcome = worker.overdue(job.check)
            if isinstance(outcome, OverLimit):
                metrics.CHECK_SECONDS.labels(verifier=job.check.verifier).observe(job.check.timeout_s)
            self._settle(job, outcome, worker)
            self._requeue(waiting)
            return "timeout"
        except WorkerDiedError as error:
            job = waiting.popleft()
            over = computed_too_long(await self._forkserver.kill(worker.forked))
            self._settle(job, worker.overdue(job.check) if over else Broken(str(error)), worker)
            self._requeue(waiting)
            return "died"
        if worker.slow:
            return "slow"
        if worker.crowded:
            return "crowded"
        return "recycled" if worker.judged >= self._recycle_after else None

    def _settle(self, job: _Job, outcome: Outcome, worker: Worker) -> None:
        job.attempts += 1
        name = job.check.verifier
        if isinstance(outcome, Scored):
            metrics.CHECK_SECONDS.labels(verifier=name).observe(outcome.seconds)
            self._answer(job, Verdict(VerdictStatus.SCORED, outcome.reward, outcome.accuracy, name, outcome.detail))
        elif isinstance(outcome, OverLimit):
            lowest = worker.lowest_reward(name)
            self._answer(job, Verdict(VerdictStatus.TIMEOUT, lowest, 0.0, name, outcome.reason))
        elif job.attempts < ATTEMPTS:
            log.warning("verifier %s failed and is tried again: %s", name, outcome.reason)
            self._requeue([job])
        else:
            self._answer(job, Verdict(VerdictStatus.FAILED, None, None, name, outcome.reason))

    def _answer(self, job: _Job, verdict: Verdict) -> None:
        self.progress_at = time.monotonic()
        metrics.observe_verdict(verdict.status, verdict.verifier)
        if not job.verdict.done():
            job.verdict.set_result(verdict)

    def _requeue(self, jobs: Sequence[_Job] | deque[_Job]) -> None:
        self._queue.extendleft(reversed(jobs))
        if self._queue:
            self._filled.set()

    def _slot_ended(self, slot: asyncio.Task[None]) -> None:
        """A slot never ends by itself: everybody who waits hears why it did."""
        error = VerifierError("the verifier pool is closed") if slot.cancelled() else slot.exception()
        self._failure = self._failure or error
        while self._queue:
            job = self._queue.popleft()
            if not job.verdict.done():
                job.verdict.set_exception(VerifierError(f"the verifier pool failed: {error}"))
