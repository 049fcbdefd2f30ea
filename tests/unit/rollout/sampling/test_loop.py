"""The tasks loop on a real Redis; the engine is a stand-in that says one token, so that every outcome can be provoked."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from services.common.redis import keys
from services.common.redis.connection import connect
from services.common.redis.keys import Stage
from services.common.service.lifecycle import Drain
from services.common.streams import codec
from services.common.streams import stream as streams
from services.common.streams.consumer import Consumer
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import Message, Purpose, RolloutGroup, Task
from services.common.streams.worker import WorkerLimits
from services.common.weights.snapshot import PolicyVersion
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import Piece
from services.rollout.engine.update import VersionLabel
from services.rollout.sampling import sampler as sampler_module
from services.rollout.sampling.loop import CONSUMER_GROUP, READ_COUNT, TaskLoop
from services.rollout.sampling.sampler import Sampler

JOB = "job-1"
TASK = Task(
    job_id=JOB, lineage=1, group_id=0, attempt=1, purpose=Purpose.TRAIN, prompt=(Message("user", "2 + 3 ="),),
    data_source="test", ground_truth="5", extra_info={}, group_size=2, temperature=1.0, max_tokens=4,
    min_policy_version=0, timeout_s=20.0,
)  # fmt: skip


class OneToken:
    """Samples one token at once, or waits until `go` where a test wants it to be at work."""

    max_model_len = 64

    def __init__(self, label: VersionLabel) -> None:
        self._label = label
        self.go = asyncio.Event()
        self.go.set()
        self.text = "5"
        self.started = 0
        self.aborted = 0

    async def prompt_token_ids(self, messages: Iterable[Message]) -> list[int]:
        return [1 for message in messages for _ in message.content]

    async def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        return [self.text for _ in rollouts]

    async def generate(
        self, prompt_token_ids: list[int], *, count: int, temperature: float, max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        assert prompt_token_ids
        assert temperature > 0 < max_tokens
        self.started += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        for index in range(count):
            version = self._label.version
            assert version is not None
            yield Piece(index, [9], [-0.5], version.n, "stop")


@dataclasses.dataclass
class Bench:
    redis: Redis
    blocking: Redis
    label: VersionLabel
    engine: OneToken
    drain: Drain
    limits: WorkerLimits
    limit_bytes: int = MIN_ENTRY_BYTES

    async def ask(self, *tasks: Task) -> None:
        for task in tasks:
            await streams.add(self.redis, JOB, Stage.TASKS, task.member, codec.encode(task, MIN_ENTRY_BYTES))

    def loop(self, name: str = "r0") -> TaskLoop:
        consumer = Consumer(
            self.redis, self.blocking, JOB, Stage.TASKS, group=CONSUMER_GROUP, name=name, limit_bytes=self.limit_bytes
        )
        return TaskLoop(consumer, Sampler(cast("Engine", self.engine), name), self.label, self.limits, self.drain)

    @asynccontextmanager
    async def running(self, name: str = "r0") -> AsyncIterator[TaskLoop]:
        loop = self.loop(name)
        task = asyncio.create_task(loop.run())
        try:
            yield loop
            assert not task.done() or task.exception() is None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def groups(self, count: int) -> list[RolloutGroup]:
        await self.reach(keys.stream(JOB, Stage.ROLLOUTS), count)
        return [
            codec.decode(RolloutGroup, fields[b"d"], self.limit_bytes)
            for fields in await self.entries(keys.stream(JOB, Stage.ROLLOUTS))
        ]

    async def entries(self, stream: str) -> list[dict[bytes, bytes]]:
        found: Any = await self.redis.xrange(stream)
        return [fields for _, fields in found]

    async def reach(self, stream: str, length: int) -> None:
        async with asyncio.timeout(15):
            while await self.redis.xlen(stream) != length:
                await asyncio.sleep(0.02)

    async def sampling(self, count: int) -> None:
        async with asyncio.timeout(15):
            while self.engine.started < count:
                await asyncio.sleep(0.02)


@pytest.fixture
async def bench(redis: Redis, redis_url: str) -> AsyncIterator[Bench]:
    label = VersionLabel()
    await label.change(PolicyVersion(1, 3))
    blocking = connect(redis_url, block_s=2.0)
    yield Bench(redis, blocking, label, OneToken(label), Drain(), WorkerLimits(entries=4, read_count=READ_COUNT))
    await blocking.aclose()


def tasks_key() -> str:
    return keys.stream(JOB, Stage.TASKS)


async def test_a_task_becomes_a_group_on_the_next_stream(bench: Bench) -> None:
    await bench.ask(TASK)
    async with bench.running():
        (group,) = await bench.groups(1)
    assert group.task == TASK
    assert group.failure is None
    assert group.server == "r0"
    assert [rollout.max_policy_version for rollout in group.rollouts] == [3, 3]
    assert await bench.redis.xlen(tasks_key()) == 0


async def test_nothing_is_taken_before_the_weights_have_come(bench: Bench) -> None:
    await bench.label.change(None)
    await bench.ask(TASK)
    async with bench.running():
        await asyncio.sleep(0.7)
        assert not await bench.redis.exists(keys.stream(JOB, Stage.ROLLOUTS))
        assert await bench.redis.xinfo_groups(tasks_key()) == [], "the task was taken"
        await bench.label.change(PolicyVersion(1, 0))
        await bench.groups(1)


async def test_a_task_waits_for_the_version_that_it_asks_for(bench: Bench) -> None:
    await bench.ask(dataclasses.replace(TASK, min_policy_version=4))
    async with bench.running():
        await asyncio.sleep(0.4)
        assert bench.engine.started == 0
        await bench.label.change(PolicyVersion(1, 4))
        (group,) = await bench.groups(1)
    assert group.min_policy_version == 4


async def test_a_version_that_does_not_come_in_time_fails_the_group(bench: Bench) -> None:
    await bench.ask(dataclasses.replace(TASK, min_policy_version=9, timeout_s=0.2))
    async with bench.running():
        (group,) = await bench.groups(1)
    assert group.failure == "policy version (1, 9) did not arrive within 0.2 s"


async def test_a_task_of_an_older_lineage_is_dropped(bench: Bench) -> None:
    await bench.label.change(PolicyVersion(2, 0))
    await bench.ask(TASK)
    async with bench.running():
        await bench.reach(tasks_key(), 0)
    assert bench.engine.started == 0
    assert not await bench.redis.exists(keys.stream(JOB, Stage.ROLLOUTS))


async def test_a_new_lineage_aborts_what_is_sampled_for_the_old_one(bench: Bench) -> None:
    bench.engine.go.clear()
    await bench.ask(TASK)
    async with bench.running():
        await bench.sampling(1)
        await bench.label.change(PolicyVersion(2, 0))
        await bench.reach(tasks_key(), 0)
    assert bench.engine.aborted == 1
    assert not await bench.redis.exists(keys.stream(JOB, Stage.ROLLOUTS))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xc1", "not MessagePack"),
        (b"\x80", "not a valid Task"),
        (b"x" * (MIN_ENTRY_BYTES + 1), "exceeds the limit"),
        (codec.encode(dataclasses.replace(TASK, job_id="other"), MIN_ENTRY_BYTES), "belongs to job 'other'"),
        (codec.encode(dataclasses.replace(TASK, group_id=5), MIN_ENTRY_BYTES), "its task 'train:1:5:1'"),
    ],
    ids=["garbage", "no task", "oversized", "other job", "other member"],
)
async def test_an_entry_that_cannot_be_used_is_put_aside_and_nothing_stops(
    bench: Bench, payload: bytes, reason: str
) -> None:
    await streams.add(bench.redis, JOB, Stage.TASKS, TASK.member, payload)
    await bench.ask(dataclasses.replace(TASK, group_id=1))
    async with bench.running():
        (group,) = await bench.groups(1)
        await bench.reach(keys.dead(JOB, Stage.TASKS), 1)
    assert group.task.group_id == 1
    (fields,) = await bench.entries(keys.dead(JOB, Stage.TASKS))
    assert reason in fields[b"reason"].decode()


async def test_an_entry_that_was_delivered_too_often_is_put_aside(bench: Bench) -> None:
    await bench.ask(TASK)
    other = Consumer(
        bench.redis, bench.blocking, JOB, Stage.TASKS, group=CONSUMER_GROUP, name="r0", limit_bytes=MIN_ENTRY_BYTES
    )
    while not (entries := await other.read(1, 0.1)):
        pass
    for _ in range(5):
        await bench.redis.xclaim(tasks_key(), CONSUMER_GROUP, "r0", 0, [entries[0].id])
    async with bench.running():
        await bench.reach(keys.dead(JOB, Stage.TASKS), 1)
    assert bench.engine.started == 0
    (group,) = await bench.groups(1)
    assert group.failure == "delivered 7 times without success", "its learner need not wait for a deadline"
    assert group.permanent
    assert await bench.redis.xlen(tasks_key()) == 0


async def test_a_group_that_is_too_large_fails_instead(bench: Bench) -> None:
    bench.engine.text = "x" * MIN_ENTRY_BYTES
    await bench.ask(TASK)
    async with bench.running():
        (group,) = await bench.groups(1)
    assert group.failure is not None
    assert "too large" in group.failure
    assert group.rollouts == ()


async def test_the_same_group_is_sent_where_the_job_has_a_higher_limit(bench: Bench) -> None:
    bench.engine.text, bench.limit_bytes = "x" * MIN_ENTRY_BYTES, 3 * MIN_ENTRY_BYTES
    await bench.ask(TASK)
    async with bench.running():
        (group,) = await bench.groups(1)
    assert [rollout.text for rollout in group.rollouts] == [bench.engine.text] * 2


async def test_a_full_stream_makes_the_group_wait(bench: Bench) -> None:
    bench.limits = dataclasses.replace(bench.limits, bound=1)
    await bench.ask(TASK, dataclasses.replace(TASK, group_id=1))
    async with bench.running():
        await bench.groups(1)
        await asyncio.sleep(0.5)
        assert await bench.redis.xlen(tasks_key()) == 1
        await bench.redis.xtrim(keys.stream(JOB, Stage.ROLLOUTS), maxlen=0)
        await bench.groups(1)
        await bench.reach(tasks_key(), 0)


async def test_no_more_groups_are_taken_than_may_be_worked_on(bench: Bench) -> None:
    bench.engine.go.clear()
    await bench.ask(*(dataclasses.replace(TASK, group_id=i) for i in range(9)))
    async with bench.running() as loop:
        await bench.sampling(4)
        await asyncio.sleep(0.3)
        assert (bench.engine.started, loop.groups) == (4, 4)
        bench.engine.go.set()
        assert len(await bench.groups(9)) == 9


async def test_a_drain_finishes_what_was_taken_and_takes_no_more(bench: Bench) -> None:
    bench.engine.go.clear()
    await bench.ask(*(dataclasses.replace(TASK, group_id=i) for i in range(6)))
    async with bench.running():
        await bench.sampling(4)
        bench.drain.request()
        await asyncio.sleep(0.05)
        bench.engine.go.set()
        await bench.groups(4)
    assert bench.engine.started == 4
    assert await bench.redis.xlen(tasks_key()) == 2


async def test_what_is_not_done_when_it_is_cancelled_stays_pending_for_others(bench: Bench) -> None:
    bench.engine.go.clear()
    await bench.ask(TASK)
    async with bench.running():
        await bench.sampling(1)
    assert bench.engine.aborted == 1
    assert (await bench.redis.xpending(tasks_key(), CONSUMER_GROUP))["pending"] == 1
    bench.engine.go.set()
    async with bench.running():
        await bench.groups(1)


async def test_a_task_that_takes_too_long_fails_its_group(bench: Bench) -> None:
    bench.engine.go.clear()
    await bench.ask(dataclasses.replace(TASK, timeout_s=0.2))
    async with bench.running():
        (group,) = await bench.groups(1)
    assert group.failure == "0 of 2 rollouts were sampled within 0.2 s; the group needs 2"
    assert not group.permanent
    assert bench.engine.aborted == 1
    assert group.generate_s >= 0.2


async def test_an_engine_that_dies_ends_the_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(*_: object) -> None:
        raise RuntimeError("the engine died")

    monkeypatch.setattr(sampler_module.Sampler, "sample", die)
    await bench.ask(TASK)
    loop = bench.loop()
    with pytest.raises(RuntimeError, match="the engine died"):
        async with asyncio.timeout(10):
            await loop.run()
