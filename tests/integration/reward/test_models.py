"""Judges and reward models through the whole service: from the rollouts stream to the scored one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.common.config.judges import JudgeEndpoint
from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.common.redis.connection import connect
from services.common.service.lifecycle import Drain
from services.common.streams.types import VerdictStatus
from services.reward.pool.pool import Pool
from services.reward.service import RewardService
from tests.integration.reward.test_service import Running, activate, group, scored, send
from tests.judge_server import judge_server

SPEC: dict[str, Any] = {
    "reward": {
        "verifiers": {"*": "both"},
        "rubrics": {"both": {"verifier_function": ["gsm8k", "graded"], "verifier_weight": [1.0, 0.5], "accuracy_of": "gsm8k"}},
        "judges": {"graded": {"endpoint": "near", "template": "{response}", "timeout_s": 5.0}},
        "reward_models": {"scored": {"path": "nowhere"}},
    }
}  # fmt: skip


async def test_a_group_is_judged_by_verifier_and_judge_and_a_reward_model_that_is_missing_hurts_nobody(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    async with judge_server() as server, Pool(1) as pool:
        server.reply = lambda body: "[[10]]" if "right" in body["messages"][0]["content"] else "[[1]]"
        endpoints = {"near": JudgeEndpoint(url=server.url, model="m")}
        settings = Settings(home=tmp_path / "home", judge_endpoints=endpoints)
        running = Running(redis_url, pool, "reward-1", 100, settings=settings)
        await activate(redis, spec=SPEC)
        await send(redis, group(1, "right #### 1", "right #### 2", "#### 1", "#### 2"))
        await activate(redis, job="job-2", spec={"reward": SPEC["reward"] | {"verifiers": {"*": "scored"}}})
        await send(redis, group(2, "#### 2", job="job-2"))
        judged = (await scored(redis, 1))[1]
        failed = (await scored(redis, 1, "job-2", timeout_s=60.0))[2]
        await running.stop()
    assert [verdict.reward for verdict in judged.verdicts] == [1.5, 0.5, 1.0, 0.0]
    assert [verdict.accuracy for verdict in judged.verdicts] == [1.0, 0.0, 1.0, 0.0]
    assert {verdict.verifier for verdict in judged.verdicts} == {"both"}
    [verdict] = failed.verdicts
    assert (verdict.status, verdict.reward) == (VerdictStatus.FAILED, None)
    assert "the reward model nowhere was not loaded: path: there is no model 'nowhere'" in verdict.detail


async def test_a_service_without_the_key_of_an_endpoint_does_not_start(redis_url: str, tmp_path: Path) -> None:
    endpoints = {"far": JudgeEndpoint(url="http://127.0.0.1:1/v1", key_file=tmp_path / "key")}
    clients = connect(redis_url), connect(redis_url)
    with pytest.raises(ConfigError, match=r"^MILLRACE_JUDGE_ENDPOINTS: far\.key_file: .*No such file"):
        RewardService(*clients, Pool(1), name="r", drain=Drain(), settings=Settings(judge_endpoints=endpoints))
    for client in clients:
        await client.aclose()
