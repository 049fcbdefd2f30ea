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

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from redis.asyncio import Redis

from services.common import job_scripts, keys
from services.common.connection import text
from services.common.errors import ConfigError, JobConflict, KeyReused
from services.common.fencing import Fence, run
from services.common.job_folder import JobFolder
from services.common.job_records import (
    LIVE,
    PAUSED_CAUSE,
    ActiveJob,
    JobRecord,
    JobState,
    from_document,
    from_hash,
    to_document,
    to_hash,
)
from services.common.spec import JobSpec, dump_spec, parse_spec

__all__ = ["LIVE", "PAUSED_CAUSE", "ActiveJob", "JobRecord", "JobState", "JobStore"]

log = logging.getLogger(__name__)

KEY_KEPT_S = 24 * 3600
"""An Idempotency-Key is remembered this long."""
REFILL_RECORDS = 200
"""Records of a history that one script puts back."""

_ACTIVE = TypeAdapter(ActiveJob)


class JobStore:
    """All job records, in Redis."""

    fence: Fence | None = None
    """What a head writes with (`HeadStore`); None for anybody else."""

    def __init__(self, redis: Redis, jobs_dir: Path | None = None) -> None:
        """Reads and writes through this client; `jobs_dir` holds the jobs' own folders."""
        self._redis = redis
        self._jobs_dir = jobs_dir

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
            await self._redis.register_script(job_scripts.CREATE)(
                keys=names + ([keys.idempotency(key)] if key else []),
                args=[job_id, digest, KEY_KEPT_S, now, event, *pairs],
            )
        )
        if not made:
            raise KeyReused("the Idempotency-Key was used with another spec; a new job needs a new key")
        await self.save(made)
        return await self.get(made), made == job_id

    async def find(self, job_id: str) -> JobRecord | None:
        """The job's record, or None."""
        raw = await self._redis.hgetall(keys.record(job_id))
        return from_hash(job_id, {text(k): text(v) for k, v in raw.items()}) if raw else None

    async def get(self, job_id: str) -> JobRecord:
        """The job's record.

        Raises:
            JobConflict: there is no such job.
        """
        record = await self.find(job_id)
        if record is None:
            raise JobConflict(f"there is no job {job_id!r}")
        return record

    async def list(self, *, offset: int = 0, limit: int = 100) -> list[JobRecord]:
        """Jobs, newest first."""
        ids = await self._redis.zrevrange(keys.JOBS, offset, offset + limit - 1)
        records = [await self.find(text(job_id)) for job_id in ids]
        return [record for record in records if record is not None]

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
        done = await self._run(job_scripts.TRANSITION, names, [to, now, event, states, _token(), *pairs])
        if done != b"ok":
            raise JobConflict(f"job {job_id} is {text(done)}: it cannot become {to}")
        await self.save(job_id)

    async def claim(self, learner: str) -> JobRecord | None:
        """The next job for this learner: one that it left unfinished, else the oldest in the queue; None when there is none."""
        held = await self.held_by(learner)
        if held is not None:
            return held
        for raw in await self._redis.zrange(keys.QUEUE, 0, -1):
            job_id = text(raw)
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
        records = await self.list(limit=1000)
        return next((record for record in records if record.learner == learner and record.state in LIVE), None)

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
        done = await self._redis.register_script(job_scripts.ASK)(
            keys=[keys.record(job_id), keys.events(job_id)],
            args=[name, value, request, now, ",".join(waits), to, cause, event, ",".join(sorted(LIVE)), _token()],
        )
        if done != b"ok":
            raise JobConflict(f"job {job_id} is {text(done)}: {request} is not possible")
        await self.save(job_id)
        return await self.get(job_id)

    async def update(self, job_id: str, **values: str | float) -> None:
        """Sets plain fields of the record.

        Raises:
            JobConflict: there is no such job.
        """
        pairs = [item for k, v in values.items() for item in (k, str(v))]
        if await self._run(job_scripts.UPDATE, [keys.record(job_id)], pairs) != b"ok":
            raise JobConflict(f"there is no job {job_id!r}")
        await self.save(job_id)

    async def event(self, job_id: str, kind: str, data: dict[str, Any]) -> None:
        """Adds to what `GET /jobs/{id}/events` tells."""
        names = [keys.events(job_id), keys.once(job_id, _token())]
        await self._run(job_scripts.TELL, names, [kind, time.time(), json.dumps(data)])

    async def append_step(self, job_id: str, number: int, data: dict[str, Any]) -> None:
        """Adds a step's record to the history, once, and tells so in the events; `number` counts the job's own steps from 1."""
        await self._append_step(job_id, number, data, complete=False)

    async def _append_step(self, job_id: str, number: int, data: dict[str, Any], *, complete: bool) -> bool:
        """False, and nothing is changed, when `complete` asks for every step before and Redis lacks one."""
        args = [number, json.dumps(data), time.time(), int(complete)]
        done = await self._run(job_scripts.APPEND_STEP, [keys.steps(job_id), keys.events(job_id)], args)
        return int(done) != -1

    async def evaluated_steps(self, job_id: str) -> set[int]:
        """Steps whose evaluation is in the history."""
        return {int(json.loads(raw)["step"]) for raw in await self._redis.lrange(keys.evals(job_id), 0, -1)}

    async def append_eval(self, job_id: str, data: dict[str, Any]) -> None:
        """Adds an evaluation to the history and tells so in the events."""
        names = [keys.evals(job_id), keys.events(job_id), keys.once(job_id, _token())]
        await self._run(job_scripts.APPEND_EVAL, names, [json.dumps(data), time.time()])

    async def activate(self, job: ActiveJob) -> None:
        """Lets rollout and reward servers see the job, or its newer address and version."""
        await self._activate(job, self.fence)

    async def _activate(self, job: ActiveJob, fence: Fence | None) -> None:
        args = [job.job_id, json.dumps(asdict(job))]
        await run(self._redis, job_scripts.ACTIVATE, [keys.ACTIVE], args, fence=fence)

    async def retire(self, job_id: str) -> None:
        """Lets servers detach, and deletes the work still in its streams."""
        await self._run(job_scripts.ACTIVATE, [keys.ACTIVE], [job_id, ""])
        await self._redis.delete(*keys.work(job_id))

    async def active(self) -> dict[str, ActiveJob]:
        """Jobs that servers may attach to, by id."""
        raw = await self._redis.hgetall(keys.ACTIVE)
        return {text(job_id): _ACTIVE.validate_json(value) for job_id, value in raw.items()}

    async def save(self, job_id: str) -> None:
        """Writes the record into the job's folder; once more when it moves meanwhile, so that of several writers the newest state stays.

        A folder that cannot be written is told in the log: the job goes on, and the next move is written again.
        """
        if self._jobs_dir is None:
            return
        folder, written = JobFolder(self._jobs_dir / job_id), None
        while (record := await self.find(job_id)) is not None and record != written:
            try:
                await asyncio.to_thread(folder.save, to_document(record), dump_spec(record.spec))
            except OSError as error:
                log.error("%s cannot be written: %s", folder.path, error.strerror or error)  # noqa: TRY400  no fault of this code
                return
            written = record

    def saved(self, job_id: str) -> JobRecord | None:
        """The record in the job's folder; None when there is none, or it cannot be read (the log says why)."""
        found = JobFolder(self._jobs_dir / job_id).load() if self._jobs_dir is not None else None
        try:
            return None if found is None else from_document(found[0], parse_spec(found[1]))
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            log.warning("the folder of job %s holds no record that is understood here: %s", job_id, error)
            return None

    async def restore(self, record: JobRecord, incarnation: int | None = None) -> bool:
        """Puts a record and its history back into a Redis that has lost them; False when it had not.

        Args:
            record: what `saved` gave.
            incarnation: of the head that restores the job it runs; None for anybody else, who never changes a record that is there.
        """
        now, event = (
            time.time(),
            json.dumps({"message": "Redis had lost this job: its record is back", "state": record.state}),
        )
        waits = record.state in {JobState.QUEUED, JobState.PAUSED} and record.learner is None
        names = [keys.record(record.id), keys.JOBS, keys.QUEUE, keys.ORDER, keys.events(record.id)]
        key, _, digest = record.idempotency.partition(" ")
        pairs = [item for pair in to_hash(record).items() for item in pair]
        done = await self._redis.register_script(job_scripts.RESTORE)(
            keys=names + ([key] if key else []),
            args=[record.id, "" if incarnation is None else incarnation, record.order, int(waits), now, event,
                  int(record.created_at + KEY_KEPT_S - now), digest, *pairs],
        )  # fmt: skip
        if done:
            log.warning("Redis had lost job %s (%s): its record is back", record.id, record.state)
            await self.refill(record.id)
        return bool(done)

    async def refill(self, job_id: str) -> None:
        """Brings the history in Redis up to what the job's folder has."""
        if self._jobs_dir is None:
            return
        history = await asyncio.to_thread(JobFolder(self._jobs_dir / job_id).history)
        for name, records in ((keys.steps(job_id), history.steps), (keys.evals(job_id), history.evals)):
            have = int(await self._redis.llen(name))
            while have < len(records):
                chunk = [json.dumps(record) for record in records[have : have + REFILL_RECORDS]]
                have = int(await self._run(job_scripts.REFILL, [name], [have, *chunk]))

    async def _run(self, script: str, names: Sequence[str], args: Sequence[Any]) -> Any:  # noqa: ANN401  each script's own answer
        return await run(self._redis, script, names, args, fence=self.fence)


def _token() -> str:
    """Names one command, so that a repeat of it is known."""
    return secrets.token_hex(8)
