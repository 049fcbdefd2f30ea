"""Bare hop of Redis: an entry is taken off one stream and added to the next, atomically, and no more than that."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from services.cli.stack.redis import EmbeddedRedis

ENTRIES = 5000
PAYLOAD_BYTES = 4096
"""About a judged group of eight short rollouts."""
START_LIMIT_S = 20.0

SCRIPT = """
redis.call('XADD', KEYS[2], '*', 'd', ARGV[3])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
return redis.call('XDEL', KEYS[1], ARGV[2])
"""


def bare_hops_per_s() -> float:
    """Hops of one client, one after the other, on the embedded server with its append-only file."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder) / "redis", spare=Path(folder))
        with subprocess.Popen(server.argv, stdout=subprocess.DEVNULL) as process:
            try:
                _wait(server, process.pid)
                with redis.Redis.from_url(server.url) as client:
                    return _rate(client)
            finally:
                process.kill()


def _wait(server: EmbeddedRedis, pid: int) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not server.answers(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Redis did not start within {START_LIMIT_S:.0f} s")
        time.sleep(0.05)


def _rate(client: redis.Redis) -> float:
    payload = b"x" * PAYLOAD_BYTES
    client.xgroup_create("source", "group", "0", mkstream=True)
    for _ in range(ENTRIES):
        client.xadd("source", {"d": payload})
    entries: Any = client.xreadgroup("group", "consumer", {"source": ">"}, count=ENTRIES)
    identities = [identity for identity, _ in entries[0][1]]
    hop = client.register_script(SCRIPT)
    began = time.perf_counter()
    for identity in identities:
        hop(keys=["source", "target"], args=["group", identity, payload])
    return len(identities) / (time.perf_counter() - began)
