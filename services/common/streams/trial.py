"""Trial of a section `reward`: groups that no job has are judged by any reward server, before a job uses the section.

asker ── TrialRequest ──► millrace:trials ──► reward server: the section's scorers ── TrialReply ──► millrace:trial:<token> ──► asker

A request that no server takes in time is withdrawn, and nothing of a trial is kept.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from services.common.redis import keys
from services.common.streams import codec
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import RolloutGroup, Verdict

POLL_INTERVAL_S = 0.05
"""Between two looks for the reply."""
REPLY_TTL_S = 60
"""A reply that nobody fetches is deleted after so long."""


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """asker → reward: judge these groups as a job with this section would."""

    token: str
    """Names the trial."""
    reward: str
    """The section as JSON."""
    groups: tuple[RolloutGroup, ...]
    limit_s: float
    """Of all verdicts together."""


@dataclass(frozen=True, slots=True)
class TrialReply:
    """reward → asker: one verdict for each rollout of each group, in their order; none, and a reason, where there are no verdicts."""

    verdicts: tuple[tuple[Verdict, ...], ...]
    failure: str = ""


async def ask(redis: Redis, request: TrialRequest) -> TrialReply | None:
    """The reply; None when no server has given one within the request's limit. Raises EntryError when the groups are too large."""
    payload: Any = codec.encode(request, MIN_ENTRY_BYTES)  # redis-py's types know text only
    until = time.monotonic() + request.limit_s
    async with redis.pipeline(transaction=True) as batch:
        batch.rpush(keys.TRIALS, payload)
        batch.expire(keys.TRIALS, math.ceil(request.limit_s))
        await batch.execute()
    try:
        while time.monotonic() < until:
            found: Any = await redis.getdel(keys.trial(request.token))
            if found is not None:
                return codec.decode(TrialReply, found, MIN_ENTRY_BYTES)
            await asyncio.sleep(POLL_INTERVAL_S)
        return None
    finally:
        await redis.lrem(keys.TRIALS, 1, payload)


async def take(redis: Redis) -> TrialRequest | None:
    """The oldest request, which no other server gets then; None without one. Raises EntryError when it cannot be read."""
    payload: Any = await redis.lpop(keys.TRIALS)
    return None if payload is None else codec.decode(TrialRequest, payload, MIN_ENTRY_BYTES)


async def answer(redis: Redis, token: str, reply: TrialReply) -> None:
    """Gives the asker its reply. Raises EntryError when it is too large."""
    await redis.set(keys.trial(token), codec.encode(reply, MIN_ENTRY_BYTES), ex=REPLY_TTL_S)
