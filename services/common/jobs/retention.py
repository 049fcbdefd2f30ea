"""Retention of ended jobs: the choice of jobs to delete, and the deletion of folder, Redis keys and list entry.

    an ended job ── a day ──► all Redis keys but the record go (samples, events, histories, dead letters): its folder has the histories
                 ── DELETE, prune, the gateway's policy ──► mark ─► rename ─► Redis ─► remove        (`DeletedJobs`)

Jobs that have not ended are never deleted, nor is any job from whose folder one of them was, or will be, loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from services.common.config.paths import locate
from services.common.config.settings import Settings
from services.common.errors import ConfigError, JobConflict
from services.common.jobs import lua
from services.common.jobs.folder import DeletedJobs, JobFolder
from services.common.jobs.record import ENDED, JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.spec.job import JobSpec

log = logging.getLogger(__name__)

CHUNK = 500
"""Jobs in one round trip to Redis: other clients are served in between."""
DAY_S = 24 * 3600.0
_ENDED = ",".join(sorted(ENDED))

_DELETE = f"""#!lua{lua.IS_IN}
-- KEYS: record, jobs, queue, the job's other keys …, its idempotency key (if ARGV[3] is '1')   ARGV: job id, states of a job that has ended
local state = redis.call('HGET', KEYS[1], 'state')
if state and not is_in(state, ARGV[2]) then return state end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
local last = #KEYS
if ARGV[3] == '1' then
  if redis.call('HGET', KEYS[last], 'job_id') == ARGV[1] then redis.call('UNLINK', KEYS[last]) end
  last = last - 1
end
for i = 4, last do redis.call('UNLINK', KEYS[i]) end
redis.call('UNLINK', KEYS[1])
return 'ok'
"""

_ARCHIVE = f"""#!lua{lua.IS_IN}
-- KEYS: record, the keys that go   ARGV: states of a job that has ended
local state = redis.call('HGET', KEYS[1], 'state')
if not state or not is_in(state, ARGV[1]) then return 0 end
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """An ended job, as the policy sees it."""

    id: str
    ended_at: float
    """Unix seconds."""
    size_bytes: int = 0
    """Of its folder, on disk."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits on the ended jobs that are kept; None: no limit."""

    keep: int | None = None
    """Number of the newest jobs that stay."""
    older_than_s: float | None = None
    """Jobs that ended longer ago go."""
    max_bytes: int | None = None
    """The oldest go until the folders of the others need no more."""

    @property
    def keeps_all(self) -> bool:
        """Whether there is no limit."""
        return self.keep is None and self.older_than_s is None and self.max_bytes is None


def choose(jobs: Iterable[EndedJob], policy: Policy, pinned: Collection[str], now: float) -> list[EndedJob]:
    """The jobs to delete, oldest first. Pinned ones stay, and count."""
    newest_first = sorted(jobs, key=lambda job: (job.ended_at, job.id), reverse=True)
    kept = newest_first[: policy.keep] if policy.keep is not None else list(newest_first)
    if policy.older_than_s is not None:
        kept = [job for job in kept if now - job.ended_at <= policy.older_than_s]
    stays = {job.id for job in kept} | set(pinned)
    if policy.max_bytes is not None:
        room = policy.max_bytes - sum(job.size_bytes for job in newest_first if job.id in stays)
        for job in reversed(newest_first):
            if room >= 0:
                break
            if job.id in stays and job.id not in pinned:
                stays.remove(job.id)
                room += job.size_bytes
    return [job for job in reversed(newest_first) if job.id not in stays]


