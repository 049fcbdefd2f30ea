"""Children of an environment service's forkserver: the episodes that are played, and what they started."""

from __future__ import annotations

import asyncio
import time

import psutil

from tests.processes import is_at_work

SLACK_S = 2.0
"""Of a busy machine; on an idle one 0.1 s are enough."""


def children(forkserver: int) -> list[psutil.Process]:
    """What lives below the forkserver, at any depth."""
    return [each for each in psutil.Process(forkserver).children(recursive=True) if is_at_work(each.pid)]


async def settled(forkserver: int, most: int, within_s: float = SLACK_S) -> set[int]:
    """Process ids of the children, once they are no more than so many; a killed one needs a moment to end. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while len(left := children(forkserver)) > most:
            await asyncio.sleep(0.01)
    return {child.pid for child in left}


async def all_end(forkserver: int, within_s: float = SLACK_S) -> bool:
    """Whether all of them end in time."""
    deadline = time.monotonic() + within_s
    while (left := children(forkserver)) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return not left
