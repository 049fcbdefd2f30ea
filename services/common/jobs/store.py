"""Jobs in Redis: the state machine and what people read of a job.

queued ◄──► paused                   held in the queue: no learner takes it
  │
  ▼
starting ──► running ◄──► stalled    with a named cause
               │  ▲
               │  └─────► paused     at a request, between two steps: its learner waits
               ▼
            succeeded                failed | cancelled from any state above

Every move is written into the job's own folder, too, where there is one: it is what the record is rebuilt from (`restore`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from redis.asyncio import Redis

from services.common.errors import JobConflict, KeyReused
from services.common.jobs import lua
from services.common.jobs.history import JobHistory
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
from services.common.jobs.records import JobRecords
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.redis.fencing import Fence, run
from services.common.spec.job import JobSpec

KEY_KEPT_S = 24 * 3600
"""An Idempotency-Key is remembered this long."""

Owners = list[list[bytes | None]]
"""Learner, state and time of start of jobs, as Redis has them."""

_ACTIVE = TypeAdapter(ActiveJob)


class JobStore:
    """All jobs: their states, what waits for learners, what servers may attach to."""

    def __init__(self, redis: Redis, jobs_dir: Path | None = None, fence: Fence | None = None) -> None:
        """Reads and writes through this client.

        Args:
            redis: client whose replies are bytes.
            jobs_dir: holds the jobs' own folders; None: they are left alone.
            fence: a head's right to write its job; None for anybody else.
        """
        self._redis, self._fence = redis, fence
        self.records = JobRecords(redis, jobs_dir)
        self.history = JobHistory(redis, jobs_dir, fence)

    async def find(self, job_id: str) -> JobRecord | None:
        """The job's record, or None."""
        return await self.records.find(job_id)

    async def get(self, job_id: str) -> JobRecord:
        """The job's record.

        Raises:
            JobConflict: there is no such job.
        """
        record = await self.find(job_id)
        if record is None:
            raise JobConflict(f"there is no job {job_id!r}")
        return record

    async def create(self, spec: JobSpec) -> JobRecord:
        """A new job, queued."""
        return (await self.create_once(spec, None))[0]

    async def create_once(self, spec: JobSpec, key: str | None) -> tuple[JobRecord, bool]:
        """A new job, queued, or the one that this Idempotency-Key made before; and whether it is new.

        Raises:
            KeyReused: the key was used with another spec.
        """
        job_id, now, text_of_spec = f"{spec.name}-{secrets.token_hex(4)}", time.time(), spec.model_dump_json()
        values = {
            "name": spec.name, "state": JobState.QUEUED, "created_at": now, "steps": spec.learner.steps, "lineage": 0,
            "spec": text_of_spec,
        }  # fmt: skip
        names = [keys.record(job_id), keys.JOBS, keys.QUEUE, keys.ORDER, keys.events(job_id)]
        digest, event = hashlib.sha256(text_of_spec.encode()).hexdigest(), json.dumps({"state": JobState.QUEUED})
        if key:
            values["idempotency"] = f"{keys.idempotency(key)} {digest}"
        pairs = [item for k, v in values.items() for item in (k, str(v))]
        made = text(
            await self._redis.register_script(lua.CREATE)(
                keys=names + ([keys.idempotency(key)] if key else []),
                args=[job_id, digest, KEY_KEPT_S, now, event, *pairs],
            )
        )
        if not made:
            raise KeyReused("the Idempotency-Key was used with another spec; a new job needs a new key")
        await self.records.save(made)
        return await self.get(made), made == job_id

    async def list(self, *, offset: int = 0, limit: int = 100) -> list[JobRow]:
        """Jobs, newest first, in two round trips."""
        ids = [text(job_id) for job_id in await self._redis.zrevrange(keys.JOBS, offset, offset + limit - 1)]
        # A script: to write a command of its own for each row costs more than all the rest.
        names = [keys.record(job_id) for job_id in ids]
        found = await self._redis.register_script(lua.ROWS)(keys=names, args=ROW_FIELDS) if ids else []
        rows = [
            (job_id, {name: text(value) for name, value in zip(ROW_FIELDS, values, strict=True) if value is not None})
            for job_id, values in zip(ids, found, strict=True)
        ]
        return [row_from_hash(job_id, raw) for job_id, raw in rows if raw]

    async def transition(
        self, job_id: str, to: JobState, *, allowed: Iterable[JobState], cause: str = "", **values: str | float
    ) -> None:
        """Moves a job to another state, atomically, and tells so in its events.

        Raises:
            JobConflict: the job is in none of the `allowed` states.
        """
        now = time.time()
        stamps = {"started_at": now} if to is JobState.STARTING else {"finished_at": now} if to.ended else {}
        pairs = [text for k, v in ({"cause": cause} | stamps | values).items() for text in (k, str(v))]
        event = json.dumps({"state": to, "cause": cause})
        states = ",".join(sorted(set(allowed)))
        names = [keys.record(job_id), keys.events(job_id)]
        done = await self._run(lua.TRANSITION, names, [to, now, event, states, new_token(), *pairs])
        if done != b"ok":
            raise JobConflict(f"job {job_id} is {text(done)}: it cannot become {to}")
        await self.records.save(job_id)

    async def claim(self, learner: str) -> JobRecord | None:
        """The next job for this learner: one that it left unfinished, else the oldest in the queue; None when there is none."""
        held = await self.held_by(learner)
        if held is not None:
            return held
        for raw in await self._redis.zrange(keys.QUEUE, 0, -1):
            job_id = text(raw)
            await self._redis.zadd(keys.HELD, {job_id: time.time()})  # first: one too many there does no harm
            try:
                await self.transition(job_id, JobState.STARTING, allowed=[JobState.QUEUED], learner=learner)
            except JobConflict:
                await self._forget_unless_held(job_id)
            else:
                await self._redis.zrem(keys.QUEUE, job_id)
                return await self.get(job_id)
        return None

    async def held_by(self, learner: str) -> JobRecord | None:
        """The job that this learner has taken and not ended, or None."""
        ids = [text(job_id) for job_id in await self._redis.zrevrange(keys.HELD, 0, -1)]
        for job_id, (owner, state, _) in zip(ids, await self._owners(ids), strict=True):
            if state is None or JobState(text(state)).ended:
                await self._redis.zrem(keys.HELD, job_id)  # a record that is put back is added again
            elif owner is not None and text(owner) == learner and text(state) in LIVE:
                return await self.find(job_id)
        return None

    async def find_held(self) -> None:
        """Looks through all jobs for those that a learner holds, and lists them: for a Redis that does not have the list, or an old one."""
        ids = [text(job_id) for job_id in await self._redis.zrange(keys.JOBS, 0, -1)]
        owners = zip(ids, await self._owners(ids), strict=True)
        held = {job_id: float(at or 0) for job_id, (owner, state, at) in owners if owner and text(state) in LIVE}
        if held:
            await self._redis.zadd(keys.HELD, held)

    async def _owners(self, ids: Sequence[str]) -> Owners:
        """Learner, state and time of start of each job, as their records have them."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.hmget(keys.record(job_id), ["learner", "state", "started_at"])
            found: Owners = await pipe.execute()
        return found

    async def _forget_unless_held(self, job_id: str) -> None:
        """Takes a job off the queue that another learner has, or that has ended; neither ever waits again. A paused one stays."""
        record = await self.find(job_id)
        if record is None or record.learner or record.state.ended:
            await self._redis.zrem(keys.QUEUE, job_id)

    async def cancel(self, job_id: str) -> JobRecord:
        """Cancels a job that waits at once; asks the learner of a live one to.

        Raises:
            JobConflict: no such job, or it has ended.
        """
        waits, cause = [JobState.QUEUED, JobState.PAUSED], "cancelled while queued"
        return await self._ask(job_id, "cancel", JobState.CANCELLED, waits, cause=cause, cancel_requested="1")

    async def pause(self, job_id: str) -> JobRecord:
        """Holds a queued job back at once; asks the learner of a live one to stop after the step under way. Once more changes nothing.

        Raises:
            JobConflict: no such job, or it has ended.
        """
        waits = [JobState.QUEUED, JobState.PAUSED]
        return await self._ask(job_id, "pause", JobState.PAUSED, waits, cause=PAUSED_CAUSE, pause_requested="1")

    async def resume(self, job_id: str) -> JobRecord:
        """Lets a job that was held back wait for a learner again; asks the learner of a paused one to go on.

        Raises:
            JobConflict: no such job, or it is not paused and was not asked to be.
        """
        record = await self.get(job_id)
        if record.state.ended or not (record.pause_requested or record.state is JobState.PAUSED):
            raise JobConflict(f"job {job_id} is {record.state}: only a paused job can be resumed")
        return await self._ask(job_id, "resume", JobState.QUEUED, [JobState.PAUSED], pause_requested="")

    async def _ask(
        self, job_id: str, request: str, to: JobState, waits: Iterable[JobState], *, cause: str = "", **field: str
    ) -> JobRecord:
        """Moves a job without a learner to another state, or leaves word for its learner in a field of the record; atomic."""
        ((name, value),) = field.items()
        now, event = time.time(), json.dumps({"state": to, "cause": cause})
        done = await self._redis.register_script(lua.ASK)(
            keys=[keys.record(job_id), keys.events(job_id)],
            args=[name, value, request, now, ",".join(waits), to, cause, event, ",".join(sorted(LIVE)), new_token()],
        )
        if done != b"ok":
            raise JobConflict(f"job {job_id} is {text(done)}: {request} is not possible")
        await self.records.save(job_id)
        return await self.get(job_id)

    async def update(self, job_id: str, **values: str | float) -> None:
        """Sets plain fields of the record.

        Raises:
            JobConflict: there is no such job.
        """
        await self.note(job_id, **values)
        await self.records.save(job_id)

    async def note(self, job_id: str, **values: str | float) -> None:
        """As `update`, for what changes all the time: the job's folder has it with the next update or move.

        Raises:
            JobConflict: there is no such job.
        """
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

    async def _run(self, script: str, names: Sequence[str], args: Sequence[Any]) -> Any:  # noqa: ANN401  each script's own answer
        return await run(self._redis, script, names, args, fence=self._fence)
