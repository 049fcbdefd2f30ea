"""What a request to the gateway costs: alone, beside open event streams, and with many ended jobs in the list.

    python benchmarks/gateway_load.py [--streams 500] [--jobs 10000] [--requests 1000]

A gateway and a Redis of their own, on loopback; one client that asks over one kept connection. Beside the milliseconds stands the ratio
to a bare uvicorn and Starlette route that answers as many bytes, measured in the same run with the same client: what the machine does
besides cancels out, as far as it lasts. Each stream waits for events of a queued job of its own, the dearest case; the list is of jobs
that have ended.
"""

from __future__ import annotations

import argparse
import http.client
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis as sync_redis

from services.cli.stack.children import free_port, start_child
from services.cli.stack.redis import EmbeddedRedis
from services.common.redis import keys
from services.common.spec.job import JobSpec

START_S = 60.0
WARM_UP = 50
STREAM_S = 60.0
"""Longest time for one event stream to begin."""
FIRST_TOKEN = "gateway-load-0123456789abcdef0123456789"  # noqa: S105  of a gateway that lives as long as this run
SPEC: dict[str, Any] = {
    "name": "load", "model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}},
}  # fmt: skip

BARE = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
body = b"x" * int(sys.argv[2])
async def answer(request): return Response(body, media_type="application/json")
app = Starlette(routes=[Route("/", answer)])
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False, loop="asyncio")
"""


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of many requests, sorted."""

    sorted_ms: tuple[float, ...]

    def at(self, share: float) -> float:
        """The time within which so large a share of them was answered."""
        return self.sorted_ms[min(len(self.sorted_ms) - 1, int(share * len(self.sorted_ms)))]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    times: Times
    bare: Times


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Latency of the gateway.")
    parser.add_argument("--streams", type=int, default=500, help="event streams to hold open")
    parser.add_argument("--jobs", type=int, default=10_000, help="ended jobs to list")
    parser.add_argument("--requests", type=int, default=1000, help="of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as (port, redis_url):
        rows, opened, opening_s = measure(port, redis_url, options.streams, options.jobs, options.requests)
    report(rows)
    print(f"{opened} streams opened in {opening_s:.1f} s; load average {os.getloadavg()[0]:.2f}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")


def measure(port: int, redis_url: str, streams: int, jobs: int, requests: int) -> tuple[list[Row], int, float]:
    """The rows, the streams that were opened, and the seconds that took."""
    rows = []
    waiting = [f"/jobs/{job_id}" for job_id in make_jobs(redis_url, "queued", max(1, streams))]
    job = waiting[0]
    rows.append(row("GET /jobs/{id}", port, job, requests))
    began = time.monotonic()
    open_streams = [stream(port, f"{path}/events") for path in waiting[:streams]]
    opening_s = time.monotonic() - began
    rows.append(row(f"GET /jobs/{{id}}, {streams} streams", port, job, requests))
    for opened in open_streams:
        opened.close()
    make_jobs(redis_url, "succeeded", jobs)
    rows.append(row(f"GET /jobs, {jobs:,} ended jobs", port, "/jobs", requests // 4))
    rows.append(row(f"GET /metrics, {jobs:,} ended jobs", port, "/metrics", requests // 4))
    return rows, len(open_streams), opening_s


def row(what: str, port: int, path: str, requests: int) -> Row:
    """Half of the bare requests come before, and half after."""
    size = len(ask(port, path, 1)[1])
    with bare(size) as bare_port:
        before = ask(bare_port, "/", requests // 2)[0]
        times = ask(port, path, requests)[0]
        after = ask(bare_port, "/", requests // 2)[0]
    return Row(what, Times(tuple(sorted(times))), Times(tuple(sorted(before + after))))


def ask(port: int, path: str, requests: int) -> tuple[list[float], bytes]:
    """Milliseconds of each request over one kept connection, and the last body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {FIRST_TOKEN}"}
    times, body = [], b""
    for number in range(requests + WARM_UP):
        began = time.perf_counter()
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        if number >= WARM_UP:
            times.append((time.perf_counter() - began) * 1000)
        if answer.status != http.client.OK:
            sys.exit(f"GET {path}: {answer.status} {body[:300].decode(errors='replace')}")
    connection.close()
    return times, body


def stream(port: int, path: str) -> socket.socket:
    """An event stream that has begun."""
    opened = socket.create_connection(("127.0.0.1", port), timeout=STREAM_S)
    opened.sendall(
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {FIRST_TOKEN}\r\n\r\n".encode()
    )
    begun = opened.recv(65536)
    if b" 200 " not in begun.partition(b"\r\n")[0]:
        sys.exit(f"GET {path}: {begun[:500].decode(errors='replace')}")
    return opened


def make_jobs(redis_url: str, state: str, count: int) -> list[str]:
    """Ids of new jobs, with what such a job's record holds, written as `JobStore` does."""
    spec = JobSpec.model_validate(SPEC)
    now = time.time()
    values = {
        "name": "load", "state": state, "created_at": now, "steps": 100, "lineage": 1, "spec": spec.model_dump_json(),
    }  # fmt: skip
    ended = {
        "started_at": now, "finished_at": now, "learner": "learner-0", "step": 100, "policy_version": 100, "cause": "",
        "groups": '{"issued": 900, "active": 0, "trained": 800, "degenerate": 100}', "export": "/exports/load",
    }  # fmt: skip
    made = []
    with sync_redis.Redis.from_url(redis_url) as redis:
        for _ in range(count):
            order = int(str(redis.incr(keys.ORDER)))
            made.append(f"load-{order:08x}")
            with redis.pipeline(transaction=False) as pipe:
                record: dict[str, Any] = values | {"order": order} | ({} if state == "queued" else ended)
                pipe.hset(keys.record(made[-1]), mapping=record)
                pipe.zadd(keys.JOBS, {made[-1]: order})
                pipe.xadd(keys.events(made[-1]), {"kind": "state", "at": now, "d": f'{{"state": "{state}"}}'})
                pipe.execute()
    return made


@contextmanager
def running(folder: Path) -> Iterator[tuple[int, str]]:
    """A gateway; its port, and its Redis' URL."""
    redis = EmbeddedRedis(folder / "redis")
    port = free_port()
    environment = os.environ | {
        "REDIS_URL": redis.url, "MILLRACE_HOME": str(folder / "home"), "MILLRACE_GATEWAY_PORT": str(port),
        "MILLRACE_TOKEN": FIRST_TOKEN, "MILLRACE_LOG_LEVEL": "INFO",
    }  # fmt: skip
    gateway = [sys.executable, "-m", "services.gateway"]
    with (
        process(redis.argv, redis.answers, folder / "redis.log"),
        process(gateway, lambda _: listens(port), folder / "gateway.log", environment),
    ):
        yield port, redis.url


@contextmanager
def bare(size: int) -> Iterator[int]:
    """The route that all is compared with; its port."""
    port = free_port()
    with process([sys.executable, "-c", BARE, str(port), str(size)], lambda _: listens(port), Path(os.devnull)):
        yield port


@contextmanager
def process(
    arguments: list[str], ready: Callable[[int], bool], log: Path, environment: dict[str, str] | None = None
) -> Iterator[None]:
    """A server, once `ready` says so of its process id."""
    started = start_child(arguments, log_path=log, env=environment)
    deadline = time.monotonic() + START_S
    try:
        while not ready(started.pid):
            if started.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"a server did not start: {log.read_text() if log.is_file() else ''}")
            time.sleep(0.05)
        yield
    finally:
        started.kill()
        started.wait()


def listens(port: int) -> bool:
    """Whether a server takes connections on this port of loopback."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def report(rows: list[Row]) -> None:
    """The table."""
    print("| | p50 ms | p99 ms | bare p50, p99 ms | p50 ÷ bare | p99 ÷ bare |")
    print("|---|---|---|---|---|---|")
    for line in rows:
        p50, p99 = line.times.at(0.5), line.times.at(0.99)
        bare50, bare99 = line.bare.at(0.5), line.bare.at(0.99)
        print(
            f"| {line.what} | {p50:.2f} | {p99:.2f} | {bare50:.2f}, {bare99:.2f} | {p50 / bare50:.1f} | {p99 / bare99:.1f} |"
        )
    spread = statistics.median(line.bare.at(0.5) for line in rows)
    print(f"bare route, median of the p50s: {spread:.2f} ms")


if __name__ == "__main__":
    main()