class Retention:
    """Deletes ended jobs. Each gateway may have one: concurrent deletions have their effect once."""

    def __init__(self, redis: Redis, store: JobStore, settings: Settings) -> None:
        self._redis, self._store, self._settings = redis, store, settings
        self._deleted = DeletedJobs(settings.job_dir(""))
        self._removing: set[asyncio.Task[None]] = set()
        self._deleting = asyncio.Lock()

    async def delete(self, job_id: str) -> bool:
        """Deletes a job; False when there is none. Its folder is moved away when this returns; its bytes are freed soon after.

        Raises:
            JobConflict: it has not ended, or a job that has not ended begins with a file of it.
            OSError: its folder cannot be moved.
        """
        async with self._deleting:
            return await self._delete(job_id, await self._dependents())

    async def _delete(self, job_id: str, dependents: Mapping[str, Sequence[str]]) -> bool:
        record = await self._store.find(job_id) or await asyncio.to_thread(self._store.records.load, job_id)
        if record is None:
            return await asyncio.to_thread(self._deleted.has_mark, job_id)
        if not record.state.ended:
            raise JobConflict(f"job {job_id} is {record.state}: only a job that has ended can be deleted")
        if job_id in dependents:
            users = ", ".join(dependents[job_id])
            raise JobConflict(f"job {job_id} cannot be deleted: {users} begins with what is in its folder")
        await asyncio.to_thread(self._deleted.move_away, job_id)
        await self._clear(job_id, record.idempotency)
        log.info("job %s was deleted", job_id)
        self._remove_soon(job_id)
        return True

    async def prune(self, policy: Policy, *, dry_run: bool = False) -> list[EndedJob]:
        """Deletes the jobs that the policy does not keep; returns those that were, or would be, deleted, oldest first."""
        if policy.keeps_all:
            return []
        jobs = [EndedJob(job_id, at) async for job_id, state, at in self._jobs() if state.ended]
        if policy.max_bytes is not None:
            jobs = await asyncio.to_thread(self._measured, jobs)
        async with self._deleting:
            dependents = await self._dependents()
            excess = choose(jobs, policy, dependents, time.time())
            if policy.max_bytes is None:
                excess = await asyncio.to_thread(self._measured, excess)
            return excess if dry_run else [job for job in excess if await self._try_delete(job.id, dependents)]

    async def _try_delete(self, job_id: str, dependents: Mapping[str, Sequence[str]]) -> bool:
        try:
            return await self._delete(job_id, dependents)
        except (JobConflict, OSError) as error:
            log.warning("job %s was not deleted: %s", job_id, error)
            return False

    @asynccontextmanager
    async def using(self, spec: JobSpec) -> AsyncIterator[None]:
        """Protects the jobs that a new job loads from until it is created. Raises ConfigError when one was deleted."""
        named = await asyncio.to_thread(sources, spec, self._settings)
        async with self._deleting if named else nullcontext():
            for job_id in sorted(named):
                if await asyncio.to_thread(self._deleted.has_mark, job_id):
                    raise ConfigError(f"job {job_id} was deleted")
            yield

    async def archive(self, older_than_s: float) -> int:
        """Deletes all Redis keys but the record of jobs that ended longer ago; returns the number of jobs that had such keys.

        The job's folder has the histories; a job whose folder lacks a part of them is skipped.
        """
        oldest, done = time.time() - older_than_s, 0
        old = [job_id async for job_id, state, at in self._jobs() if state.ended and at < oldest]
        for first in range(0, len(old), CHUNK):
            chunk = old[first : first + CHUNK]
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in chunk:
                    pipe.exists(keys.events(job_id))
                there = await pipe.execute()
            for job_id, found in zip(chunk, there, strict=True):
                if found and await self._is_in_folder(job_id):
                    script = self._redis.register_script(_ARCHIVE)
                    done += int(await script(keys=[keys.record(job_id), *keys.archived(job_id)], args=[_ENDED]))
        return done

    async def _is_in_folder(self, job_id: str) -> bool:
        """Whether the job's folder has the whole histories that Redis has."""
        history = await asyncio.to_thread(JobFolder(self._settings.job_dir(job_id)).history)
        steps, evals = int(await self._redis.llen(keys.steps(job_id))), int(await self._redis.llen(keys.evals(job_id)))
        if len(history.steps) >= steps and len(history.evals) >= evals:
            return True
        log.warning("the history of job %s stays in Redis: its folder lacks a part of it", job_id)
        return False

    async def sweep(self) -> None:
        """Completes deletions that a crash interrupted, removes what was written for a deleted job since, and drops old marks."""
        for job_id in await asyncio.to_thread(self._deleted.marked):
            record = await self._store.find(job_id)  # Redis may have been restored from a backup
            if record is not None and not record.state.ended:
                continue
            if await asyncio.to_thread(self._deleted.unfinished, job_id):
                await asyncio.to_thread(self._deleted.move_away, job_id)
            if record is not None:
                await self._clear(job_id, record.idempotency)
            await asyncio.to_thread(self._deleted.remove_files, job_id)
        await asyncio.to_thread(self._deleted.forget_old)

    async def _dependents(self) -> dict[str, list[str]]:
        """Job id → ids of the jobs that have not ended and were, or will be, loaded from its folder."""
        found: dict[str, list[str]] = {}
        async for job_id, state, _ in self._jobs():
            if not state.ended and (record := await self._store.find(job_id)) is not None:
                for source in await asyncio.to_thread(sources, record.spec, self._settings):
                    found.setdefault(source, []).append(job_id)
        return found

    async def close(self) -> None:
        """Waits for the removals under way."""
        await asyncio.gather(*self._removing, return_exceptions=True)

    def _remove_soon(self, job_id: str) -> None:
        task = asyncio.create_task(asyncio.to_thread(self._deleted.remove_files, job_id), name=f"remove {job_id}")
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def _clear(self, job_id: str, idempotency: str) -> None:
        key = idempotency.partition(" ")[0]
        names = [keys.record(job_id), keys.JOBS, keys.QUEUE, *keys.archived(job_id), *([key] if key else [])]
        done = text(await self._redis.register_script(_DELETE)(keys=names, args=[job_id, _ENDED, "1" if key else ""]))
        if done != "ok":
            raise JobConflict(f"job {job_id} is {done}: only a job that has ended can be deleted")

    async def _jobs(self) -> AsyncIterator[tuple[str, JobState, float]]:
        """Id, state and end of every job (Unix seconds; its creation while it has no end)."""
        ids = [text(raw) for raw in await self._redis.zrange(keys.JOBS, 0, -1)]
        for first in range(0, len(ids), CHUNK):
            chunk = ids[first : first + CHUNK]
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in chunk:
                    pipe.hmget(keys.record(job_id), ["state", "finished_at", "created_at"])
                replies = await pipe.execute()
            for job_id, (state, ended, created) in zip(chunk, replies, strict=True):
                if state is not None:  # else Redis has lost it, and it is being restored
                    yield job_id, JobState(text(state)), float(text(ended or created or 0))

    def _measured(self, jobs: Sequence[EndedJob]) -> list[EndedJob]:
        return [EndedJob(job.id, job.ended_at, folder_bytes(self._settings.job_dir(job.id))) for job in jobs]


