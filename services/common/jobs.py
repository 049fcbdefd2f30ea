"""Job records: the state machine and what people read of a job.

queued ◄──► paused                   held in the queue: no learner takes it
  │
  ▼
starting ──► running ◄──► stalled    with a named cause
               │  ▲
               │  └─────► paused     at a request, between two steps: its learner waits
               ▼
            succeeded                failed | cancelled from any state above
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter
from redis.asyncio import Redis

from services.common import keys
from services.common.connection import text
from services.common.errors import JobConflict, KeyReused
from services.common.spec import JobSpec

MAX_EVENTS = 10_000
KEY_KEPT_S = 24 * 3600
"""An Idempotency-Key is remembered this long."""


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing will change it any more."""
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


LIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STALLED, JobState.PAUSED})
"""States in which a learner may own the job; it does if the record names one."""
PAUSED_CAUSE = "paused by request"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as people see it."""

    id: str
    name: str
    state: JobState
    cause: str
    """Why it is stalled, paused, failed or cancelled; empty otherwise."""
    created_at: float
    """Unix seconds."""
    started_at: float | None
    finished_at: float | None
    learner: str | None
    lineage: int
    step: int
    steps: int
    policy_version: int
    cancel_requested: bool
    pause_requested: bool
    groups: dict[str, int]
    """Groups issued, active, and by fate."""
    export: str | None
    """Directory of the newest weights in Hugging Face format."""
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """What rollout and reward servers need to attach to a running job."""

    job_id: str
    lineage: int
    weights_address: str
    """host:port of the learner's gRPC."""
    policy_version: int
    model_path: str
    """Directory of the model, the same on every machine."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The job spec as JSON values."""


_ACTIVE = TypeAdapter(ActiveJob)

_TRANSITION = """#!lua
-- KEYS: record, events   ARGV: new state, unix time, event, allowed states (comma-separated), field, value, field, value, …
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 'missing' end
if not string.find(',' .. ARGV[4] .. ',', ',' .. state .. ',', 1, true) then return state end
redis.call('HSET', KEYS[1], 'state', ARGV[1])
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '10000', '*', 'kind', 'state', 'at', ARGV[2], 'd', ARGV[3])
return 'ok'
"""


_CREATE = """#!lua
-- KEYS: record, jobs, queue, order, events, idempotency key (optional)
-- ARGV: job id, spec digest, seconds to remember the key, unix time, event, field, value, field, value, …
if KEYS[6] then
  local known = redis.call('HMGET', KEYS[6], 'spec', 'job_id')
  if known[1] and known[1] ~= ARGV[2] then return '' end
  if known[1] and known[2] ~= ARGV[1] then return known[2] end
  redis.call('HSET', KEYS[6], 'spec', ARGV[2], 'job_id', ARGV[1])
  redis.call('EXPIRE', KEYS[6], ARGV[3])
end
if redis.call('EXISTS', KEYS[1]) == 1 then return ARGV[1] end  -- the first reply was lost, and the command repeated
local order = redis.call('INCR', KEYS[4])
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('ZADD', KEYS[2], order, ARGV[1])
redis.call('ZADD', KEYS[3], order, ARGV[1])
redis.call('XADD', KEYS[5], '*', 'kind', 'state', 'at', ARGV[4], 'd', ARGV[5])
return ARGV[1]
"""

_ASK = """#!lua
-- KEYS: record, events
-- ARGV: field, value, request, unix time, states of a job that waits, its new state, cause, its event, states of a job that a learner owns
local state, learner = unpack(redis.call('HMGET', KEYS[1], 'state', 'learner'))
if not state then return 'missing' end
local function is_in(states) return string.find(',' .. states .. ',', ',' .. state .. ',', 1, true) end
local kind, event = ARGV[3], '{"message": "' .. ARGV[3] .. ' requested"}'
if not learner then
  if not is_in(ARGV[5]) then return state end
  redis.call('HSET', KEYS[1], 'state', ARGV[6], 'cause', ARGV[7])
  if ARGV[6] == 'cancelled' then redis.call('HSET', KEYS[1], 'finished_at', ARGV[4]) end
  kind, event = 'state', ARGV[8]
elseif not is_in(ARGV[9]) then
  return state
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '10000', '*', 'kind', kind, 'at', ARGV[4], 'd', event)
return 'ok'
"""

_APPEND_STEP = """#!lua
-- KEYS: steps   ARGV: step, record
if redis.call('LLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
return redis.call('RPUSH', KEYS[1], ARGV[2])
"""


