"""Consumer of a work stream: entries are delivered at least once, and take effect once.

    stream ── read ──► consumer ── hop ──► next stream
    (own pending, claimed, new)  (bound, dedupe, add, ack + delete: one script)

Entries that cannot be used go to a dead-letter stream with the reason. Written for Redis 7.0 and Lua.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from services.common.errors import EntryError, StreamFull
from services.common.redis import keys
from services.common.redis.connection import OUTAGE_S, is_outage, pause_s, refusal, text
from services.common.redis.fencing import LEASE_S, Fence, run
from services.common.redis.keys import Stage
from services.common.streams import lua
from services.common.streams.stream import MAX_STREAM_LENGTH, add
from services.common.streams.types import Task

log = logging.getLogger(__name__)

_START = "0-0"
"""Cursor at the start of a walk over pending entries; Redis returns it again at the end."""

_NO_GROUP = ("NOGROUP", "UNBLOCKED")
"""Errors of Redis where there is no group, and of a blocking read (7.0) whose stream is deleted."""

DEAD_LETTERS = 200_000
"""Number of the newest letters that a stage keeps."""
DEAD_BUDGET_BYTES = 64 * 1024**2
"""Sum of the payloads that a stage's dead letters keep. A letter beyond it, or of an entry beyond the entry limit, is cut."""
PACE_S = 0.005
"""Least time between two reads of new entries: what comes meanwhile is read, handled and sent together."""
READ_BYTES = 256 * 1024**2
"""Most bytes of one reply to a read: with a higher limit of an entry fewer entries are read at once."""
DEAD_PAYLOAD_BYTES = 1024
"""Size to which the payload of a letter is cut. Such a letter cannot be put back."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One delivered entry, not yet acked."""

    id: str
    member: str
    """Its name in the dedupe sets: `train:1:17:1`."""
    payload: bytes
    deliveries: int
    """1 on first delivery."""


