"""The reward service on a real server: every group of every job gets its verdicts once, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from services.common.jobs.record import ActiveJob
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.connection import connect
from services.common.redis.keys import Stage
from services.common.service.heartbeat import live_workers
from services.common.service.lifecycle import Drain
from services.common.streams.codec import decode, encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.stream import MAX_STREAM_LENGTH, add, depths
from services.common.streams.trial import TrialRequest, ask
from services.common.streams.types import (
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    VerdictStatus,
    VersionSpan,
)
from services.common.streams.worker import MAX_DELIVERIES
from services.reward.pool.pool import Pool
from services.reward.service import RewardService
from services.reward.session import CONSUMER_GROUP

pytestmark = pytest.mark.asyncio(loop_scope="module")

JOB = "job-1"
SPEC = {"reward": {"verifiers": {}, "timeout_s": 1.0}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Pool]:
    async with Pool(1) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


class Running:
    """A service within this process, as its own main would run it."""

    def __init__(self, url: str, pool: Pool, name: str, bound: int, **options: Any) -> None:
        self.drain = Drain()
        self._clients = (connect(url), connect(url, block_s=2.0))
        self.service = RewardService(*self._clients, pool, name=name, drain=self.drain, bound=bound, **options)
        loops = self.service.follow_jobs, self.service.heartbeat, self.service.trials.run
        self._tasks = [asyncio.create_task(loop()) for loop in loops]

    async def stop(self) -> None:
        """Drains, and raises what the loops raised."""
        self.drain.request()
        await asyncio.wait_for(asyncio.gather(*self._tasks), 20.0)
        for client in self._clients:
            await client.aclose()

    async def crash(self) -> None:
        """Ends at once, acking nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.aclose()


Start = Callable[..., Awaitable[Running]]


@pytest_asyncio.fixture(loop_scope="module")
async def start(redis_url: str, pool: Pool) -> AsyncIterator[Start]:
    started: list[Running] = []

    async def begin(name: str = "reward-1", bound: int = MAX_STREAM_LENGTH) -> Running:
        started.append(Running(redis_url, pool, name, bound))
        return started[-1]

    yield begin
    for running in started:
        await running.crash()


def group(number: int, *texts: str, job: str = JOB, failure: str | None = None, **changes: Any) -> RolloutGroup:
    values: dict[str, Any] = {
        "job_id": job, "lineage": 1, "group_id": number, "attempt": 1, "purpose": Purpose.TRAIN,
        "prompt": (Message("user", f"What is {number} + 0?"),), "data_source": "openai/gsm8k", "ground_truth": str(number),
        "extra_info": {}, "group_size": 2, "temperature": 1.0, "max_tokens": 16, "min_policy_version": 0, "timeout_s": 60.0,
    }  # fmt: skip
    rollouts = tuple(Rollout(bytes(8), bytes(8), text, FinishReason.STOP, (VersionSpan(0, 3),)) for text in texts)
    return RolloutGroup(Task(**(values | changes)), "rollout-1", bytes(12), rollouts, 0.25, failure)


async def activate(redis: Redis, job: str = JOB, spec: dict[str, Any] | None = None) -> None:
    await JobStore(redis).activate(ActiveJob(job, 1, "127.0.0.1:1", 0, "/models/tiny", SPEC if spec is None else spec))


async def send(redis: Redis, sent: RolloutGroup) -> None:
    await add(redis, sent.task.job_id, Stage.ROLLOUTS, sent.task.member, encode(sent, MIN_ENTRY_BYTES))


async def scored(redis: Redis, count: int, job: str = JOB, timeout_s: float = 20.0) -> dict[int, ScoredGroup]:
    """The judged groups by number, once there are `count`."""

    async def enough() -> bool:
        return bool(await redis.xlen(keys.stream(job, Stage.SCORED)) >= count)

    await eventually(enough, timeout_s)
    reply: Any = await redis.xrange(keys.stream(job, Stage.SCORED))
    found = [decode(ScoredGroup, fields[b"d"], MIN_ENTRY_BYTES) for _, fields in reply]
    assert len(found) == count
    return {one.group.task.group_id: one for one in found}


