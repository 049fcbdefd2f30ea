"""Entries that cannot be used, mixed one to one with good ones on every work stream: all are put aside with a reason, and work goes on."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import redis as sync_redis

from services.common.redis import keys
from services.common.redis.keys import Stage
from services.common.streams.consumer import DEAD_BUDGET_BYTES
from services.common.streams.limits import MIN_ENTRY_BYTES
from tests.chaos.campaign import Campaign, campaign
from tests.chaos.faults import Options
from tests.chaos.result import Result
from tests.chaos.scripted import engine
from tests.chaos.stack import Stack

TOKEN_S = 0.1
"""Time that a token takes: measured is a job that waits for its engine, as jobs do, not for the cores that it shares with this harness."""
MEASURE_S = 10.0
SETTLE_S = 60.0
MAX_GROWTH_BYTES = 64 * 1024**2
"""Of each service's memory, over the whole run."""
LETTERS_BYTES = len(Stage) * DEAD_BUDGET_BYTES
LETTER_BYTES = 512
"""Redis may grow by the payloads that dead letters may keep, and by this for each, its reason and its names."""
MIN_THROUGHPUT = 0.9
BATCH_S = 0.1

Mutation = Callable[[random.Random, bytes], bytes]


def _flip(rng: random.Random, payload: bytes) -> bytes:
    spoiled = bytearray(payload)
    for _ in range(rng.randrange(1, 9)):
        spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
    return bytes(spoiled)


MUTATIONS: dict[str, Mutation] = {
    "flipped": _flip,
    "cut": lambda rng, payload: payload[: rng.randrange(len(payload))],
    "grown": lambda rng, payload: payload + rng.randbytes(rng.randrange(1, 64)),
    "noise": lambda rng, _: rng.randbytes(rng.randrange(0, 2048)),
    "empty": lambda _rng, _payload: b"",
    "other type": lambda rng, _: rng.choice((b"\xc0", b"\x2a", b"\x93\x01\x02\x03", b"\xa3abc", b"\x80")),
    "nested": lambda _rng, _payload: b"\x91" * 2000 + b"\xc0",
    "claims 4 GiB": lambda _rng, _payload: b"\xc6\xff\xff\xff\xff" + b"x" * 32,
    "renamed field": lambda _rng, payload: payload.replace(b"job_id", b"job_if"),
    "foreign job": lambda _rng, payload: payload.replace(b"chaos-", b"chaoz-"),
}
OVERSIZED = "oversized"
OVERSIZED_EVERY = 2000
"""One entry in so many is larger than any may be; more would only measure the loopback interface."""


def garbage(options: Options) -> Result:
    """`count` bad entries, spread over the three streams; each stream gets as many as good ones come by."""
    pace = {engine.SECONDS: str(TOKEN_S)}
    with (
        campaign(options.home, "malformed entries", options.seed, environment=pace) as running,
        sync_redis.Redis.from_url(running.stack.state.redis_url) as client,
    ):
        letters, alone, processes = Letters(client, running.job_id), _steps_per_s(running), Processes(running.stack)
        beside = _pour(running, client, letters, options)
        running.stack.wait(lambda: letters.read() >= options.count, f"{options.count} dead letters", SETTLE_S)
        letters.read()
        running.result.violations += [*letters.wrong, *processes.troubles(options.count)]
        if letters.count != options.count:
            running.result.violations.append(f"{options.count} bad entries, {letters.count} dead letters")
        alone = (alone + _steps_per_s(running)) / 2  # before and after: a machine is not the same all the time
        if beside < MIN_THROUGHPUT * alone:
            running.result.violations.append(f"{beside:.2f} steps/s beside bad entries, {alone:.2f} without")
        running.result.extra = {
            "reasons": dict(letters.reasons.most_common(5)),
            "grown by MiB": processes.told(),
            "steps_per_s": round(alone, 2), "steps_per_s_beside_garbage": round(beside, 2),
        }  # fmt: skip
        running.trial(lambda: None)
        running.result.count = options.count
        running.finish()
    return running.result


def _pour(running: Campaign, client: sync_redis.Redis, letters: Letters, options: Options) -> float:
    """Adds the bad entries; the job's steps per second meanwhile."""
    rng, kinds, job_id = random.Random(options.seed), sorted(MUTATIONS), running.job_id
    samples, sent, seen = _samples(client, job_id), 0, _good(client, job_id)
    began, first = time.monotonic(), running.stack.step(job_id) or 0
    while sent < options.count:
        time.sleep(BATCH_S)
        good = _good(client, job_id)
        with client.pipeline(transaction=False) as pipe:
            for stage in Stage:
                for _ in range(min(good[stage] - seen[stage], options.count - sent)):
                    kind = OVERSIZED if sent % OVERSIZED_EVERY == OVERSIZED_EVERY - 1 else rng.choice(kinds)
                    payload = _spoiled(rng, kind, samples[stage])
                    pipe.xadd(keys.stream(job_id, stage), {"member": f"garbage:{sent}", "d": payload})
                    good[stage] += 1
                    sent += 1
            pipe.execute()
        seen = good
        letters.read()
    return ((running.stack.step(job_id) or 0) - first) / (time.monotonic() - began)


