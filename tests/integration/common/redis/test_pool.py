"""More commands at once than there are connections wait for one; nobody takes that for a Redis that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from services.common.redis.connection import connect
from services.common.redis.pool import MAX_CONNECTIONS, PoolBusyError, WaitingPool


@pytest.fixture
async def impatient(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client whose commands wait 0.2 s for a connection."""
    client = connect(redis_url, pool_wait_s=0.2)
    yield client
    await client.aclose()


def pool_of(client: redis.asyncio.Redis) -> WaitingPool:
    pool = client.connection_pool
    assert isinstance(pool, WaitingPool)
    return pool


async def test_four_times_as_many_commands_as_connections_are_all_answered(redis_url: str) -> None:
    async with connect(redis_url) as client:
        answers = await asyncio.gather(*(client.ping() for _ in range(4 * MAX_CONNECTIONS)))
        assert answers == [True] * 4 * MAX_CONNECTIONS
        assert len(pool_of(client)._available_connections) <= MAX_CONNECTIONS


async def test_a_command_that_no_connection_is_free_for_says_so_after_its_wait(impatient: redis.asyncio.Redis) -> None:
    pool = pool_of(impatient)
    held = [await pool.get_connection() for _ in range(MAX_CONNECTIONS)]
    assert pool.exhausted
    with pytest.raises(PoolBusyError, match=r"within 0\.2 s"):
        await impatient.ping()
    await pool.release(held.pop())
    assert await impatient.ping()
    for connection in held:
        await pool.release(connection)
    assert not pool.exhausted


async def wait_long(client: redis.asyncio.Redis) -> None:
    execute: Any = client.execute_command
    await execute("BLPOP", "nothing", 1)


async def test_commands_that_are_cancelled_wherever_they_are_lose_no_connection(impatient: redis.asyncio.Redis) -> None:
    for delay_ms in range(12):
        commands = [asyncio.create_task(wait_long(impatient)) for _ in range(MAX_CONNECTIONS + 40)]
        await asyncio.sleep(delay_ms / 1000)
        for command in commands:
            command.cancel()
            command.cancel()
        await asyncio.gather(*commands, return_exceptions=True)
    pool = pool_of(impatient)
    held = [await pool.get_connection() for _ in range(MAX_CONNECTIONS)]  # each place is there again
    for connection in held:
        await pool.release(connection)
    assert await impatient.ping()


async def test_a_connection_that_cannot_be_made_gives_its_place_back() -> None:
    client = connect("redis://127.0.0.1:1/0", pool_wait_s=0.2, outage_s=0.0)
    for _ in range(2 * MAX_CONNECTIONS):
        with pytest.raises(redis.ConnectionError, match=r"Connect call failed|Error 111"):
            await client.ping()
    assert not pool_of(client).exhausted