class JobStore:
    """All job records, in Redis."""

    def __init__(self, redis: Redis) -> None:
        """Reads and writes through this client."""
        self._redis = redis

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
        pairs = [item for k, v in values.items() for item in (k, str(v))]
        made = text(
            await self._redis.register_script(_CREATE)(
                keys=names + ([keys.idempotency(key)] if key else []),
                args=[job_id, digest, KEY_KEPT_S, now, event, *pairs],
            )
        )
        if not made:
            raise KeyReused("the Idempotency-Key was used with another spec; a new job needs a new key")
        return await self.get(made), made == job_id

    async def find(self, job_id: str) -> JobRecord | None:
        """The job's record, or None."""
        raw = await self._redis.hgetall(keys.record(job_id))
        return _record(job_id, {text(k): text(v) for k, v in raw.items()}) if raw else None

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
        done = await self._redis.register_script(_TRANSITION)(
            keys=[keys.record(job_id), keys.events(job_id)], args=[to, now, event, states, *pairs]
        )
        if done != b"ok":
            raise JobConflict(f"job {job_id} is {text(done)}: it cannot become {to}")

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
        done = await self._redis.register_script(_ASK)(
            keys=[keys.record(job_id), keys.events(job_id)],
            args=[name, value, request, now, ",".join(waits), to, cause, event, ",".join(sorted(LIVE))],
        )
        if done != b"ok":
            raise JobConflict(f"job {job_id} is {text(done)}: {request} is not possible")
        return await self.get(job_id)

    async def update(self, job_id: str, **values: str | float) -> None:
        """Sets plain fields of the record."""
        await self._redis.hset(keys.record(job_id), mapping={k: str(v) for k, v in values.items()})

    async def event(self, job_id: str, kind: str, data: dict[str, Any]) -> None:
        """Adds to what `GET /jobs/{id}/events` tells."""
        await self._redis.xadd(
            keys.events(job_id),
            {"kind": kind, "at": time.time(), "d": json.dumps(data)},
            maxlen=MAX_EVENTS,
            approximate=True,
        )

    async def append_step(self, job_id: str, step: int, data: dict[str, Any]) -> None:
        """Adds a step's record to the history, once, and tells so in the events."""
        await self._redis.register_script(_APPEND_STEP)(keys=[keys.steps(job_id)], args=[step, json.dumps(data)])
        await self.event(job_id, "step", data)

    async def evaluated_steps(self, job_id: str) -> set[int]:
        """Steps whose evaluation is in the history."""
        return {int(json.loads(raw)["step"]) for raw in await self._redis.lrange(keys.evals(job_id), 0, -1)}

    async def append_eval(self, job_id: str, data: dict[str, Any]) -> None:
        """Adds an evaluation to the history and tells so in the events."""
        await self._redis.rpush(keys.evals(job_id), json.dumps(data))
        await self.event(job_id, "eval", data)

    async def activate(self, job: ActiveJob) -> None:
        """Lets rollout and reward servers see the job, or its newer address and version."""
        await self._redis.hset(keys.ACTIVE, job.job_id, json.dumps(asdict(job)))

    async def retire(self, job_id: str) -> None:
        """Lets servers detach, and deletes the work still in its streams."""
        await self._redis.hdel(keys.ACTIVE, job_id)
        await self._redis.delete(*keys.work(job_id))

    async def active(self) -> dict[str, ActiveJob]:
        """Jobs that servers may attach to, by id."""
        raw = await self._redis.hgetall(keys.ACTIVE)
        return {text(job_id): _ACTIVE.validate_json(value) for job_id, value in raw.items()}


def _record(job_id: str, raw: dict[str, str]) -> JobRecord:
    def number(name: str) -> float | None:
        return float(raw[name]) if raw.get(name) else None

    return JobRecord(
        id=job_id,
        name=raw["name"],
        state=JobState(raw["state"]),
        cause=raw.get("cause", ""),
        created_at=float(raw["created_at"]),
        started_at=number("started_at"),
        finished_at=number("finished_at"),
        learner=raw.get("learner"),
        lineage=int(raw.get("lineage", 0)),
        step=int(raw.get("step", 0)),
        steps=int(raw["steps"]),
        policy_version=int(raw.get("policy_version", 0)),
        cancel_requested=raw.get("cancel_requested") == "1",
        pause_requested=raw.get("pause_requested") == "1",
        groups=json.loads(raw.get("groups", "{}")),
        export=raw.get("export") or None,
        spec=JobSpec.model_validate_json(raw["spec"]),
    )
