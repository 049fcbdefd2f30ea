"""Dead letters: entries that could not be used, kept with the reason until a person has looked at them.

    work stream ── bury (consumer.py) ──► dead letters of the stage ── requeue ──► the same work stream, as if it were new

The group behind a dead letter does not wait for it: the learner asks again after the group's deadline, and fails it in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from services.common.errors import LetterRefused
from services.common.jobs import lua
from services.common.jobs.record import JobState
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.redis.keys import Stage
from services.common.streams.stream import MAX_STREAM_LENGTH

ENDED = frozenset(state for state in JobState if state.ended)

_REQUEUE = (
    "#!lua"
    + lua.IS_IN
    + f"""
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
)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One entry that could not be used."""

    stage: Stage
    id: str
    """Of the letter, not of the entry that it was."""
    member: str
    """What the dedupe sets knew the entry by: `train:1:17:1`."""
    reason: str
    deliveries: int
    """How often the entry was delivered."""
    consumer: str
    """Who gave it up."""
    first_seen: float
    """Unix seconds at which it was added to its stream."""
    last_seen: float
    """Unix seconds at which it was given up."""
    size_bytes: int
    """Of the entry's payload."""
    payload: bytes
    """Whole, or the beginning of a payload for which there was no room."""

    @property
    def whole(self) -> bool:
        """Whether it could be put back."""
        return len(self.payload) == self.size_bytes


async def count(redis: Redis, job_id: str) -> dict[Stage, int]:
    """Dead letters of each stage."""
    return {stage: int(await redis.xlen(keys.dead(job_id, stage))) for stage in Stage}


async def read(redis: Redis, job_id: str, stage: Stage, *, before: str = "+", limit: int = 100) -> list[DeadLetter]:
    """A stage's letters, newest first, from before a letter's id on."""
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
    said = text(
        await redis.register_script(_REQUEUE)(keys=names, args=[letter_id, stage, bound, ",".join(sorted(ENDED))])
    )
    if said != "ok":
        reasons = {
            "missing": "there is no such dead letter any more",
            "cut": "only the beginning of its payload was kept, for want of room: its group is asked for again by the learner",
            "full": f"the {stage} stream is full",
        }
        raise LetterRefused(reasons.get(said, f"job {job_id} is {said}: nobody would take the entry"))


def _letter(stage: Stage, letter_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    def word(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    payload = fields.get(b"d", b"")
    return DeadLetter(
        stage=stage,
        id=letter_id,
        member=word(b"member"),
        reason=word(b"reason"),
        deliveries=int(fields.get(b"deliveries", 1)),
        consumer=word(b"consumer"),
        first_seen=float(fields.get(b"first_seen", 0.0)),
        last_seen=float(fields.get(b"last_seen", 0.0)),
        size_bytes=int(fields.get(b"size", len(payload))),
        payload=payload,
    )
