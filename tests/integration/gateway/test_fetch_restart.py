"""A gateway that is killed while it fetches: the next one goes on, although Redis was emptied meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx
import pytest
import redis.asyncio

from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from tests.fake_hub import FakeHub
from tests.gateway_process import running, write_home
from tests.tiny_model import write_tiny_model

JOB = {"model": {"path": "hf:org/tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}}


@pytest.mark.slow
async def test_the_next_gateway_goes_on_with_a_fetch_though_redis_has_lost_the_job(
    redis_url: str, redis: redis.asyncio.Redis, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "tiny")
    model = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    home, store = write_home(tmp_path / "home"), JobStore(redis)
    with FakeHub() as hub:
        hub.add("models/org/tiny", model | {"tokenizer.model": os.urandom(4_000_000)})
        hub.piece_s = 0.1
        with running(redis_url, home, HF_ENDPOINT=hub.url) as first:
            async with httpx.AsyncClient(base_url=first.url, headers=first.bearer, timeout=60) as people:
                job = (await people.post("/jobs", json=JOB)).json()
                while not list((home / "hubs/partial").glob("*/parts/tokenizer.model")) or _size(home) < 1_500_000:
                    time.sleep(0.05)  # noqa: ASYNC251  the gateway is another process
        await redis.flushall()
        hub.be_well()
        with running(redis_url, home, HF_ENDPOINT=hub.url) as second:
            async with httpx.AsyncClient(base_url=second.url, headers=second.bearer, timeout=60) as people:
                deadline = time.monotonic() + 60
                while (claimed := await store.claim("learner")) is None:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)  # noqa: ASYNC251
                assert claimed.id == job["id"]
                assert (await people.get(f"/jobs/{job['id']}")).json()["state"] == JobState.STARTING
        starts = [item.first_byte for item in hub.asked if item.store and "tokenizer.model" in item.path]
    assert starts
    assert min(starts) > 0


def _size(home: Path) -> int:
    return sum(path.stat().st_size for path in (home / "hubs/partial").glob("*/parts/tokenizer.model"))
