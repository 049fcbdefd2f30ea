"""Dead letters: entries that could not be used, kept with the reason until a person has seen them.

    work stream ── bury (consumer.py) ──► dead letters of the stage ── requeue ──► the same work stream, as if it were new

The group of a dead letter does not wait for it: after its deadline the learner issues it again, and at last fails it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from services.common.errors import LetterRefused
from services.common.jobs import lua
from services.common.jobs.record import ENDED
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.redis.keys import Stage
from services.common.streams.stream import MAX_STREAM_LENGTH

_REQUEUE = f"""#!lua{lua.IS_IN}
-- KEYS: dead, stream, seen, dead bytes, record, token   ARGV: letter id, stage, bound, states of a job that has ended (comma-separated)
local state = redis.call('HGET', KEYS[5], 'state')
if redis.call('EXISTS', KEYS[6]) == 1 then return 'ok' end
if not state then return 'missing' end
if is_in(state, ARGV[4]) then return state end
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not found then return 'missing' end
local letter = {{}}
for i = 1, #found[2], 2 do letter[found[2][i]] = found[2][i + 1] end
if #letter['d'] < tonumber(letter['size']) then return 'cut' end
if redis.call('XLEN', KEYS[2]) >= tonumber(ARGV[3]) then return 'full' end
redis.call('XADD', KEYS[2], '*', 'member', letter['member'], 'd', letter['d'])
redis.call('SADD', KEYS[3], letter['member'])
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('HINCRBY', KEYS[4], ARGV[2], -#letter['d'])
redis.call('SET', KEYS[6], '1', 'EX', {lua.ONCE_KEPT_S})
return 'ok'
"""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One entry that could not be used."""

    stage: Stage
    id: str
    """Of the letter, not of the entry that it was."""
    member: str
    """Name of the entry in the dedupe sets: `train:1:17:1`."""
    reason: str
    deliveries: int
    """Number of times that the entry was delivered."""
    consumer: str
    """Consumer that gave it up."""
    first_seen: float
    """Unix seconds at which it was added to its stream."""
    last_seen: float
    """Unix seconds at which it was given up."""
    size_bytes: int
    """Of the entry's payload."""
    payload: bytes
    """Whole, or the beginning of a payload that exceeded the budget."""

    @property
    def whole(self) -> bool:
        """Whether the payload is whole: only then can the entry be put back."""
        return len(self.payload) == self.size_bytes


async def count(redis: Redis, job_id: str) -> dict[Stage, int]:
    """Dead letters of each stage."""
    return {stage: int(await redis.xlen(keys.dead(job_id, stage))) for stage in Stage}


async def read(redis: Redis, job_id: str, stage: Stage, *, before: str = "+", limit: int = 100) -> list[DeadLetter]:
    """A stage's letters, newest first: those older than the letter `before`."""
    newest = "+" if before == "+" else f"({before}"
    reply: Any = await redis.xrevrange(keys.dead(job_id, stage), max=newest, count=limit)
    return [_letter(stage, text(letter_id), fields) for letter_id, fields in reply or []]


async def find(redis: Redis, job_id: str, stage: Stage, letter_id: str) -> DeadLetter | None:
    """One letter, or None."""
    reply: Any = await redis.xrange(keys.dead(job_id, stage), min=letter_id, max=letter_id)
    return _letter(stage, letter_id, reply[0][1]) if reply else None


async def requeue(redis: Redis, job_id: str, stage: Stage, letter_id: str, *, bound: int = MAX_STREAM_LENGTH) -> None:
    """Puts the entry back on its stream, atomically, with no delivery counted; the letter is gone.

    Raises:
        LetterRefused: there is no such letter, its job has ended, its payload was cut, or the stream is full.
    """
    names = [
        keys.dead(job_id, stage), keys.stream(job_id, stage), keys.seen(job_id, stage), keys.dead_bytes(job_id), keys.record(job_id),
        keys.once(job_id, lua.new_token()),
    ]  # fmt: skip
    script = redis.register_script(_REQUEUE)
    reply = text(await script(keys=names, args=[letter_id, stage, bound, ",".join(sorted(ENDED))]))
    if reply != "ok":
        reasons = {
            "missing": "there is no such dead letter any more",
            "cut": "only the beginning of its payload was kept, for want of room: its group is asked for again by the learner",
            "full": f"the {stage} stream is full",
        }
        raise LetterRefused(reasons.get(reply, f"job {job_id} is {reply}: nobody would take the entry"))


def _letter(stage: Stage, letter_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    def string(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    payload = fields.get(b"d", b"")
    return DeadLetter(
        stage=stage,
        id=letter_id,
        member=string(b"member"),
        reason=string(b"reason"),
        deliveries=int(fields.get(b"deliveries", 1)),
        consumer=string(b"consumer"),
        first_seen=float(fields.get(b"first_seen", 0.0)),
        last_seen=float(fields.get(b"last_seen", 0.0)),
        size_bytes=int(fields.get(b"size", len(payload))),
        payload=payload,
    )