async def eventually(holds: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < deadline, "did not come about in time"
        await asyncio.sleep(0.05)


async def letters(redis: Redis, count: int) -> list[dict[bytes, bytes]]:
    async def enough() -> bool:
        return bool(await redis.xlen(keys.dead(JOB, Stage.ROLLOUTS)) >= count)

    await eventually(enough)
    reply: Any = await redis.xrange(keys.dead(JOB, Stage.ROLLOUTS))
    return [fields for _, fields in reply]


async def test_groups_come_out_judged_without_text_and_with_samples(redis: Redis, start: Start) -> None:
    await activate(redis)
    for number in range(20):
        await send(redis, group(number, f"#### {number}", "#### -1"))
    running = await start("reward-1")
    judged = await scored(redis, 20)
    await running.stop()

    assert sorted(judged) == list(range(20))
    for one in judged.values():
        assert [(verdict.status, verdict.reward) for verdict in one.verdicts] == [("scored", 1.0), ("scored", 0.0)]
        assert {rollout.text for rollout in one.group.rollouts} == {""}
    assert (await depths(redis, JOB))[Stage.ROLLOUTS] == 0
    kept: Any = await redis.lrange(keys.samples(JOB), 0, -1)
    shown = [json.loads(one) for one in kept]
    assert sorted(one["group_id"] for one in shown) == list(range(20))
    assert {rollout["text"] for one in shown for rollout in one["rollouts"]} == {f"#### {n}" for n in range(20)} | {
        "#### -1"
    }


async def test_a_job_may_be_rewarded_by_a_rubric_and_evaluated_by_a_verifier(redis: Redis, start: Start) -> None:
    rubric = {"verifier_function": ["gsm8k", "format"], "verifier_weight": [1.0, 0.5], "accuracy_of": "gsm8k"}
    reward = {
        "verifiers": {"*": "both"}, "eval_verifiers": {"*": "gsm8k"}, "rubrics": {"both": rubric},
        "config": {"format": {"format_tags": ["answer"]}},
    }  # fmt: skip
    await activate(redis, spec={"reward": reward})
    await send(redis, group(7, "<answer>#### 7</answer>", "<answer>#### 8</answer>"))
    await send(redis, group(8, "#### 8", "#### 9", purpose=Purpose.EVAL))
    running = await start("reward-1")
    judged = await scored(redis, 2)
    await running.stop()
    found = {number: [(v.verifier, v.reward, v.accuracy) for v in one.verdicts] for number, one in judged.items()}
    assert found == {7: [("both", 1.5, 1.0), ("both", 0.5, 0.0)], 8: [("gsm8k", 1.0, 1.0), ("gsm8k", 0.0, 0.0)]}
    kept: Any = await redis.lrange(keys.samples(JOB), 0, -1)
    [detail] = [one["rollouts"][1]["detail"] for one in map(json.loads, kept) if one["group_id"] == 7]
    assert detail == "gsm8k: 0 × 1, accuracy 0 (8 is not 7); format: 1 × 0.5, accuracy 1 (as asked for)"


async def test_a_section_is_tried_on_groups_that_no_job_has(redis: Redis, start: Start) -> None:
    await start()
    rubric = {"verifier_function": ["gsm8k", "exact_match"], "verifier_weight": [1.0, 2.0]}
    reward = {"verifiers": {"*": "both"}, "rubrics": {"both": rubric}}
    groups = group(1, "#### 1", "1"), group(2, "3")
    reply = await ask(redis, TrialRequest("a-trial", json.dumps(reward), groups, limit_s=20.0))
    assert reply is not None
    assert reply.failure == ""
    assert [[verdict.reward for verdict in verdicts] for verdicts in reply.verdicts] == [[1.0, 3.0], [0.0]]
    assert {verdict.verifier for verdicts in reply.verdicts for verdict in verdicts} == {"both"}
    assert [key async for key in redis.scan_iter("millrace:trial*")] == []


async def test_a_trial_that_cannot_be_judged_says_why_and_the_next_one_is(redis: Redis, start: Start) -> None:
    await start()
    unknown = await ask(redis, TrialRequest("unknown", '{"no_setting": 1}', (group(1, "1"),), limit_s=20.0))
    assert unknown is not None
    assert "no_setting" in unknown.failure
    await redis.rpush(keys.TRIALS, b"no request")
    reply = await ask(redis, TrialRequest("fine", "{}", (group(1, "1"),), limit_s=20.0))
    assert reply is not None
    assert reply.verdicts[0][0].reward == 1.0


async def test_a_group_sent_twice_is_judged_on_once(redis: Redis, start: Start) -> None:
    await activate(redis)
    twice = group(3, "#### 3", "#### 4")
    for _ in range(2):  # past the dedupe set, as after a server lost its data
        await redis.xadd(
            keys.stream(JOB, Stage.ROLLOUTS), {"member": twice.task.member, "d": encode(twice, MIN_ENTRY_BYTES)}
        )
    running = await start("reward-1")
    await scored(redis, 1)
    await eventually(lambda: empty(redis))
    await running.stop()
    assert len(await scored(redis, 1)) == 1
    assert await redis.llen(keys.samples(JOB)) == 1


async def empty(redis: Redis) -> bool:
    return (await depths(redis, JOB))[Stage.ROLLOUTS] == 0


async def test_a_failed_group_passes_without_verdicts(redis: Redis, start: Start) -> None:
    await activate(redis)
    await send(redis, group(5, failure="the prompt is 9000 tokens long"))
    running = await start("reward-1")
    passed = (await scored(redis, 1))[5]
    await running.stop()
    assert passed.verdicts == ()
    assert passed.group.failure == "the prompt is 9000 tokens long"
    assert await redis.llen(keys.samples(JOB)) == 0


async def test_what_cannot_be_used_goes_to_the_dead_letters_and_the_rest_goes_on(redis: Redis, start: Start) -> None:
    await activate(redis)
    stream = keys.stream(JOB, Stage.ROLLOUTS)
    await redis.xadd(stream, {"member": "train:90:1", "d": b"\xc1 no MessagePack"})
    await redis.xadd(stream, {"member": "train:91:1", "d": msgpack.packb({"task": 1})})
    await redis.xadd(stream, {"nothing": "of ours"})
    await redis.xadd(stream, {"member": "train:93:1", "d": encode(group(93, "x", job="another"), MIN_ENTRY_BYTES)})
    await redis.xadd(stream, {"member": "train:1:1", "d": encode(group(94, "x"), MIN_ENTRY_BYTES)})
    await redis.xadd(stream, {"member": "train:95:1", "d": b"\x81" * (5 * 1024 * 1024)})
    await send(redis, group(1, "#### 1", "#### 2"))
    running = await start("reward-1")
    reasons = [letter[b"reason"].decode() for letter in await letters(redis, 6)]
    judged = await scored(redis, 1)
    await running.stop()
    assert judged[1].verdicts[0].reward == 1.0
    for part in (
        "not MessagePack",
        "task: ",
        "belongs to job 'another'",
        "the entry says 'train:1:1'",
        "exceeds the limit",
    ):
        assert any(part in reason for reason in reasons), (part, reasons)


async def test_an_entry_that_was_delivered_too_often_is_put_aside(redis: Redis, start: Start) -> None:
    await activate(redis)
    await send(redis, group(1, "#### 1", "#### 2"))
    stream = keys.stream(JOB, Stage.ROLLOUTS)
    await redis.xgroup_create(stream, CONSUMER_GROUP, id="0")
    await redis.xreadgroup(CONSUMER_GROUP, "reward-1", {stream: ">"})
    for _ in range(MAX_DELIVERIES - 1):  # five times a server took it and died
        await redis.xreadgroup(CONSUMER_GROUP, "reward-1", {stream: "0"})
    running = await start("reward-1")
    [letter] = await letters(redis, 1)
    await running.stop()
    assert letter[b"reason"] == b"delivered to be judged 6 times without success"
    told = (await scored(redis, 1))[1]
    assert told.group.failure == "delivered to be judged 6 times without success", "the learner need not wait"
    assert told.group.permanent
    assert told.group.rollouts == ()


async def test_bombs_are_timeouts_and_hold_nothing_up(redis: Redis, start: Start) -> None:
    await activate(redis)
    bombs = (r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\frac{1}{2}}")
    await send(redis, group(0, *bombs, data_source="math", ground_truth="0.5"))
    running = await start("reward-1")
    began = time.monotonic()
    for number in range(1, 30):
        await send(redis, group(number, f"#### {number}", "no"))
    judged = await scored(redis, 30)
    waited_s = time.monotonic() - began
    await running.stop()
    assert [verdict.status for verdict in judged[0].verdicts] == [VerdictStatus.TIMEOUT, VerdictStatus.SCORED]
    assert (judged[0].verdicts[0].reward, judged[0].verdicts[0].accuracy) == (0.0, 0.0)
    assert all(judged[number].verdicts[0].reward == 1.0 for number in range(1, 30))
    assert waited_s < 1.0 + 5.0, "one limit, and time for everything else on a busy machine"


async def test_a_full_scored_stream_makes_it_wait_and_lose_nothing(redis: Redis, start: Start) -> None:
    await activate(redis)
    for number in range(5):
        await send(redis, group(number, f"#### {number}", "no"))
    running = await start("reward-1", bound=2)
    await scored(redis, 2)
    await asyncio.sleep(0.5)
    assert await redis.xlen(keys.stream(JOB, Stage.SCORED)) == 2
    assert (await depths(redis, JOB))[Stage.ROLLOUTS] == 3
    seen = set()
    for _ in range(40):
        reply: Any = await redis.xrange(keys.stream(JOB, Stage.SCORED))
        for entry_id, fields in reply:
            seen.add(fields[b"member"])
            await redis.xdel(keys.stream(JOB, Stage.SCORED), entry_id)
        if len(seen) == 5:
            break
        await asyncio.sleep(0.1)
    await running.stop()
    assert len(seen) == 5


async def test_a_crashed_server_finishes_its_groups_after_the_restart(redis: Redis, start: Start) -> None:
    await activate(redis, spec={"reward": {"verifiers": {"*": "math"}, "timeout_s": 3.0}})
    for number in range(8):
        await send(redis, group(number, r"\boxed{9^{9^{9^{9}}}}" if number == 0 else rf"\boxed{{{number}}}", "no"))
    first = await start("reward-1")

    async def taken() -> bool:
        summary: Any = await redis.xpending(keys.stream(JOB, Stage.ROLLOUTS), CONSUMER_GROUP)
        return bool(summary["pending"])

    await eventually(lambda: group_exists(redis))
    await eventually(taken)
    await first.crash()
    second = await start("reward-1")
    judged = await scored(redis, 8)
    await second.stop()
    assert sorted(judged) == list(range(8))
    assert all(judged[number].verdicts[0].reward == 1.0 for number in range(1, 8))


async def group_exists(redis: Redis) -> bool:
    if not await redis.exists(keys.stream(JOB, Stage.ROLLOUTS)):
        return False
    groups: Any = await redis.xinfo_groups(keys.stream(JOB, Stage.ROLLOUTS))
    return bool(groups)


async def test_jobs_come_and_go_and_leave_no_keys(redis: Redis, start: Start) -> None:
    running = await start("reward-1")
    for job in ("job-1", "job-2"):
        await activate(redis, job)
        await send(redis, group(1, "#### 1", "#### 2", job=job))
    for job in ("job-1", "job-2"):
        assert sorted(await scored(redis, 1, job)) == [1]
    await JobStore(redis).retire("job-1")
    await asyncio.sleep(1.5)
    assert await redis.keys("millrace:{job-1}:*") == [keys.samples("job-1").encode()]
    await send(redis, group(2, "#### 2", "#### 2", job="job-2"))
    assert sorted(await scored(redis, 2, "job-2")) == [1, 2]
    await running.stop()


async def test_two_servers_share_the_groups(redis: Redis, start: Start) -> None:
    await activate(redis)
    servers = [await start(name) for name in ("reward-1", "reward-2")]
    for number in range(40):
        await send(redis, group(number, f"#### {number}", "no"))
    assert sorted(await scored(redis, 40)) == list(range(40))
    assert {status.name for status in await live_workers(redis)} == {"reward-1", "reward-2"}
    for server in servers:
        await server.stop()


async def test_a_reward_section_that_is_not_understood_stops_that_job_only(redis: Redis, start: Start) -> None:
    await activate(redis, "job-2", {"reward": {"surprise": 1}})
    await activate(redis)
    await send(redis, group(1, "#### 1", "#### 2"))
    running = await start("reward-1")
    assert sorted(await scored(redis, 1)) == [1]
    await running.stop()


async def test_a_flushed_server_heals(redis: Redis, start: Start) -> None:
    running = await start("reward-1")
    await activate(redis)
    await send(redis, group(1, "#### 1", "#### 2"))
    await scored(redis, 1)
    await redis.flushall()
    await activate(redis)
    await send(redis, group(2, "#### 2", "#### 2"))
    assert sorted(await scored(redis, 1)) == [2]
    await running.stop()


async def test_the_process_serves_drains_and_exits(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    await activate(redis)
    environment = {**os.environ, "REDIS_URL": redis_url, "MILLRACE_WORKER": "reward-9", "MILLRACE_HOME": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        await send(redis, group(1, "#### 1", "#### 2"))
        assert sorted(await scored(redis, 1, timeout_s=60.0)) == [1]
        [status] = await live_workers(redis)
        assert (status.name, status.kind) == ("reward-9", "reward")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{status.metrics_port}") as http:
            assert [(await http.get(path)).text for path in ("/readyz", "/healthz")] == ["ok\n", "ok\n"]
            metrics = (await http.get("/metrics")).text
        assert 'millrace_reward_verdicts_total{status="scored",verifier="gsm8k"} 2.0' in metrics
        assert 'millrace_reward_groups_total{result="judged"} 1.0' in metrics
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 20.0)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()
    assert await live_workers(redis) == []
    for line in errors.decode().splitlines():
        assert json.loads(line)["service"].startswith("reward")


async def test_the_process_runs_programs_when_its_operator_says_so(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    await activate(redis, spec={"reward": {"verifiers": {"*": "code"}, "timeout_s": 20.0}})
    environment = {
        **os.environ, "REDIS_URL": redis_url, "MILLRACE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "MILLRACE_CODE_REWARD": "1",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        tests = json.dumps({"inputs": ["3 4"], "outputs": ["7"]})
        right, wrong = (f"```python\nprint({value})\n```" for value in ("sum(map(int, input().split()))", "8"))
        await send(redis, group(1, right, wrong, ground_truth=tests))
        verdicts = (await scored(redis, 1, timeout_s=60.0))[1].verdicts
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 20.0)
    if "the kernel does not isolate them" in errors.decode():
        assert {(verdict.status, verdict.reward) for verdict in verdicts} == {(VerdictStatus.FAILED, None)}
        pytest.skip(verdicts[0].detail)
    assert "programs that a model writes run isolated" in errors.decode()
    assert [(verdict.status, verdict.reward) for verdict in verdicts] == [("scored", 1.0), ("scored", 0.0)]
    assert not [name for name in os.listdir(tmp_path) if name.startswith("millrace-program-")]  # noqa: PTH208


async def test_a_wrong_setting_ends_the_process_with_one_clear_line(redis_url: str) -> None:
    environment = {**os.environ, "REDIS_URL": redis_url, "MILLRACE_METRICS_PORT": "many"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 30.0)
    assert process.returncode == 2
    assert errors.decode().count("\n") == 1
    assert "MILLRACE_METRICS_PORT" in errors.decode()
