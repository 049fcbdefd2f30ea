"""Fetches for jobs: what a job names of hubs is resolved when it is submitted, and fetched before a learner may take it.

POST /jobs ─► resolve: commits, refusals ─► checked, as far as it is there ─► queue, if all is there
                                                      │ something is missing
                                                      ▼
waiting jobs ─► fetch, with progress as the job's cause ─► checked once more, whole ─► queue
                     │ refused, or the tries are used up: failed                │ wrong: failed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from redis.exceptions import RedisError

from services.common.errors import ConfigError, HubError, HubRefused, JobConflict, Problem, SandboxError
from services.common.hubs.fetcher import Fetcher, Progress
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.service.logs import log_context
from services.common.spec.job import JobSpec
from services.common.spec.reference import Reference
from services.gateway.admission.admission import Admission
from services.gateway.errors import AdmissionBusy, SpecRefused

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
REPORT_INTERVAL_S = 60.0
"""The cause of a waiting job is written this often, and with each tenth of the bytes."""
MAX_SURVEYS = 4
"""References that are looked up at once."""
_WAITS = (JobState.QUEUED, JobState.PAUSED)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A spec whose references name commits."""

    spec: JobSpec
    missing: Mapping[str, Reference]
    """References to what is not there yet, by field."""

    @property
    def cause(self) -> str:
        """Why the job waits; empty if all is there."""
        return next((_cause(name, reference) for name, reference in self.missing.items()), "")


@dataclass(slots=True)
class _Shown:
    """What a job's cause says of a fetch."""

    tenth: int = -1
    trouble: str = ""
    at: float = 0.0

    def is_old(self, progress: Progress) -> bool:
        """Whether the progress is news; it is shown then."""
        tenth = progress.bytes * 10 // progress.of_bytes if progress.of_bytes else -1
        now, late = time.monotonic(), time.monotonic() - self.at > REPORT_INTERVAL_S
        if (tenth, progress.trouble) == (self.tenth, self.trouble) and not late:
            return False
        self.tenth, self.trouble, self.at = tenth, progress.trouble, now
        return True


@dataclass(slots=True)
class JobFetches:
    """The fetches of one gateway. Several gateways of one home share the work: a fetch is locked on the disk."""

    store: JobStore
    admission: Admission
    fetcher: Fetcher
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _surveys: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_SURVEYS))

    async def resolve(self, spec: JobSpec) -> Resolved:
        """The spec with a commit in each reference.

        Raises:
            SpecRefused: names the fields that cannot be fetched.
            HubError: a hub does not answer.
        """
        named = spec.references
        if not named:
            return Resolved(spec, {})
        found = await asyncio.gather(*map(self._survey, named.values()), return_exceptions=True)
        problems, resolved = [], {}
        for (name, reference), result in zip(named.items(), found, strict=True):
            if isinstance(result, HubRefused):
                problems += [Problem(name, f"{reference}: {item.message}") for item in result.problems]
            elif isinstance(result, HubError):
                raise HubError(f"{name}: {reference}: {result}; try again") from result
            elif isinstance(result, BaseException):
                raise result
            else:
                resolved[name] = result
        if problems:
            raise SpecRefused(*problems)
        missing = {name: reference for name, reference in resolved.items() if not self.fetcher.is_complete(reference)}
        return Resolved(spec.with_references(resolved), missing)

    async def _survey(self, reference: Reference) -> Reference:
        async with self._surveys:
            return await self.fetcher.survey(reference)

    async def loop(self) -> None:
        """Serves waiting jobs until it is cancelled.

        consumes:     the jobs that wait for a fetch
        waits for:    such a job, POLL_INTERVAL_S at a time
        unblocked by: POST /jobs
        produces:     jobs that a learner may take, or failed ones
        """
        while True:
            try:
                await self.look()
            except RedisError as error:
                log.warning("cannot look after the jobs that wait for a fetch: %s", type(error).__name__)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def look(self) -> None:
        """Begins to serve new jobs, and drops those that have ended or are gone: a fetch that nobody else waits for is killed."""
        waiting = await self.store.fetching()
        for job_id in waiting:
            record = await self.store.find(job_id)
            if record is None or record.state.ended or record.learner:  # None: deleted
                await self.store.fetched(job_id)
                await self._drop(job_id)
            elif job_id not in self._tasks or self._tasks[job_id].done():
                self._tasks[job_id] = asyncio.create_task(self._serve(record), name=f"fetch for {job_id}")
        for job_id in self._tasks.keys() - set(waiting):
            await self._drop(job_id)

    async def close(self) -> None:
        """Ends all fetches: they go on with the next gateway."""
        for job_id in list(self._tasks):
            await self._drop(job_id)
        await self.fetcher.stop()

    async def _drop(self, job_id: str) -> None:
        task = self._tasks.pop(job_id, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _serve(self, record: JobRecord) -> None:
        """Fetches what the job names, checks the job, and lets learners take it; or ends it as failed."""
        with log_context(job_id=record.id):
            try:
                for name, reference in record.spec.references.items():
                    await self._fetch(record, name, reference)
                unchecked = await self.admission.admit(record.spec)
            except (ConfigError, HubError) as error:
                await self._fail(record, str(error))
            except (AdmissionBusy, SandboxError, RedisError) as error:  # the next look tries again
                log.warning("cannot be let into the queue yet: %s", error)
            except Exception as error:  # a defect of ours ends this job, not the gateway
                log.exception("the fetch of this job failed")
                await self._fail(record, f"an error of the gateway, whose log has it: {type(error).__name__}")
            else:
                await self._release(record, unchecked)

    async def _fetch(self, record: JobRecord, name: str, reference: Reference) -> None:
        if self.fetcher.is_complete(reference):
            return
        shown = _Shown()
        await self._show(record.id, _cause(name, reference))
        try:
            await self.fetcher.fetch(reference, partial(self._report, record.id, name, reference, shown))
        except HubRefused as error:
            raise HubRefused(*(Problem(name, f"{reference}: {item.message}") for item in error.problems)) from error
        except HubError as error:
            raise HubError(f"{name}: {reference}: {error}") from error
        log.info("%s is there: %s", name, reference)

    async def _report(self, job_id: str, name: str, reference: Reference, shown: _Shown, progress: Progress) -> None:
        if shown.is_old(progress):
            await self._show(job_id, f"{_cause(name, reference)}: {progress}")

    async def _show(self, job_id: str, cause: str) -> None:
        with suppress(JobConflict, RedisError):  # a paused job keeps its cause
            await self.store.transition(job_id, JobState.QUEUED, allowed=[JobState.QUEUED], cause=cause)

    async def _release(self, record: JobRecord, unchecked: tuple[str, ...]) -> None:
        if unchecked:
            await self.store.report_unchecked(record.id, unchecked)
        await self._show(record.id, "")
        await self.store.fetched(record.id)
        log.info("all that it names of hubs is there: learners may take it")

    async def _fail(self, record: JobRecord, cause: str) -> None:
        log.error("failed before it was queued: %s", cause)
        with suppress(JobConflict):  # cancelled meanwhile
            await self.store.transition(record.id, JobState.FAILED, allowed=_WAITS, cause=cause)
        await self.store.fetched(record.id)


def _cause(name: str, reference: Reference) -> str:
    return f"{name}: {reference} is being fetched"
