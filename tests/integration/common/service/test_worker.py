from __future__ import annotations

import asyncio
from pathlib import Path

from services.common.config.settings import Settings
from services.common.service.lifecycle import Drain
from services.common.service.worker import CONNECTIONS, worker_process


async def test_a_worker_that_finishes_many_groups_at_once_opens_few_connections(redis_url: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, redis_url=redis_url, worker="rollout-0")
    async with worker_process(settings, "rollout", Drain()) as worker:
        answers = await asyncio.gather(*(worker.commands.ping() for _ in range(64)))
        own = [client for client in await worker.commands.client_list() if client["cmd"] == "ping"]
    assert answers == [True] * 64
    assert 0 < len(own) <= CONNECTIONS
