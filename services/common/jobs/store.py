"""Store of jobs in Redis: the state machine, the queue, and the jobs that servers may attach to.

queued ◄──► paused                   held back in the queue: no learner takes it
  │
  ▼
starting ──► running ◄──► stalled    with a named cause
               │  ▲
               │  └─────► paused     on request, between two steps: its learner waits
               ▼
            succeeded                failed | cancelled from any state above

Every change of state is also written into the job's own folder, where there is one: the record is rebuilt from it (`restore`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter
from redis.asyncio import Redis

from services.common.errors import JobConflict, KeyReused
from services.common.jobs import lua
from services.common.jobs.lua import new_token
from services.common.jobs.record import (
    LIVE,
    PAUSED_CAUSE,
    ROW_FIELDS,
    ActiveJob,
    JobRecord,
    JobRow,
    JobState,
    row_from_hash,
)
from services.common.jobs.records import JobHistory, JobRecords
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.redis.fencing import Fence, run
from services.common.spec.job import JobSpec

KEY_KEPT_S = 24 * 3600
"""Time for which an Idempotency-Key is kept, seconds."""

_ACTIVE = TypeAdapter(ActiveJob)
_REUSED = "the Idempotency-Key was used with another spec; a new job needs a new key"


class JobStore:
    """All jobs: their states, the queue for learners, and the active jobs, to which servers may attach."""

    def __init__(self, redis: Redis, jobs_dir: Path | None = None, fence: Fence | None = None) -> None:
        """Without `jobs_dir` the jobs' folders are not used; `fence` is a head's right to write its job."""
        self._redis = redis
        self._run = partial(run, redis, fence=fence)
        self.records = JobRecords(redis, jobs_dir)
        self.history = JobHistory(redis, jobs_dir, fence)

    async def find(self, job_id: str) -> JobRecord | None:
        """The job's record, or None."""
        return await self.records.find(job_id)

    async def ids_with_prefix(self, prefix: str) -> list[str]:
        """Ids of the jobs whose id begins so, newest first; none for the empty prefix."""
        ids = map(text, await self._redis.zrevrange(keys.JOBS, 0, -1)) if prefix else ()
        return [job_id for job_id in ids if job_id.startswith(prefix)]

    async def get(self, job_id: str) -> JobRecord:
        """The job's record. Raises JobConflict when there is no such job."""
        record = await self.find(job_id)
        if record is None:
            raise JobConflict(f"there is no job {job_id!r}")
        return record

    async def create(self, spec: JobSpec) -> JobRecord:
        """A new job, queued."""
        return (await self.create_once(spec, None))[0]

    async def create_once(
        self, spec: JobSpec, key: str | None, *, sent: JobSpec | None = None, fetching: str = ""
    ) -> tuple[JobRecord, bool]:
        """A job, new or created with this Idempotency-Key; and whether it is new. Raises KeyReused for another spec.

        `sent`: the spec before its references were resolved, by which a repeat is recognized. `fetching`: what the job waits for, its
        cause; no learner takes it before `fetched` is called.
        """
        job_id, now, spec_json = f"{spec.name}-{secrets.token_hex(4)}", time.time(), spec.model_dump_json()
        values = {
            "name": spec.name, "state": JobState.QUEUED, "created_at": now, "steps": spec.learner.steps, "lineage": 0,
            "spec": spec_json, "tags": json.dumps(spec.tags), "notes": spec.notes,
            "model": spec.model.path, "data": spec.data.train.source,
        }  # fmt: skip
        names = [
            keys.record(job_id),
            keys.JOBS,
            keys.FETCHES if fetching else keys.QUEUE,
            keys.ORDER,
            keys.events(job_id),
        ]
        digest = _digest(sent or spec)
        event = json.dumps({"state": JobState.QUEUED} | ({"cause": fetching} if fetching else {}))
        if fetching:
            values["cause"] = fetching
        if key:
            values["idempotency"] = f"{keys.idempotency(key)} {digest}"
            names.append(keys.idempotency(key))
        pairs = [item for k, v in values.items() for item in (k, str(v))]
        create = self._redis.register_script(lua.CREATE)
        created = text(await create(keys=names, args=[job_id, digest, KEY_KEPT_S, now, event, *pairs]))
        if not created:
            raise KeyReused(_REUSED)
        await self.records.save(created)
        return await self.get(created), created == job_id

    async def created_with(self, key: str, sent: JobSpec) -> JobRecord | None:
        """The job that was created with this Idempotency-Key, if there is one. Raises KeyReused where its spec was another."""
        digest, job_id = await self._redis.hmget(keys.idempotency(key), ["spec", "job_id"])
        if job_id is None:
            return None
        if text(digest) != _digest(sent):
            raise KeyReused(_REUSED)
        return await self.find(text(job_id))

    async def label(self, job_id: str, *, tags: Sequence[str] | None = None, notes: str | None = None) -> JobRecord:
        """Sets a job's tags and notes, those that are given; in any state. Raises JobConflict when there is no such job."""
        values = ({} if tags is None else {"tags": json.dumps(list(tags))}) | (
            {} if notes is None else {"notes": notes}
        )
        if values:
            await self.update(job_id, **values)
        return await self.get(job_id)

    async def list(self, *, offset: int = 0, limit: int = 100) -> list[JobRow]:
        """Jobs, newest first, in two round trips."""
        ids = [text(job_id) for job_id in await self._redis.zrevrange(keys.JOBS, offset, offset + limit - 1)]
        # A script: one command for each row would cost more than all the rest.
        names = [keys.record(job_id) for job_id in ids]
        found = await self._redis.register_script(lua.ROWS)(keys=names, args=ROW_FIELDS) if ids else []
        rows = (zip(ROW_FIELDS, values, strict=True) for values in found)
        hashes = [{name: text(value) for name, value in row if value is not None} for row in rows]
        return [row_from_hash(job_id, raw) for job_id, raw in zip(ids, hashes, strict=True) if raw]

    async def transition(
        self, job_id: str, to: JobState, *, allowed: Iterable[JobState], cause: str = "", **values: str | float
    ) -> None:
        """Moves a job to another state, atomically, with an event. Raises JobConflict if in no `allowed` state."""
        now = time.time()
        stamps = {"started_at": now} if to is JobState.STARTING else {"finished_at": now} if to.ended else {}
        pairs = [item for k, v in ({"cause": cause} | stamps | values).items() for item in (k, str(v))]
        event = json.dumps({"state": to, "cause": cause})
        states = ",".join(sorted(set(allowed)))
        names = [keys.record(job_id), keys.events(job_id)]
        done = await self._run(lua.TRANSITION, names, [to, now, event, states, new_token(), *pairs])
        if done != b"ok":
            raise JobConflict(f"job {job_id} is {text(done)}: it cannot become {to}")
        await self.records.save(job_id)

    async def report_unchecked(self, job_id: str, fields: Sequence[str]) -> None:
        """Adds an event: these fields could not be checked in time, and are left to the learner."""
        message = f"not checked in time, left to the learner: {', '.join(fields)}"
        await self.history.event(job_id, "admission", {"message": message, "unchecked": list(fields)})

    async def fetching(self) -> Sequence[str]:
        """Ids of the jobs whose models or data are fetched from a hub first, the oldest first."""
        return [text(job_id) for job_id in await self._redis.zrange(keys.FETCHES, 0, -1)]

    async def fetched(self, job_id: str) -> None:
        """Lets learners take the job, if it waits: what it names is there. Of an ended job only the mark goes."""
        record = await self.find(job_id)
        async with self._redis.pipeline(transaction=True) as pipe:
            if record is not None and record.learner is None and not record.state.ended:
                pipe.zadd(keys.QUEUE, {job_id: record.order})
            pipe.zrem(keys.FETCHES, job_id)
            await pipe.execute()

    async def claim(self, learner: str) -> JobRecord | None:
        """The next job for this learner: one that it left unfinished, else the oldest in the queue, else None."""
        held = await self.held_by(learner)
        if held is not None:
            return held
        for raw in await self._redis.zrange(keys.QUEUE, 0, -1):
            job_id = text(raw)
            await self._redis.zadd(keys.HELD, {job_id: time.time()})  # first: a superfluous member does no harm
            try:
                await self.transition(job_id, JobState.STARTING, allowed=[JobState.QUEUED], learner=learner)
            except JobConflict:
                await self._drop_from_queue(job_id)
            else:
                await self._redis.zrem(keys.QUEUE, job_id)
                return await self.get(job_id)
        return None

    async def held_by(self, learner: str) -> JobRecord | None:
        """The job that this learner has taken and not ended, or None."""
        ids = [text(job_id) for job_id in await self._redis.zrevrange(keys.HELD, 0, -1)]
        for job_id, (owner, state, _) in zip(ids, await self._owners(ids), strict=True):
            if state is None or JobState(text(state)).ended:
                await self._redis.zrem(keys.HELD, job_id)  # a restored record is added again
            elif owner is not None and text(owner) == learner and text(state) in LIVE:
                return await self.find(job_id)
        return None

    async def rebuild_held(self) -> None:
        """Rebuilds the list of held jobs from all records: for a Redis that has no such list, or an old one."""
        ids = [text(job_id) for job_id in await self._redis.zrange(keys.JOBS, 0, -1)]
        owners = zip(ids, await self._owners(ids), strict=True)
        held = {job_id: float(at or 0) for job_id, (owner, state, at) in owners if owner and text(state) in LIVE}
        if held:
            await self._redis.zadd(keys.HELD, held)

    async def _owners(self, ids: Sequence[str]) -> Sequence[Sequence[bytes | None]]:
        """Learner, state and start time of each job, as in its record."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.hmget(keys.record(job_id), ["learner", "state", "started_at"])
            found: Sequence[Sequence[bytes | None]] = await pipe.execute()
        return found

    async def _drop_from_queue(self, job_id: str) -> None:
        """Takes a job that another learner has, or that has ended, off the queue: neither ever waits again. A paused one stays."""
        record = await self.find(job_id)
        if record is None or record.learner or record.state.ended:
            await self._redis.zrem(keys.QUEUE, job_id)

    async def cancel(self, job_id: str) -> JobRecord:
        """Cancels a waiting job at once; requests it from the learner of a live one.

        Raises:
            JobConflict: there is no such job, or it has ended.
        """
        waits, cause = [JobState.QUEUED, JobState.PAUSED], "cancelled while queued"
        return await self._request(job_id, "cancel", JobState.CANCELLED, waits, cause=cause, cancel_requested="1")

    async def pause(self, job_id: str) -> JobRecord:
        """Holds a queued job back at once; requests the learner of a live one to stop after the current step. A repeat changes nothing.

        Raises:
            JobConflict: there is no such job, or it has ended.
        """
        waits = [JobState.QUEUED, JobState.PAUSED]
        return await self._request(job_id, "pause", JobState.PAUSED, waits, cause=PAUSED_CAUSE, pause_requested="1")

    async def resume(self, job_id: str) -> JobRecord:
        """Returns a job that was held back to the queue; requests the learner of a paused one to continue.

        Raises:
            JobConflict: there is no such job, or it is not paused and no pause is requested.
        """
        record = await self.get(job_id)
        if record.state.ended or not (record.pause_requested or record.state is JobState.PAUSED):
            raise JobConflict(f"job {job_id} is {record.state}: only a paused job can be resumed{_way_on(record)}")
        return await self._request(job_id, "resume", JobState.QUEUED, [JobState.PAUSED], pause_requested="")

    async def _request(
        self, job_id: str, request: str, to: JobState, waits: Iterable[JobState], *, cause: str = "", **field: str
    ) -> JobRecord:
        """Moves a job without a learner to another state, or sets a field of the record for its learner; atomic."""
        ((name, value),) = field.items()
        now, event = time.time(), json.dumps({"state": to, "cause": cause})
        done = await self._redis.register_script(lua.REQUEST)(
            keys=[keys.record(job_id), keys.events(job_id)],
            args=[name, value, request, now, ",".join(waits), to, cause, event, ",".join(sorted(LIVE)), new_token()],
        )
        if done != b"ok":
            raise JobConflict(f"job {job_id} is {text(done)}: {request} is not possible")
        await self.records.save(job_id)
        return await self.get(job_id)

    async def update(self, job_id: str, **values: str | float) -> None:
        """Sets plain fields of the record. Raises JobConflict when there is no such job."""
        await self.update_in_redis(job_id, **values)
        await self.records.save(job_id)

    async def update_in_redis(self, job_id: str, **values: str | float) -> None:
        """As `update`, for fields that change all the time: the job's folder gets them with its next `save`."""
        pairs = [item for k, v in values.items() for item in (k, str(v))]
        if await self._run(lua.UPDATE, [keys.record(job_id)], pairs) != b"ok":
            raise JobConflict(f"there is no job {job_id!r}")

    async def activate(self, job: ActiveJob) -> None:
        """Lets rollout and reward servers see the job, or its newer address and version."""
        await self._run(lua.ACTIVATE, [keys.ACTIVE], [job.job_id, json.dumps(asdict(job))])

    async def retire(self, job_id: str) -> None:
        """Lets servers detach, and deletes the work still in its streams."""
        await self._run(lua.ACTIVATE, [keys.ACTIVE], [job_id, ""])
        await self._redis.delete(*keys.work(job_id))

    async def active(self) -> dict[str, ActiveJob]:
        """Jobs that servers may attach to, by id."""
        raw = await self._redis.hgetall(keys.ACTIVE)
        return {text(job_id): _ACTIVE.validate_json(value) for job_id, value in raw.items()}


def _digest(spec: JobSpec) -> str:
    """What an Idempotency-Key stands for."""
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()


def _way_on(record: JobRecord) -> str:
    """How to go on where an ended job stopped; empty for one that has trained nothing, or has not ended."""
    if not record.state.ended or record.step == 0:
        return ""
    return f"; `millrace resubmit {record.id} --set checkpoint.load={record.id}` goes on from its last checkpoint"
