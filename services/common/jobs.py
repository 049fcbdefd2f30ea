"""Job records: the state machine and what people read of a job.

queued → starting → running → succeeded
   │         │       │  ▲
   │         │       ▼  │
   │         │     stalled (with a named cause)
   └─────────┴───────┴──► cancelled | failed
"""

from __future__ import annotations

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
from services.common.errors import JobConflict
from services.common.spec import JobSpec

MAX_EVENTS = 10_000


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing will change it any more."""
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


LIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STALLED})
"""States in which a learner owns the job."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as people see it."""

    id: str
    name: str
    state: JobState
    cause: str
    """Why it is stalled, failed or cancelled; empty otherwise."""
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
        job_id = f"{spec.name}-{secrets.token_hex(4)}"
        now = time.time()
        values = {
            "name": spec.name, "state": JobState.QUEUED, "created_at": now, "steps": spec.learner.steps, "lineage": 0,
            "spec": spec.model_dump_json(),
        }  # fmt: skip
        order = await self._redis.incr(f"{keys.QUEUE}:order")
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.record(job_id), mapping={k: str(v) for k, v in values.items()})
            pipe.zadd(keys.JOBS, {job_id: order})
            pipe.zadd(keys.QUEUE, {job_id: order})
            await pipe.execute()
        await self.event(job_id, "state", {"state": JobState.QUEUED})
        return await self.get(job_id)

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
        for record in await self.list(limit=1000):
            if record.learner == learner and record.state in LIVE:
                return record
        for raw in await self._redis.zrange(keys.QUEUE, 0, -1):
            job_id = text(raw)
            try:
                await self.transition(job_id, JobState.STARTING, allowed=[JobState.QUEUED], learner=learner)
            except JobConflict:
                continue  # another learner was quicker, or it was cancelled
            else:
                return await self.get(job_id)
            finally:
                await self._redis.zrem(keys.QUEUE, job_id)
        return None

    async def cancel(self, job_id: str) -> JobRecord:
        """Cancels a queued job at once; asks the learner of a live one to.

        Raises:
            JobConflict: no such job, or it has ended.
        """
        record = await self.get(job_id)
        if record.state.ended:
            raise JobConflict(f"job {job_id} is {record.state}: it cannot be cancelled")
        if record.state is JobState.QUEUED:
            try:
                await self.transition(
                    job_id, JobState.CANCELLED, allowed=[JobState.QUEUED], cause="cancelled while queued"
                )
            except JobConflict:
                pass  # a learner took it in between: ask the learner
            else:
                return await self.get(job_id)
        await self.update(job_id, cancel_requested=1)
        await self.event(job_id, "cancel", {"message": "cancel requested"})
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
        groups=json.loads(raw.get("groups", "{}")),
        export=raw.get("export") or None,
        spec=JobSpec.model_validate_json(raw["spec"]),
    )
