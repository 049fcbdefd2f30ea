"""Run of the simulation: for each number of servers a stack of its own, whose parts are measured one by one.

    tasks ──► N scripted servers (processes of up to 128) ──► rollouts ──► reward service ──► scored ──► head ──► versions ──► servers

The embedded Redis with its append-only file, the reward service and its verifiers, the head with all its loops and the weights' process
are the real ones; so is a server but for its tokens. Processor time and memory are those of each family of processes, between two steps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
from pathlib import Path

import grpc

from benchmarks.large_entries import own_redis
from benchmarks.simulated.figures import Figures, report
from benchmarks.simulated.hops import HopRates, hop_rates
from benchmarks.simulated.stack import Shape, Stack
from services.common.redis.connection import connect
from tests.chaos.job import furnish


def measure(shape: Shape, seconds: float) -> Figures:
    """The figures of one number of servers."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        home = Path(folder)
        furnish(home)
        with own_redis(home / "redis") as server:
            hops = hop_rates(server.url, shape.servers, shape.entry_bytes)
            with Stack(home, server.url, shape) as stack:
                return asyncio.run(observe(stack, server.url, shape, hops, seconds))


async def observe(stack: Stack, url: str, shape: Shape, hops: HopRates, seconds: float) -> Figures:
    """A stack's windows, one after the other."""
    async with connect(url) as redis:
        attach_s = await stack.started(redis)
        window = await stack.window(redis, seconds)
        idle = await stack.idle(redis)
        return Figures(shape, hops, attach_s, window, idle, alone=await stack.servers_alone(redis))


def main() -> None:
    """Measures, and prints a column for each number of servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="1,8,64,512", help="numbers of servers, with commas")
    parser.add_argument("--seconds", type=float, default=12.0, help="least length of a window")
    parser.add_argument("--tokens", type=int, default=64, help="of a response; a group has 8")
    parser.add_argument("--apart", action="store_true", help="weights come over gRPC and relays, as across hosts")
    arguments = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, Python {platform.python_version()}, grpcio {grpc.__version__}")
    found = []
    for servers in (int(word) for word in arguments.servers.split(",")):
        found.append(measure(Shape(servers, arguments.tokens, arguments.apart), arguments.seconds))
        print(f"{servers} servers: done", flush=True)
    report(found)


if __name__ == "__main__":
    main()
