"""Redis Streams as a work queue: at-least-once delivery, and an effect that happens once.

    producer ── add ──►  stream  ── read ──►  consumer ── hop ──► next stream
               (bound, dedupe)     (own pending, claimed, new)  (bound, dedupe, add, ack + delete: one script)

A stream is never trimmed: a full one refuses, and the producer waits. Entries that cannot be used go to a dead-letter
stream with the reason. Written for Redis 7.0 and Lua.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.common import keys
from services.common.connection import text
from services.common.errors import StreamFull
from services.common.keys import Stage

_ADD = """#!lua
-- KEYS: stream, seen   ARGV: member, payload, bound
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 0 end
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[3]) then return -1 end
redis.call('XADD', KEYS[1], '*', 'member', ARGV[1], 'd', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""

_HOP = """#!lua
-- KEYS: source, destination, seen   ARGV: group, entry id, member, payload, bound
local new = redis.call('SISMEMBER', KEYS[3], ARGV[3]) == 0
if new and redis.call('XLEN', KEYS[2]) >= tonumber(ARGV[5]) then return -1 end
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end  -- moved before, or the job is retired
redis.call('XDEL', KEYS[1], ARGV[2])
if new then
  redis.call('XADD', KEYS[2], '*', 'member', ARGV[3], 'd', ARGV[4])
  redis.call('SADD', KEYS[3], ARGV[3])
end
return new and 1 or 0
"""

_BURY = """#!lua
-- KEYS: source, dead   ARGV: group, entry id, member, payload, reason, deliveries, unix time
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '10000', '*',
  'member', ARGV[3], 'd', ARGV[4], 'reason', ARGV[5], 'deliveries', ARGV[6], 'at', ARGV[7])
redis.call('XDEL', KEYS[1], ARGV[2])
return 1
"""

MAX_STREAM_LENGTH = 100_000
"""Default bound of a work stream, entries. The learner's slots keep streams far shorter."""

_START = "0-0"
"""Where a walk over pending entries begins, and what Redis answers at its end."""

_GROUP_GONE = ("NOGROUP", "UNBLOCKED")
"""What Redis answers where there is no group, and in a blocking read (7.0) when its stream is deleted."""

DEAD_PAYLOAD_BYTES = 64 * 1024
"""Bytes of an entry that its dead letter keeps."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One delivered entry, not yet acked."""

    id: str
    member: str
    """What the dedupe sets know it by: `train:17:1`."""
    payload: bytes
    deliveries: int
    """1 on first delivery."""


async def add(
    redis: Redis, job_id: str, stage: Stage, member: str, payload: bytes, *, bound: int = MAX_STREAM_LENGTH
) -> bool:
    """Adds an entry once, however often it is called; False when it had been added before.

    Raises:
        StreamFull: the stream holds `bound` entries; nothing was changed.
    """
    done = await redis.register_script(_ADD)(
        keys=[keys.stream(job_id, stage), keys.seen(job_id, stage)], args=[member, payload, bound]
    )
    if done == -1:
        raise StreamFull(f"stream {stage} of job {job_id} holds {bound} entries")
    return bool(done)


class Consumer:
    """One consumer of a job's work stream, under a stable name.

    Reads its own pending entries first (their replies may have been lost), then what other consumers left longer than the lease,
    then new ones. Whoever works longer than a third of the lease calls `renew`.
    """

    def __init__(
        self,
        commands: Redis,
        blocking: Redis,
        job_id: str,
        stage: Stage,
        *,
        group: str,
        name: str,
        lease_s: float = 60.0,
    ) -> None:
        """Two clients of the same server: `blocking` only ever waits in XREADGROUP."""
        self.job_id = job_id
        self.stage = stage
        self._commands = commands
        self._blocking = blocking
        self._stream = keys.stream(job_id, stage)
        self._group = group
        self._name = name
        self._lease_ms = int(lease_s * 1000)
        self._held: set[str] = set()
        self._recover_from: str | None = "0"
        self._claim_from = _START
        self._next_claim = 0.0

    @property
    def held(self) -> int:
        """Entries delivered to this consumer and not yet let go."""
        return len(self._held)

    async def read(self, count: int, block_s: float) -> list[Entry]:
        """Up to `count` entries, each held by this consumer until hop, ack or dead_letter; empty after `block_s` seconds."""
        for _ in range(2):
            try:
                return await self._next_entries(count, block_s)
            except ResponseError as error:
                await self._heal(error)
        return []

    async def _next_entries(self, count: int, block_s: float) -> list[Entry]:
        if self._recover_from is not None:
            entries = await self._read_group(self._recover_from, count, None)
            self._recover_from = entries[-1].id if entries else None
            if entries:
                return entries
        if time.monotonic() >= self._next_claim:
            entries = await self._claim(count)
            if entries:
                return entries
        return await self._read_group(">", count, block_s)

    async def hop(self, entry: Entry, stage: Stage, payload: bytes, *, bound: int = MAX_STREAM_LENGTH) -> bool:
        """Moves the entry on to the next stream, atomically; False when it had been moved before.

        Raises:
            StreamFull: the next stream is full; the entry is still held and nothing was changed.
        """
        done = await self._commands.register_script(_HOP)(
            keys=[self._stream, keys.stream(self.job_id, stage), keys.seen(self.job_id, stage)],
            args=[self._group, entry.id, entry.member, payload, bound],
        )
        if done == -1:
            raise StreamFull(f"stream {stage} of job {self.job_id} holds {bound} entries")
        self._held.discard(entry.id)
        return bool(done)

    async def ack(self, *entries: Entry) -> None:
        """Lets entries go for good, all at once."""
        if not entries:
            return
        ids = [entry.id for entry in entries]
        async with self._commands.pipeline(transaction=True) as pipe:
            pipe.xack(self._stream, self._group, *ids)
            pipe.xdel(self._stream, *ids)
            await pipe.execute()
        self._held.difference_update(ids)

    async def dead_letter(self, entry: Entry, reason: str) -> None:
        """Moves the entry to the dead-letter stream, with the reason."""
        await self._commands.register_script(_BURY)(
            keys=[self._stream, keys.dead(self.job_id, self.stage)],
            args=[
                self._group,
                entry.id,
                entry.member,
                entry.payload[:DEAD_PAYLOAD_BYTES],
                reason[:2000],
                entry.deliveries,
                int(time.time()),
            ],
        )
        self._held.discard(entry.id)

    async def renew(self) -> None:
        """Renews the lease of every entry held."""
        if not self._held:
            return
        try:
            await self._commands.xclaim(self._stream, self._group, self._name, 0, list(self._held), idle=0, justid=True)
        except ResponseError as error:
            await self._heal(error)

    async def _read_group(self, start: str, count: int, block_s: float | None) -> list[Entry]:
        block = None if block_s is None else max(1, int(block_s * 1000))
        reply = await self._blocking.xreadgroup(
            self._group, self._name, {self._stream: start}, count=count, block=block
        )
        messages = _messages(reply)
        return await self._hold(
            [message for message in messages if text(message[0]) not in self._held], new=start == ">"
        )

    async def _claim(self, count: int) -> list[Entry]:
        """Entries left for longer than the lease. One call looks at a part of the pending list only; the next call goes on from there."""
        reply = await self._commands.xautoclaim(
            self._stream, self._group, self._name, self._lease_ms, self._claim_from, count=count
        )
        cursor, found = reply[:2]
        self._claim_from = text(cursor)
        if self._claim_from == _START:
            self._next_claim = time.monotonic() + self._lease_ms / 4000
        messages = [message for message in found if text(message[0]) not in self._held]
        return await self._hold(messages, new=False)

    async def _hold(self, messages: list[Any], *, new: bool) -> list[Entry]:
        ids = [text(message[0]) for message in messages]
        deliveries = dict.fromkeys(ids, 1) if new else await self._delivery_counts(ids)
        entries = []
        for entry_id, (_, fields) in zip(ids, messages, strict=True):
            body = fields or {}
            member = bytes(body.get(b"member", b"")).decode(errors="replace")
            entries.append(Entry(entry_id, member, bytes(body.get(b"d", b"")), deliveries.get(entry_id, 1)))
            self._held.add(entry_id)
        return entries

    async def _delivery_counts(self, ids: list[str]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for entry_id in ids:
            pending = await self._commands.xpending_range(self._stream, self._group, entry_id, entry_id, 1)
            counts |= {text(item["message_id"]): int(item["times_delivered"]) for item in pending}
        return counts

    async def _heal(self, error: ResponseError) -> None:
        """Creates the group where it is missing (a new stream, or a server that lost its data); any other error is raised again.

        It begins at the stream's beginning: what is there already counts as unread (the dedupe sets absorb repeats).
        """
        if not any(sign in str(error) for sign in _GROUP_GONE):
            raise error
        try:
            await self._commands.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except ResponseError as busy:
            if "BUSYGROUP" not in str(busy):
                raise


def _messages(reply: Any) -> list[Any]:  # noqa: ANN401  the shape differs by protocol version
    """The (id, fields) pairs of an XREADGROUP reply over one stream."""
    if isinstance(reply, dict):
        return [message for batch in reply.values() for message in batch[0]]
    return [message for _, batch in reply or [] for message in batch]


async def depths(redis: Redis, job_id: str) -> dict[Stage, int]:
    """Entries in each work stream, unread and unacked together."""
    return {stage: await redis.xlen(keys.stream(job_id, stage)) for stage in Stage}