class Consumer:
    """One consumer of a job's work stream, under a stable name.

    Reads its own pending entries first (their replies may have been lost), then entries whose lease under another consumer has expired,
    then new ones. Work that takes longer than a third of the lease needs `renew`. An entry that another consumer has claimed meanwhile is
    lost to this one: hop, ack, renew and dead_letter then change nothing. `blocking` is a second client of the same server, used only for
    XREADGROUP; `limit_bytes` is the job's limit of an entry (`limits.entry_limit`); `fence` is that of the process that reads.
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
        limit_bytes: int,
        lease_s: float = LEASE_S,
        fence: Fence | None = None,
    ) -> None:
        self.job_id, self.stage, self.limit_bytes = job_id, stage, limit_bytes
        self._commands, self._blocking, self._fence = commands, blocking, fence
        self._stream, self._group, self._name = keys.stream(job_id, stage), group, name
        self._lease_ms = int(lease_s * 1000)
        self._held: set[str] = set()
        self._failures, self._last_reply = 0, time.monotonic()
        self._next_read = 0.0
        self._recover_from: str | None = "0"
        self._claim_from, self._next_claim = _START, 0.0

    @property
    def held(self) -> int:
        """Number of entries delivered to this consumer and not finished."""
        return len(self._held)

    async def read(self, count: int, block_s: float) -> list[Entry]:
        """Up to `count` entries, each held by this consumer until hop, ack or dead_letter; empty after `block_s` seconds.

        Fewer where so many of the largest size would exceed READ_BYTES. Also empty while Redis is unavailable; after OUTAGE_S its error
        is raised.
        """
        count = min(count, max(1, READ_BYTES // self.limit_bytes))
        for _ in range(2):
            try:
                entries = await self._next_entries(count, block_s)
            except RedisError as error:
                if isinstance(error, ResponseError) and refusal(error) is None:
                    await self._create_group(error)
                    continue
                await self._pause_after(error)
                return []
            self._failures, self._last_reply = 0, time.monotonic()
            return entries
        return []

    async def _pause_after(self, error: RedisError) -> None:
        """Pauses after a failed read. Entries may have been lost with its reply: the next read begins with the pending ones."""
        too_long = time.monotonic() - self._last_reply > OUTAGE_S
        if refusal(error) is None and (too_long or not is_outage(error)):
            raise error
        if self._failures == 0:
            log.warning("the %s of job %s cannot be read for now: %s", self.stage, self.job_id, error)
        self._failures += 1
        self._recover_from = "0"
        await asyncio.sleep(pause_s(self._failures))

    async def _next_entries(self, count: int, block_s: float) -> list[Entry]:
        while self._recover_from is not None:
            messages = await self._read_group(self._recover_from, count, None)
            self._recover_from = text(messages[-1][0]) if messages else None
            if entries := await self._hold(messages, new=False):
                return entries
        if time.monotonic() >= self._next_claim and (entries := await self._claim(count)):
            return entries
        await asyncio.sleep(max(0.0, self._next_read - time.monotonic()))
        messages = await self._read_group(">", count, block_s)
        self._next_read = time.monotonic() + PACE_S
        return await self._hold(messages, new=True)

    async def hop(self, entry: Entry, stage: Stage, payload: bytes, *, bound: int = MAX_STREAM_LENGTH) -> bool:
        """Moves the entry to the next stream, atomically; False when this consumer no longer holds it: it was moved before, or claimed.

        Raises:
            StreamFull: the next stream is full; the entry is still held and nothing was changed.
        """
        names = [self._stream, keys.stream(self.job_id, stage), keys.seen(self.job_id, stage)]
        done = await self._run(lua.HOP, names, [entry.id, entry.member, payload, bound])
        if done == -1:
            raise StreamFull(f"stream {stage} of job {self.job_id} holds {bound} entries")
        self._held.discard(entry.id)
        return bool(done)

    async def announce(self, entry: Entry, stage: Stage, payload: bytes, *, bound: int) -> None:
        """Adds the result of an entry to the next stream; the entry itself stays. Raises StreamFull."""
        await add(self._commands, self.job_id, stage, entry.member, payload, bound=bound, fence=self._fence)

    async def ack(self, *entries: Entry) -> int:
        """Acks and deletes entries, atomically; returns how many this consumer still held."""
        if not entries:
            return 0
        ids = [entry.id for entry in entries]
        done = await self._run(lua.ACK, [self._stream], ids)
        self._held.difference_update(ids)
        return int(done)

    async def dead_letter(self, entry: Entry, reason: str) -> bool:
        """Moves the entry to the dead-letter stream, with the reason; False when this consumer no longer holds it."""
        names = [self._stream, keys.dead(self.job_id, self.stage), keys.dead_bytes(self.job_id)]
        size = len(entry.payload)
        payload = entry.payload if size <= self.limit_bytes else entry.payload[:DEAD_PAYLOAD_BYTES]
        letter = [entry.id, entry.member[:200], payload, size, reason[:2000], entry.deliveries, self.stage]
        done = await self._run(lua.DEAD_LETTER, names, [*letter, DEAD_BUDGET_BYTES, DEAD_PAYLOAD_BYTES, DEAD_LETTERS])
        self._held.discard(entry.id)
        return bool(done)

    async def renew(self) -> set[str]:
        """Renews the lease of every held entry; returns the ids of those that are lost: claimed by another consumer, or gone."""
        if not self._held:
            return set()
        lost = {text(entry_id) for entry_id in await self._run(lua.RENEW, [self._stream], sorted(self._held))}
        self._held -= lost
        return lost

    async def keep_renewing(self) -> None:
        """Renews every third of the lease, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            await self.renew()

    async def _run(self, script: str, names: list[str], args: list[Any]) -> Any:  # noqa: ANN401  each script's own reply
        return await run(self._commands, script, names, [self._group, self._name, *args], fence=self._fence)

    async def _read_group(self, start: str, count: int, block_s: float | None) -> list[Any]:
        """The (id, fields) pairs of the stream."""
        block = None if block_s is None else max(1, int(block_s * 1000))
        reply: Any = await self._blocking.xreadgroup(
            self._group, self._name, {self._stream: start}, count=count, block=block
        )
        if isinstance(reply, dict):  # RESP3; RESP2 has pairs
            return [message for batch in reply.values() for message in batch[0]]
        return [message for _, batch in reply or [] for message in batch]

    async def _claim(self, count: int) -> list[Entry]:
        """Claims entries with an expired lease. One call covers only a part of the pending list; the next call continues from there."""
        reader = (self._stream, self._group, self._name)
        reply = await self._commands.xautoclaim(*reader, self._lease_ms, self._claim_from, count=count)
        self._claim_from, found = text(reply[0]), reply[1]
        if self._claim_from == _START:
            self._next_claim = time.monotonic() + self._lease_ms / 4000
        return await self._hold(found, new=False)

    async def _hold(self, messages: list[Any], *, new: bool) -> list[Entry]:
        messages = [message for message in messages if text(message[0]) not in self._held]
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
        """Delivery counts of pending entries of this consumer; `ids` in the stream's order. Held entries may lie between them."""
        if not ids:
            return {}
        pending = await self._commands.xpending_range(
            self._stream, self._group, ids[0], ids[-1], len(ids) + len(self._held), consumername=self._name
        )
        return {text(item["message_id"]): int(item["times_delivered"]) for item in pending}

    async def _create_group(self, error: ResponseError) -> None:
        """Creates the group if it is missing (a new stream, or a server that lost its data); any other error is raised again.

        The group begins at the start of the stream: all existing entries are unread (the dedupe sets absorb repeats).
        """
        if not any(code in str(error) for code in _NO_GROUP):
            raise error
        try:
            await self._commands.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except ResponseError as busy:
            if "BUSYGROUP" not in str(busy):
                raise


def require_match(entry: Entry, task: Task, job_id: str, path: str = "") -> None:
    """Raises EntryError unless the task, at `path` of the payload, is of the stream's job and the entry's name."""
    if task.job_id != job_id:
        raise EntryError(f"{path}job_id: belongs to job {task.job_id!r}, found on the stream of {job_id!r}")
    if task.member != entry.member:
        raise EntryError(f"member: the entry says {entry.member!r}, its task {task.member!r}")
