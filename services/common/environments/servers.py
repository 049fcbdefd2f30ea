"""Environment servers, from the list of workers: an episode goes to one after the other of those that are there.

heartbeat with an address ──► there ──► the next episode's turn
draining, or no heartbeat ──► gone: no new episodes; those on it go on
an episode loses it       ──► passed over, until another process answers there, or it goes on beating for EXPIRES_S
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from services.common.environments.client import QUEUE_S, EnvironmentClient
from services.common.environments.types import EnvironmentFailed, Observation, Reason, World
from services.common.service.heartbeat import EXPIRES_S, HEARTBEAT_S, WorkerStatus, live_workers
from services.common.streams.types import Task

KNOWN_FOR_S = HEARTBEAT_S
"""Time for which a look at the list is good."""


@dataclass(slots=True)
class Server:
    """One environment server."""

    client: EnvironmentClient
    newest: WorkerStatus
    """Its newest heartbeat."""
    lost: WorkerStatus | None = None
    """Its newest heartbeat at the time at which an episode lost it."""

    @property
    def usable(self) -> bool:
        """Whether new episodes may go there: the heartbeat of a dead process is in the list until it expires."""
        if self.lost is None:
            return True
        return self.newest.pid != self.lost.pid or self.newest.at > self.lost.at + EXPIRES_S


@dataclass(frozen=True, slots=True)
class _Watched:
    """An episode that notes the loss of its server; `types.World` describes the methods."""

    world: World
    server: Server

    async def reset(self) -> Observation:
        """Begins it."""
        return await self._answer(self.world.reset())

    async def step(self, reply: str) -> Observation:
        """Answers a reply."""
        return await self._answer(self.world.step(reply))

    async def _answer(self, answer: Awaitable[Observation]) -> Observation:
        try:
            return await answer
        except EnvironmentFailed as failure:
            if failure.reason is Reason.LOST:
                self.server.lost = self.server.newest
            raise


class EnvironmentServers:
    """All environment servers; `types.Worlds` describes the method."""

    def __init__(self, redis: Redis, token: str | None, *, wait_s: float = QUEUE_S) -> None:
        """`wait_s`: longest wait of an episode for a server to come."""
        self._redis, self._token, self._wait_s = redis, token, wait_s
        self._servers: dict[str, Server] = {}
        """By address."""
        self._looked_at = -KNOWN_FOR_S
        self._turn = 0

    async def close(self) -> None:
        """Ends the connections."""
        servers, self._servers = self._servers, {}
        for server in servers.values():
            await server.client.close()

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[World]:
        """An episode on the next server. Raises EnvironmentFailed when none is there in time."""
        server = await self._next()
        async with server.client.episode(task) as world:
            yield _Watched(world, server)

    async def _next(self) -> Server:
        deadline = time.monotonic() + self._wait_s
        while not (there := await self._usable()):
            if time.monotonic() >= deadline:
                waited = f", and none has come within {self._wait_s:g} s" if self._wait_s else ""
                raise EnvironmentFailed(f"no environment server is there{waited}", reason=Reason.NO_PLACE)
            await asyncio.sleep(KNOWN_FOR_S)
        self._turn += 1
        return there[self._turn % len(there)]

    async def _usable(self) -> list[Server]:
        if time.monotonic() >= self._looked_at + KNOWN_FOR_S:
            await self._look()
        return [server for _, server in sorted(self._servers.items()) if server.usable]

    async def _look(self) -> None:
        """Connects to servers that have come. One that has gone stays connected while episodes are on it: gRPC closes what is idle."""
        workers = {each.environment_address: each for each in await live_workers(self._redis)}
        servers = {}
        for where, status in workers.items():
            if where is not None:
                servers[where] = self._servers.get(where) or Server(EnvironmentClient(where, self._token), status)
                servers[where].newest = status
        self._servers, self._looked_at = servers, time.monotonic()
