"""Fencing: of all processes that ever wrote for a job, or under a worker's name, only the newest may write.

Each start of a job's head takes the next incarnation of the job (`HeadStore.begin`), and each start of a worker that of its name
(`heartbeat.take_incarnation`); it is sent with every write. The script refuses an older one, so that a process that was stopped and
wakes up changes nothing. A record with a lower incarnation, or none, is one that Redis has lost or that was restored from a backup: the
process restores it, and writes again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.common.errors import Fenced, RecordGone

FENCE = """#!lua
-- ARGV: record and incarnation of the process that writes (both empty for one that is not fenced), …
local function refused()
  if ARGV[2] == '' then return false end
  local now = tonumber(redis.call('HGET', ARGV[1], 'incarnation') or 0)
  if now > tonumber(ARGV[2]) then return redis.error_reply('FENCED by incarnation ' .. now) end
  if now < tonumber(ARGV[2]) then return redis.error_reply('GONE record') end
  return false
end
local refusal = refused()
if refusal then return refusal end
"""
"""The beginning of every script that a fenced process may send.

The record's key is not in their KEYS: other Redis users may only read it, or not even that.
"""


LEASE_S = 60.0
"""Work whose holder has not renewed its lease for so long is taken over."""
MAX_RESTORES = 3
"""Number of times that one write restores the record: a Redis may be emptied again meanwhile."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A process's right to write, until a newer one in its place begins."""

    what: str
    """The job or the worker's name, for people."""
    record: str
    """Key of the hash whose `incarnation` is the newest process's."""
    incarnation: int
    """From 1; rises with every start of such a process."""
    restore: Callable[[], Awaitable[None]]
    """Restores what Redis has lost of the record. Called when a write finds it gone; then the write is repeated."""


async def run(
    redis: Redis, script: str, names: Sequence[str], args: Sequence[Any], *, fence: Fence | None = None
) -> Any:  # noqa: ANN401  each script's own reply
    """Runs a script that begins with `FENCE`; its own ARGV begin at 3.

    Raises:
        Fenced: a newer process writes in this one's place.
        RecordGone: the record is lost and could not be restored.
    """
    fence_args = ["", ""] if fence is None else [fence.record, str(fence.incarnation)]
    for restores_left in reversed(range(MAX_RESTORES + 1)):
        try:
            return await redis.register_script(script)(keys=names, args=[*fence_args, *args])
        except ResponseError as error:
            if fence is None:
                raise
            raise_if_fenced(error, fence)
            if "GONE record" not in str(error):
                raise
            if not restores_left:
                raise RecordGone(f"the record of {fence.what} is gone from Redis, and stays gone") from error
        await fence.restore()
    raise AssertionError  # the last round returns or raises


def raise_if_fenced(error: ResponseError, fence: Fence) -> None:
    """Raises Fenced when the reply reports a newer incarnation."""
    if "FENCED by incarnation" in str(error):
        raise Fenced(
            f"{fence.what}: this process is incarnation {fence.incarnation}, and a newer one writes: {error}"
        ) from error
