"""Pool of verifier workers: takes checks, returns verdicts; no check delays the others for longer than its limit.

    judge ──► queue ──► slot (one worker process each) ──► verdict        each job has a pool of its own on the same forkserver
                 ▲            │ limit passed, or the worker died
                 └── the batch's other checks ◄── kill, fork another

Workers take small batches, but report each check by itself: only the check that passed its limit is lost with its worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from services.common.errors import VerifierError
from services.common.sandbox.processes import POLL_INTERVAL_S, Forkserver, computed_too_long
from services.common.streams.types import Verdict, VerdictStatus
from services.reward import metrics
from services.reward.pool.messages import Broken, Check, Outcome, OverLimit, Scored
from services.reward.pool.processes import Worker, WorkerDiedError

log = logging.getLogger(__name__)

BATCH = 16
"""Most checks sent to a worker at once."""

RECYCLE_AFTER = 2000
"""Checks after which a worker is replaced, and with it the memory that verifiers leak."""

ATTEMPTS = 2
"""Most attempts of a check whose verifier fails."""


def default_workers() -> int:
    """One worker fewer than the cores that this process may use, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


@dataclass(slots=True)
class _PendingCheck:
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
        """Sets up the pool; `async with` starts it.

        `workers`: most worker processes (default: `default_workers()`). `environment`: for the processes, on top of this one's.
        `forkserver`: another pool's, which outlives this one; None: one of its own.
        """
        self.workers = workers or default_workers()
        self._owns_forkserver = forkserver is None
        self._forkserver = forkserver or Forkserver(
            "services.reward.pool.worker:work", prepare=["services.reward.pool.worker:prepare"], service="reward-verifier",
            log_level=log_level, environment=environment,
        )  # fmt: skip
        self._recycle_after = recycle_after
        self._queue: deque[_PendingCheck] = deque()
        self._filled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._running: dict[int, float] = {}
        """Slot → `time.monotonic()` by which its check must have ended."""
        self._failure: BaseException | None = None
        self.progress_at = time.monotonic()
        """`time.monotonic()` of the newest verdict, or of the newest checks."""

    async def __aenter__(self) -> Self:
        """Starts the processes. Raises SandboxError when that fails."""
        if self._owns_forkserver:
            await self._forkserver.start()
            self._tasks.append(asyncio.create_task(self._monitor_forkserver(), name="forkserver monitor"))
        for number in range(self.workers):
            slot = asyncio.create_task(self._slot(number), name=f"slot-{number}")
            slot.add_done_callback(self._slot_ended)
            self._tasks.append(slot)
        return self

    def sibling(self) -> Pool:
        """Another pool, with slots of its own on the same forkserver: no check of this pool waits for its checks."""
        return Pool(self.workers, recycle_after=self._recycle_after, forkserver=self._forkserver)

    async def __aexit__(self, *_: object) -> None:
        """Ends the processes; checks that still wait fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._owns_forkserver:
            await self._forkserver.stop()

    @property
    def queued(self) -> int:
        """Checks waiting for a worker."""
        return len(self._queue)

    def fault(self) -> str | None:
        """The reason why the pool judges nothing any more, or None."""
        if self._failure is not None:
            return f"the verifier pool failed: {self._failure}"
        overdue = [number for number, deadline in list(self._running.items()) if time.monotonic() > deadline]
        return f"the check in slot {overdue[0]} outlived its limit" if overdue else None

    async def judge(self, checks: Sequence[Check]) -> list[Verdict]:
        """One verdict for each check, in order, even for a check that cannot be made.

        Its verdict is TIMEOUT with accuracy 0 and the verifier's lowest reward where it passed its own limit, and FAILED without a reward
        where its verifier or process failed. Raises VerifierError when the pool itself has failed; nothing was judged.
        """
        if self._failure is not None:
            raise VerifierError(f"the verifier pool failed: {self._failure}")
        self.progress_at = time.monotonic()
        verdicts = [self._submit(check) for check in checks]
        try:
            return await asyncio.gather(*verdicts)
        finally:
            for verdict in verdicts:
                verdict.cancel()  # does nothing to those that are done

    def _submit(self, check: Check) -> asyncio.Future[Verdict]:
        pending = _PendingCheck(check, b"", asyncio.get_running_loop().create_future())
        try:
            pending.packed = check.pack()
        except VerifierError as error:
            self._set_verdict(pending, Verdict(VerdictStatus.FAILED, None, None, check.verifier, str(error)))
        else:
            self._queue.append(pending)
            self._filled.set()
        return pending.verdict

    async def _slot(self, number: int) -> None:
        """Consumes the queue; waits for checks; unblocked by `judge`; produces verdicts."""
        worker: Worker | None = None
        try:
            while True:
                batch = await self._take()
                try:
                    worker = worker or Worker(await self._forkserver.fork())
                    replace_reason = await self._run(number, worker, batch)
                except BaseException:
                    self._requeue([pending for pending in batch if not pending.verdict.done()])
                    raise
                finally:
                    self._running.pop(number, None)
                if replace_reason is not None:
                    metrics.WORKER_RESTARTS.labels(reason=replace_reason).inc()
                    await self._forkserver.kill(worker.forked)
                    worker = Worker(await self._forkserver.fork())
        finally:
            if worker is not None:
                await self._forkserver.kill(worker.forked)

    async def _monitor_forkserver(self) -> None:
        """Consumes nothing; waits for the next poll; unblocked by time; produces the end of a forkserver that hangs."""
        while True:
            self._forkserver.kill_if_stopped()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _take(self) -> list[_PendingCheck]:
        while not self._queue:
            self._filled.clear()
            await self._filled.wait()
        batch: list[_PendingCheck] = []
        fair_share = max(1, min(BATCH, len(self._queue) // self.workers))
        while self._queue and len(batch) < fair_share:
            pending = self._queue.popleft()
            if not pending.verdict.done():  # done: the caller was cancelled
                batch.append(pending)
        return batch

    async def _run(self, number: int, worker: Worker, batch: list[_PendingCheck]) -> str | None:
        """Runs a batch on a worker; returns the reason to replace the worker, or None."""
        waiting = deque(batch)
        try:
            worker.send([pending.packed for pending in batch])
            while waiting:
                self._running[number] = time.monotonic() + waiting[0].check.timeout_s + 90.0
                outcome = await worker.outcome(waiting[0].check)
                self._settle(waiting.popleft(), outcome, worker)
        except TimeoutError:
            check, reason = waiting[0].check, "timeout"
            outcome = worker.timeout_outcome(check)
            if isinstance(outcome, OverLimit):
                metrics.CHECK_SECONDS.labels(verifier=check.verifier).observe(check.timeout_s)
        except WorkerDiedError as error:
            over = computed_too_long(await self._forkserver.kill(worker.forked))
            outcome, reason = worker.timeout_outcome(waiting[0].check) if over else Broken(str(error)), "died"
        else:
            recycled = "recycled" if worker.judged >= self._recycle_after else None
            return "slow" if worker.slow else "crowded" if worker.crowded else recycled
        self._settle(waiting.popleft(), outcome, worker)
        self._requeue(waiting)
        return reason

    def _settle(self, pending: _PendingCheck, outcome: Outcome, worker: Worker) -> None:
        """Gives a check the verdict of its outcome, or another attempt."""
        pending.attempts += 1
        name = pending.check.verifier
        if isinstance(outcome, Scored):
            metrics.CHECK_SECONDS.labels(verifier=name).observe(outcome.seconds)
            verdict = Verdict(VerdictStatus.SCORED, outcome.reward, outcome.accuracy, name, outcome.detail)
        elif isinstance(outcome, OverLimit):
            verdict = Verdict(VerdictStatus.TIMEOUT, worker.lowest_reward(name), 0.0, name, outcome.reason)
        elif pending.attempts < ATTEMPTS:
            log.warning("verifier %s failed and is tried again: %s", name, outcome.reason)
            self._requeue([pending])
            return
        else:
            verdict = Verdict(VerdictStatus.FAILED, None, None, name, outcome.reason)
        self._set_verdict(pending, verdict)

    def _set_verdict(self, pending: _PendingCheck, verdict: Verdict) -> None:
        self.progress_at = time.monotonic()
        metrics.observe_verdict(verdict.status, verdict.verifier, verdict.accuracy)
        if not pending.verdict.done():
            pending.verdict.set_result(verdict)

    def _requeue(self, checks: Sequence[_PendingCheck] | deque[_PendingCheck]) -> None:
        self._queue.extendleft(reversed(checks))
        if self._queue:
            self._filled.set()

    def _slot_ended(self, slot: asyncio.Task[None]) -> None:
        """Fails all waiting checks with the reason: a slot does not end while the pool is open."""
        error = VerifierError("the verifier pool is closed") if slot.cancelled() else slot.exception()
        self._failure = self._failure or error
        while self._queue:
            pending = self._queue.popleft()
            if not pending.verdict.done():
                pending.verdict.set_exception(VerifierError(f"the verifier pool failed: {error}"))
