"""`Idempotency-Key`: a repeated `POST /jobs` makes one job.

The key's first use is claimed in Redis with the spec's fingerprint; later uses get the same job, as long as the key is remembered.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from services.common.errors import JobConflict
from services.common.jobs import JobRecord, JobStore
from services.common.spec import JobSpec
from services.gateway.errors import SpecRefused
from services.gateway.schemas import FieldProblem

HEADER = "Idempotency-Key"
KEPT_S = 24 * 3600
CLAIM_S = 60
"""A claim whose request died is free again after this."""


def key_name(key: str) -> str:
    """The Redis key of an idempotency key."""
    return f"millrace:idempotency:{hashlib.sha256(key.encode()).hexdigest()}"


async def create_once(
    redis: Redis, store: JobStore, key: str, spec: JobSpec, create: Callable[[], Awaitable[JobRecord]]
) -> tuple[JobRecord, bool]:
    """The key's job, and whether it was there before.

    Raises:
        SpecRefused: the key was used for another spec.
        JobConflict: another request with this key is being worked on.
    """
    name = key_name(key)
    fingerprint = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
    claim = {"fingerprint": fingerprint, "claim": secrets.token_hex(16), "job_id": None}
    if not await redis.set(name, json.dumps(claim), nx=True, ex=CLAIM_S):
        raw = await redis.get(name)
        held = json.loads(raw) if raw else claim
        if held["fingerprint"] != fingerprint:
            problem = FieldProblem(field=HEADER, message="was used with another spec; a new job needs a new key")
            raise SpecRefused([problem])
        known = await store.find(held["job_id"]) if held["job_id"] else None
        if known is not None:
            return known, True
        if held["claim"] != claim["claim"]:  # else it is our own: the first reply was lost and the command repeated
            raise JobConflict(f"a request with this {HEADER} is being worked on; ask again")
    record = await create()
    await redis.set(name, json.dumps({**claim, "job_id": record.id}), ex=KEPT_S)
    return record, False