def sources(spec: JobSpec, settings: Settings) -> set[str]:
    """The ids of the jobs from whose folders this job loads: a checkpoint, a model, or data."""
    jobs_dir = settings.job_dir("").resolve()
    model_roots = [settings.models_dir, *settings.model_roots]
    data_roots = [settings.home / "data", *settings.data_roots]
    named = [
        (spec.checkpoint.load, [jobs_dir, *model_roots]),
        (spec.model.path, model_roots),
        *((part.source, data_roots) for part in (spec.data.train, spec.data.eval) if part is not None),
    ]
    found = set()
    for name, roots in named:
        try:
            path = locate(name, roots, field="", error=ConfigError) if name else None
        except ConfigError:  # outside, or no path at all: so in no job's folder
            continue
        if path is not None and path.is_relative_to(jobs_dir) and path != jobs_dir:
            found.add(path.relative_to(jobs_dir).parts[0])
    return found


def folder_bytes(folder: Path) -> int:
    """Disk space of a folder; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in (folder, *folder.rglob("*")):
        with suppress(OSError):  # it was removed meanwhile
            stat = path.lstat()
            sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())


async def is_archived(redis: Redis, record: JobRecord) -> bool:
    """Whether `archive` has taken this ended job out of Redis: every other job has events."""
    return record.state.ended and not await redis.exists(keys.events(record.id))