def _samples(client: sync_redis.Redis, job_id: str) -> dict[Stage, list[bytes]]:
    """Some good entries of each stream."""
    samples: dict[Stage, list[bytes]] = {stage: [] for stage in Stage}
    deadline = time.monotonic() + 60.0
    while any(len(found) < 20 for found in samples.values()) and time.monotonic() < deadline:
        for stage, found in samples.items():
            entries: Any = client.xrange(keys.stream(job_id, stage), count=5)
            found += [bytes(fields[b"d"]) for _, fields in entries]
    return samples


def _spoiled(rng: random.Random, kind: str, samples: list[bytes]) -> bytes:
    if kind == OVERSIZED:
        return bytes(MIN_ENTRY_BYTES + 1)
    return MUTATIONS[kind](rng, rng.choice(samples))


def _good(client: sync_redis.Redis, job_id: str) -> dict[Stage, int]:
    """Entries ever added to each stream."""
    return {stage: int(client.xinfo_stream(keys.stream(job_id, stage))["entries-added"]) for stage in Stage}


class Letters:
    """The job's dead letters, each read once: a stage keeps only so many of them."""

    def __init__(self, client: sync_redis.Redis, job_id: str) -> None:
        """Has read none."""
        self.count = 0
        self.reasons: Counter[str] = Counter()
        """By the reason's first words."""
        self.wrong: list[str] = []
        self._client = client
        self._read: dict[str, bytes] = {keys.dead(job_id, stage): b"0-0" for stage in Stage}

    def read(self) -> int:
        """Reads what is new; how many there were in all."""
        positions: Any = dict(self._read)
        reply: Any = self._client.xread(positions, count=5000)
        batches = reply.items() if isinstance(reply, dict) else reply or []
        for name, entries in batches:
            for entry_id, fields in entries[0] if isinstance(reply, dict) else entries:
                self._take(fields)
                self._read[bytes(name).decode()] = entry_id
        return self.count

    def _take(self, fields: Mapping[bytes, bytes]) -> None:
        self.count += 1
        reason, member = fields[b"reason"].decode(), fields[b"member"].decode()
        self.reasons[" ".join(reason.split()[:3])] += 1
        if not reason.strip():
            self.wrong.append(f"the dead letter of {member} has no reason")
        if not member.startswith("garbage:"):
            self.wrong.append(f"a good entry, {member}, became a dead letter: {reason}")


def _steps_per_s(running: Campaign) -> float:
    first, began = running.stack.step(running.job_id) or 0, time.monotonic()
    time.sleep(MEASURE_S)
    return ((running.stack.step(running.job_id) or 0) - first) / (time.monotonic() - began)


class Processes:
    """The stack's processes as they are now, and what becomes of them."""

    def __init__(self, stack: Stack) -> None:
        """Notes their memory, in bytes."""
        self._stack = stack
        self._memory = {process: process.memory_info().rss for process in stack.processes()}
        self._restarts, self._rank = self._restarted(), stack.find("rank")

    def troubles(self, letters: int) -> Iterator[str]:
        """Which of them died, and which have grown by more than they may; Redis holds so many letters."""
        if self._restarted() != self._restarts or self._stack.find("rank") != self._rank:
            yield "a process died of a bad entry"
        redis = self._stack.find("redis")
        for process, growth in self.growth().items():
            if growth > (MAX_GROWTH_BYTES if process != redis else LETTERS_BYTES + letters * LETTER_BYTES):
                yield f"process {process.pid} ({process.name()}) grew by {growth >> 20} MiB"

    def growth(self) -> dict[psutil.Process, int]:
        """Bytes since; of those that are still there, which a verifier's process, that is recycled, may not be."""
        found = {}
        for process, before in self._memory.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[process] = process.memory_info().rss - before
        return found

    def told(self) -> dict[str, int]:
        """The growth of Redis and of the service that has grown most, MiB."""
        growth, redis = self.growth(), self._stack.find("redis")
        services = [size for process, size in growth.items() if process != redis]
        return {"redis": growth.get(redis, 0) >> 20 if redis else 0, "service": max(services) >> 20}

    def _restarted(self) -> int:
        return sum(state.restarts for state in self._stack.state.processes.values())
