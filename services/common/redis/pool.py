"""Pool of connections to Redis in which a command waits for a free one.

redis-py's own pool raises as soon as all connections are in use, as if Redis were away. Its blocking variant loses a connection for good
when the task that releases it is cancelled while it waits for the pool's lock: clients of a gateway disconnect all the time.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import MaxConnectionsError

MAX_CONNECTIONS = 100
_UNBOUNDED = 2**31


class PoolBusyError(MaxConnectionsError):
    """No connection became free in time: this process has too many commands at once. Nothing was sent."""


class WaitingPool(ConnectionPool):
    """At most `max_connections` connections; first come, first served."""

    def __init__(self, *, wait_s: float, max_connections: int = MAX_CONNECTIONS, **options: Any) -> None:  # noqa: ANN401  redis-py's own
        """`wait_s`: longest wait for a free connection, seconds. `options`: of each connection."""
        super().__init__(max_connections=_UNBOUNDED, **options)  # the semaphore bounds it
        self._wait_s = wait_s
        self._free = asyncio.Semaphore(max_connections)

    @property
    def exhausted(self) -> bool:
        """Whether the next command would have to wait."""
        return self._free.locked()

    async def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> AbstractConnection:  # noqa: ANN401, ARG002
        """A connected connection, which must be released. Raises PoolBusyError when none became free in time."""
        try:
            async with asyncio.timeout(self._wait_s if self.exhausted else None):
                await self._free.acquire()
        except TimeoutError as error:
            raise PoolBusyError(f"no connection to Redis became free within {self._wait_s:g} s") from error
        try:
            connection: AbstractConnection = self.get_available_connection()  # type: ignore[no-untyped-call]
        except BaseException:
            self._free.release()
            raise
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        """Takes a connection back, even when the task that releases it is cancelled."""
        try:
            await super().release(connection)
        except BaseException:
            # A connection that was not taken back is closed with its last reference.
            self._in_use_connections.discard(connection)
            raise
        finally:
            self._free.release()
