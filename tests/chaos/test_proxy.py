"""The cutting proxy does what it says, on a real server: a lost reply leaves the effect, a lost request leaves none."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common.redis.connection import connect
from tests.chaos.proxy import CutProxy, ProxyThread, server_of
from tests.own_redis import OwnRedis


def proxy_of(redis_url: str) -> CutProxy:
    return CutProxy(lambda: server_of(redis_url), seed=1)


def impatient(port: int) -> Redis:
    return Redis(port=port, socket_timeout=0.3, retry=Retry(NoBackoff(), 0))


async def test_a_cut_reply_leaves_the_effect_and_a_cut_request_does_not(redis: Redis, redis_url: str) -> None:
    async with proxy_of(redis_url) as proxy:
        client = impatient(proxy.port)
        await client.ping()
        proxy.faults.picks = lambda request: b"INCR" in request
        proxy.faults.cut_reply = 1.0
        with pytest.raises(RedisConnectionError):
            await client.incr("n")
        assert await redis.get("n") == b"1"
        proxy.faults.cut_reply, proxy.faults.cut_request = 0.0, 1.0
        with pytest.raises(RedisConnectionError):
            await client.incr("n")
        assert await redis.get("n") == b"1"
        assert (proxy.counts.replies_cut, proxy.counts.requests_cut) == (1, 1)
        await client.aclose()


async def test_a_client_with_retries_does_the_work_again_after_each_cut_reply(redis: Redis, redis_url: str) -> None:
    async with proxy_of(redis_url) as proxy:
        client = connect(f"redis://127.0.0.1:{proxy.port}/0")
        proxy.faults.picks = lambda request: b"INCR" in request
        proxy.faults.cut_reply = 0.5
        for _ in range(50):
            await client.incr("n")
        assert proxy.counts.replies_cut > 10
        assert int(await redis.get("n") or 0) == 50 + proxy.counts.replies_cut
        await client.aclose()


async def test_latency_is_added_both_ways_and_does_not_limit_how_much_moves(redis: Redis, redis_url: str) -> None:
    async with proxy_of(redis_url) as proxy:
        client = connect(f"redis://127.0.0.1:{proxy.port}/0")
        await client.ping()
        proxy.faults.latency_s = 0.1
        started = time.monotonic()
        await client.set("big", b"x" * 4_000_000)
        seconds = time.monotonic() - started
        assert 0.2 <= seconds < 2.0
        assert len(await redis.get("big") or b"") == 4_000_000
        await client.aclose()


async def test_a_half_open_connection_moves_nothing_and_tells_nobody_until_it_thaws(
    redis: Redis, redis_url: str
) -> None:
    async with proxy_of(redis_url) as proxy:
        client = impatient(proxy.port)
        await client.ping()
        proxy.faults.frozen = True
        with pytest.raises(RedisTimeoutError):
            await client.set("k", "v")
        assert await redis.get("k") is None
        proxy.faults.frozen = False
        await asyncio.sleep(0.1)
        assert await client.set("k", "w")
        assert await redis.get("k") == b"w"
        await client.aclose()


def test_the_proxy_runs_in_a_thread_for_tests_without_a_loop(redis_url: str) -> None:
    import redis as sync_redis

    proxy = ProxyThread(lambda: server_of(redis_url))
    client = sync_redis.Redis.from_url(proxy.url)
    assert client.ping()
    proxy.stop()


async def test_the_proxy_stands_before_a_server_on_a_unix_socket_too(tmp_path: Path) -> None:
    server = OwnRedis(tmp_path / "redis")
    await asyncio.to_thread(server.start)
    try:
        async with proxy_of(server.url) as proxy:
            client = impatient(proxy.port)
            assert await client.ping()
            await asyncio.to_thread(server.stop)
            with pytest.raises(RedisConnectionError):
                await client.ping()
            await client.aclose()
    finally:
        await asyncio.to_thread(server.stop)
