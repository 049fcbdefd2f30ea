"""Hops per second: the same entries moved by the services' consumers, and by the bare script on plain connections.

    python -m benchmarks.simulated.hops REDIS_URL CONNECTIONS ENTRIES BYTES

One process. Each connection has one hop at a time, but for "together": there it has as many as a server with GROUPS_UNDER_WAY groups,
whose hops go in batches. Prints {"bare": …, "ours": …, "together": …} as JSON: seconds of the whole, and of each call.
`hop_rates` serves the simulation of many servers, `bare_hops_per_s` the limits of the machine beside the peers.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from benchmarks.large_entries import own_redis
from services.common.redis import keys
from services.common.redis.connection import connect
from services.common.redis.keys import Stage
from services.common.service.heartbeat import take_incarnation
from services.common.streams import lua
from services.common.streams.consumer import Consumer, Entry
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.stream import MAX_STREAM_LENGTH

Hop = Callable[..., Awaitable[Any]]
ROOT = Path(__file__).resolve().parents[2]
_ENTRIES = 4096
_ENTRY_BYTES = 4096
"""About a judged group of eight short rollouts."""
GROUPS_UNDER_WAY = 8
"""Hops that a connection has at once where they go together."""


@dataclass(frozen=True, slots=True)
class HopRates:
    """Hops per second, and the 99th percentile of a call, seconds."""

    bare_one: float
    """On one connection."""
    bare: float
    """On as many as there are servers; so `ours`."""
    ours: float
    together: float
    """Ours, with GROUPS_UNDER_WAY hops at once on each connection."""
    bare_p99_s: float
    ours_p99_s: float


def hop_rates(url: str, connections: int, size: int) -> HopRates:
    """Measures on one connection and on as many as there are servers; entries of `size` bytes."""
    one, many = _measured(url, 1, size), _measured(url, connections, size)
    p99 = {name: sorted(found["calls"])[int(len(found["calls"]) * 0.99)] for name, found in many.items()}
    rates = {name: _rate(many[name]) for name in _WAYS}
    return HopRates(_rate(one["bare"]), **rates, bare_p99_s=p99["bare"], ours_p99_s=p99["ours"])


def bare_hops_per_s() -> float:
    """Bare hops of one connection, one after the other, on an embedded server of their own with its append-only file."""
    with tempfile.TemporaryDirectory(prefix="hops-") as folder, own_redis(Path(folder) / "redis") as server:
        return _rate(_measured(server.url, 1, _ENTRY_BYTES)["bare"])


def _measured(url: str, connections: int, size: int) -> Any:  # noqa: ANN401  JSON
    """Output of `main` in a new process, which nothing else disturbs."""
    words = [url, str(connections), str(_ENTRIES), str(size)]
    done = subprocess.run([sys.executable, "-m", __spec__.name, *words], stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def _rate(found: dict[str, Any]) -> float:
    return float(len(found["calls"]) / found["seconds"])


_GROUP = "hops"


async def fill(redis: Redis, job_id: str, entries: int) -> None:
    """Fills a new tasks stream; the next one is empty."""
    stream = keys.stream(job_id, Stage.TASKS)
    async with redis.pipeline(transaction=False) as pipe:
        pipe.delete(*keys.work(job_id))
        pipe.xgroup_create(stream, _GROUP, id="0", mkstream=True)
        for number in range(entries):
            pipe.xadd(stream, {"member": f"train:1:{number}:1", "d": b"task"})
        await pipe.execute()


async def bare_hops(url: str, job_id: str, connections: int, share: int, payload: bytes) -> list[list[Hop]]:
    """Each connection's hops: EVALSHA on a client as redis-py makes it."""
    names = [keys.stream(job_id, Stage.TASKS), keys.stream(job_id, Stage.ROLLOUTS), keys.seen(job_id, Stage.ROLLOUTS)]
    made: list[list[Hop]] = []
    for number in range(connections):
        client = Redis.from_url(url, single_connection_client=True)
        hop: Hop = partial(client.evalsha, await client.script_load(lua.HOP), 3, *names, "", "", _GROUP, f"c{number}")
        read: Any = await client.xreadgroup(_GROUP, f"c{number}", {names[0]: ">"}, count=share)
        members = [(entry_id, fields[b"member"]) for entry_id, fields in read[0][1]]
        made.append([partial(hop, *entry, payload, MAX_STREAM_LENGTH) for entry in members])
    return made


async def our_hops(url: str, job_id: str, connections: int, share: int, payload: bytes) -> list[list[Hop]]:
    """Each consumer's hops, fenced as a rollout server's."""
    made: list[list[Hop]] = []
    for number in range(connections):
        client, name = connect(url), f"c{number}"
        consumer = Consumer(
            client, client, job_id, Stage.TASKS, group=_GROUP, name=name, limit_bytes=MIN_ENTRY_BYTES,
            fence=await take_incarnation(client, name),
        )  # fmt: skip
        held: list[Entry] = []
        while len(held) < share:
            held += await consumer.read(share - len(held), 1.0)
        made.append([partial(consumer.hop, entry, Stage.ROLLOUTS, payload) for entry in held])
    return made


async def timed(hops: list[list[Hop]]) -> dict[str, Any]:
    """Runs every connection's hops, all connections at once."""
    calls: list[float] = []

    async def run(own: list[Hop]) -> None:
        for hop in own:
            began = time.perf_counter()
            await hop()
            calls.append(time.perf_counter() - began)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(run(own) for own in hops))
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "calls": calls}


_WAYS = {"bare": (bare_hops, 1), "ours": (our_hops, 1), "together": (our_hops, GROUPS_UNDER_WAY)}
"""What is measured → how its hops are made, and how many a connection has at once."""


async def main() -> None:
    """All ways, alternating; the better of three rounds each counts."""
    url, connections, entries, size = sys.argv[1], *(int(word) for word in sys.argv[2:])
    redis, payload = connect(url), bytes(size)
    share = entries // connections
    made: list[list[list[Hop]]] = []  # keeps all connections open
    best: dict[str, Any] = {}
    for job_id in ("hops-a", "hops-b", "hops-c"):
        for name, (make, at_once) in _WAYS.items():
            await fill(redis, job_id, share * connections)
            made.append(await make(url, job_id, connections, share, payload))
            found = await timed([own[start::at_once] for own in made[-1] for start in range(at_once)])
            if name not in best or found["seconds"] < best[name]["seconds"]:
                best[name] = found
        await redis.delete(*keys.work(job_id))
    print(json.dumps(best), flush=True)
    os._exit(0)  # without closing thousands of connections one by one


if __name__ == "__main__":
    asyncio.run(main())
