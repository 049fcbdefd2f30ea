"""The work queue on real servers: nothing is lost, nothing has its effect twice."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from services.common.errors import Fenced, StreamFull
from services.common.redis import keys
from services.common.redis.connection import connect, text
from services.common.redis.fencing import Fence
from services.common.redis.keys import Stage
from services.common.service.heartbeat import take_incarnation
from services.common.streams import consumer as consumer_module
from services.common.streams.consumer import DEAD_PAYLOAD_BYTES, Consumer
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.stream import add, depths, forget

JOB = "job-1"
Redis = redis.asyncio.Redis


@pytest.fixture
async def blocking(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url, block_s=2.0)
    yield client
    await client.aclose()


def consumer(
    redis: Redis, blocking: Redis, name: str = "a", *, lease_s: float = 60.0, stage: Stage = Stage.ROLLOUTS,
    fence: Fence | None = None, limit_bytes: int = MIN_ENTRY_BYTES,
) -> Consumer:  # fmt: skip
    return Consumer(
        redis, blocking, JOB, stage, group="g", name=name, limit_bytes=limit_bytes, lease_s=lease_s, fence=fence
    )


async def fill(redis: Redis, count: int, *, first: int = 0) -> None:
    for number in range(first, first + count):
        assert await add(redis, JOB, Stage.ROLLOUTS, f"train:{number}:1", b"payload %d" % number)


async def entries_of(redis: Redis, key: str) -> list[dict[bytes, bytes]]:
    reply: Any = await redis.xrange(key)
    return [fields for _, fields in reply]


async def members(redis: Redis, stage: Stage) -> list[str]:
    return [fields[b"member"].decode() for fields in await entries_of(redis, keys.stream(JOB, stage))]


async def pending(redis: Redis) -> int:
    summary: Any = await redis.xpending(keys.stream(JOB, Stage.ROLLOUTS), "g")
    return int(summary["pending"])


async def test_a_member_is_added_once_however_often_it_is_sent(redis: Redis) -> None:
    added = [await add(redis, JOB, Stage.TASKS, "train:7:1", payload) for payload in (b"first", b"again")]
    assert added == [True, False]
    assert await members(redis, Stage.TASKS) == ["train:7:1"]


async def test_a_member_stays_known_after_its_entry_has_gone(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 1)
    reader = consumer(redis, blocking)
    for entry in await reader.read(1, 0.5):
        await reader.ack(entry)
    assert not await add(redis, JOB, Stage.ROLLOUTS, "train:0:1", b"sent again after a lost reply")
    assert (await depths(redis, JOB))[Stage.ROLLOUTS] == 0


async def test_of_many_producers_at_once_one_adds(redis: Redis) -> None:
    added = await asyncio.gather(*(add(redis, JOB, Stage.TASKS, "train:0:1", b"x") for _ in range(20)))
    assert sum(added) == 1
    assert (await depths(redis, JOB))[Stage.TASKS] == 1


async def test_a_full_stream_refuses_and_forgets_that_it_was_asked(redis: Redis) -> None:
    for number in range(2):
        await add(redis, JOB, Stage.TASKS, f"train:{number}:1", b"x", bound=2)
    with pytest.raises(StreamFull, match="tasks of job job-1 holds 2"):
        await add(redis, JOB, Stage.TASKS, "train:2:1", b"x", bound=2)
    assert await members(redis, Stage.TASKS) == ["train:0:1", "train:1:1"]
    assert await add(redis, JOB, Stage.TASKS, "train:2:1", b"x", bound=3)


async def test_a_full_stream_still_absorbs_what_it_has_seen(redis: Redis) -> None:
    await add(redis, JOB, Stage.TASKS, "train:0:1", b"x", bound=1)
    assert not await add(redis, JOB, Stage.TASKS, "train:0:1", b"x", bound=1)


async def test_entries_come_in_order_with_their_payloads_and_deliveries(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 3)
    entries = await consumer(redis, blocking).read(10, 0.5)
    assert [(entry.member, entry.payload, entry.deliveries) for entry in entries] == [
        (f"train:{n}:1", b"payload %d" % n, 1) for n in range(3)
    ]


async def test_entries_that_come_shortly_after_a_read_are_read_together(
    redis: Redis, blocking: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "PACE_S", 1.0)
    reader = consumer(redis, blocking)
    await fill(redis, 1)
    assert len(await reader.read(10, 0.5)) == 1, "the first read does not wait for company"
    following = asyncio.create_task(reader.read(10, 0.5))
    for number in range(1, 4):
        await asyncio.sleep(0.05)
        await fill(redis, 1, first=number)
    assert [entry.member for entry in await following] == [f"train:{n}:1" for n in range(1, 4)]


async def test_a_read_waits_for_the_first_entry(redis: Redis, blocking: Redis) -> None:
    reader = consumer(redis, blocking)
    assert await reader.read(1, 0.05) == []
    waiting = asyncio.create_task(reader.read(1, 2.0))
    await asyncio.sleep(0.1)
    await fill(redis, 1)
    assert [entry.member for entry in await asyncio.wait_for(waiting, 2.0)] == ["train:0:1"]


async def test_an_entry_added_before_the_consumer_group_is_delivered(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 1)
    reader = consumer(redis, blocking)
    assert [entry.member for entry in await reader.read(1, 0.2)] == ["train:0:1"]


async def test_two_consumers_share_the_work(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 4)
    one, two = consumer(redis, blocking, "one"), consumer(redis, blocking, "two")
    taken = await one.read(2, 0.5) + await two.read(2, 0.5)
    assert sorted(entry.member for entry in taken) == [f"train:{n}:1" for n in range(4)]


async def test_a_hop_moves_the_entry_in_one_step(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 1)
    reader = consumer(redis, blocking)
    [entry] = await reader.read(1, 0.5)
    assert reader.held == 1
    assert await reader.hop(entry, Stage.SCORED, b"judged")
    assert await members(redis, Stage.SCORED) == ["train:0:1"]
    assert await redis.xlen(keys.stream(JOB, Stage.ROLLOUTS)) == 0
    assert await pending(redis) == 0
    assert reader.held == 0


async def test_a_hop_repeated_changes_nothing(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 2)
    reader = consumer(redis, blocking)
    entry, other = await reader.read(2, 0.5)
    moved = [await reader.hop(entry, Stage.SCORED, b"judged") for _ in range(3)]
    assert moved == [True, False, False]
    assert await members(redis, Stage.SCORED) == ["train:0:1"]
    assert await pending(redis) == 1
    assert await reader.hop(other, Stage.SCORED, b"judged")


async def test_two_holders_of_one_entry_move_it_once(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 1)
    slow, quick = consumer(redis, blocking, "slow", lease_s=0.1), consumer(redis, blocking, "quick", lease_s=0.1)
    [held] = await slow.read(1, 0.5)
    await asyncio.sleep(0.15)
    [claimed] = await quick.read(1, 0.5)
    assert await quick.hop(claimed, Stage.SCORED, b"quick")
    assert not await slow.hop(held, Stage.SCORED, b"slow")
    [fields] = await entries_of(redis, keys.stream(JOB, Stage.SCORED))
    assert fields[b"d"] == b"quick"


async def test_a_hop_to_a_full_stream_changes_nothing(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 2)
    reader = consumer(redis, blocking)
    one, two = await reader.read(2, 0.5)
    assert await reader.hop(one, Stage.SCORED, b"judged", bound=1)
    with pytest.raises(StreamFull, match="scored"):
        await reader.hop(two, Stage.SCORED, b"judged", bound=1)
    assert reader.held == 1
    assert await pending(redis) == 1
    assert await members(redis, Stage.ROLLOUTS) == ["train:1:1"]
    assert await reader.hop(two, Stage.SCORED, b"judged", bound=2)


async def test_after_a_restart_own_pending_entries_come_first_and_once(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 5)
    await consumer(redis, blocking).read(5, 0.5)
    await fill(redis, 1, first=5)

    restarted = consumer(redis, blocking)
    pages = [await restarted.read(2, 0.2) for _ in range(4)]
    assert [[entry.member for entry in page] for page in pages] == [
        ["train:0:1", "train:1:1"], ["train:2:1", "train:3:1"], ["train:4:1"], ["train:5:1"],
    ]  # fmt: skip
    assert [entry.deliveries for page in pages for entry in page] == [2, 2, 2, 2, 2, 1]
    assert await restarted.read(5, 0.05) == []


async def test_entries_of_a_dead_consumer_are_claimed_after_the_lease_and_not_before(
    redis: Redis, blocking: Redis
) -> None:
    await fill(redis, 3)
    await consumer(redis, blocking, "dead").read(3, 0.5)
    heir = consumer(redis, blocking, "heir", lease_s=0.4)
    assert await heir.read(10, 0.05) == []
    await asyncio.sleep(0.5)
    claimed = await heir.read(10, 0.05)
    assert [entry.member for entry in claimed] == [f"train:{n}:1" for n in range(3)]
    assert [entry.deliveries for entry in claimed] == [2, 2, 2]


async def test_claimed_entries_between_others_that_are_held_have_their_own_deliveries(
    redis: Redis, blocking: Redis
) -> None:
    await fill(redis, 8)
    heir, dead = consumer(redis, blocking, "heir", lease_s=0.4), consumer(redis, blocking, "dead")
    for _ in range(4):
        await heir.read(1, 0.5)
        await dead.read(1, 0.5)
    await asyncio.sleep(0.5)
    await heir.renew()
    claimed = await heir.read(10, 0.05)
    assert [(entry.member, entry.deliveries) for entry in claimed] == [(f"train:{n}:1", 2) for n in (1, 3, 5, 7)]


async def test_a_renewed_lease_is_not_claimed(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 1)
    holder, other = consumer(redis, blocking, "holder"), consumer(redis, blocking, "other", lease_s=0.4)
    [entry] = await holder.read(1, 0.5)
    for _ in range(4):
        await asyncio.sleep(0.2)
        await holder.renew()
        assert await other.read(1, 0.01) == []
    [left] = await redis.xpending_range(keys.stream(JOB, Stage.ROLLOUTS), "g", "-", "+", 10)
    assert left["times_delivered"] == 1, "renewing is no delivery"
    assert await holder.hop(entry, Stage.SCORED, b"judged")


async def test_abandoned_entries_behind_many_living_ones_are_claimed_too(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 60)
    living, dead = consumer(redis, blocking, "living"), consumer(redis, blocking, "dead")
    await living.read(50, 0.5)
    await dead.read(10, 0.5)
    heir = consumer(redis, blocking, "heir", lease_s=0.5)
    await asyncio.sleep(0.6)
    found: list[str] = []
    for _ in range(40):
        await living.renew()
        found += [entry.member for entry in await heir.read(2, 0.01)]
        if len(found) == 10:
            break
        await asyncio.sleep(0.15)
    assert sorted(found) == sorted(f"train:{n}:1" for n in range(50, 60))


async def test_a_reply_lost_on_its_way_is_delivered_again(redis: Redis, blocking: Redis) -> None:
    reader = consumer(redis, blocking, lease_s=0.3)
    assert await reader.read(1, 0.01) == []
    await fill(redis, 1)
    # Its read reached the server, but the reply never came back: the entry is pending under its name and not held.
    await blocking.xreadgroup("g", "a", {keys.stream(JOB, Stage.ROLLOUTS): ">"}, count=1)
    await asyncio.sleep(0.4)
    assert [entry.member for entry in await reader.read(1, 0.01)] == ["train:0:1"]


async def test_a_dead_letter_keeps_the_entry_and_what_is_known_of_it(redis: Redis, blocking: Redis) -> None:
    payload = b"x" * (10 * DEAD_PAYLOAD_BYTES)
    await add(redis, JOB, Stage.ROLLOUTS, "train:0:1", payload)
    reader, added = consumer(redis, blocking), time.time()
    [entry] = await reader.read(1, 0.5)
    assert [await reader.dead_letter(entry, "task.prompt: Field required") for _ in range(2)] == [True, False]
    [letter] = await entries_of(redis, keys.dead(JOB, Stage.ROLLOUTS))
    assert letter[b"reason"] == b"task.prompt: Field required"
    assert (letter[b"member"], letter[b"d"], letter[b"consumer"]) == (b"train:0:1", payload, b"a")
    assert (int(letter[b"size"]), int(letter[b"deliveries"])) == (len(payload), 1)
    assert abs(float(letter[b"first_seen"]) - added) < 5
    assert float(letter[b"first_seen"]) <= float(letter[b"last_seen"]) < added + 5
    assert reader.held == 0
    assert await pending(redis) == 0
    assert await redis.xlen(keys.stream(JOB, Stage.ROLLOUTS)) == 0


async def test_dead_letters_keep_so_much_payload_and_then_its_beginning(
    redis: Redis, blocking: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * DEAD_PAYLOAD_BYTES
    monkeypatch.setattr(consumer_module, "DEAD_BUDGET_BYTES", 2 * size)
    for number in range(3):
        await add(redis, JOB, Stage.ROLLOUTS, f"train:{number}:1", b"x" * size)
    await redis.xadd(keys.stream(JOB, Stage.ROLLOUTS), {"member": "big", "d": b"y" * (MIN_ENTRY_BYTES + 1)})
    reader = consumer(redis, blocking)
    for entry in await reader.read(4, 0.5):
        await reader.dead_letter(entry, "spoiled")
    letters = await entries_of(redis, keys.dead(JOB, Stage.ROLLOUTS))
    assert [len(letter[b"d"]) for letter in letters] == [size, size, DEAD_PAYLOAD_BYTES, DEAD_PAYLOAD_BYTES]
    assert [int(letter[b"size"]) for letter in letters] == [size, size, size, MIN_ENTRY_BYTES + 1]


async def test_the_higher_the_limit_of_an_entry_the_fewer_are_read_at_once(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 8)
    reader = consumer(redis, blocking, "a", limit_bytes=100 * 1024**2)
    assert [len(await reader.read(8, 0.5)) for _ in range(2)] == [2, 2], "256 MiB at most"
    assert len(await consumer(redis, blocking, "b", limit_bytes=512 * 1024**2).read(8, 0.5)) == 1, "and never none"
    assert len(await consumer(redis, blocking, "c").read(8, 0.5)) == 3


async def test_a_consumer_whose_entry_was_claimed_changes_nothing(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 4)
    zombie, heir = consumer(redis, blocking, "zombie", lease_s=0.1), consumer(redis, blocking, "heir", lease_s=0.1)
    held = await zombie.read(4, 0.5)
    await asyncio.sleep(0.15)
    claimed = await heir.read(4, 0.5)
    assert [entry.id for entry in claimed] == [entry.id for entry in held]

    before = await redis.xpending_range(keys.stream(JOB, Stage.ROLLOUTS), "g", "-", "+", 10)
    assert await zombie.renew() == {entry.id for entry in held}, "renewing must not take them back"
    assert not await zombie.hop(held[0], Stage.SCORED, b"zombie")
    assert not await zombie.dead_letter(held[1], "zombie")
    assert await zombie.ack(held[2], held[3]) == 0
    after = await redis.xpending_range(keys.stream(JOB, Stage.ROLLOUTS), "g", "-", "+", 10)
    assert [(item["message_id"], item["consumer"]) for item in after] == [
        (item["message_id"], item["consumer"]) for item in before
    ]
    assert await redis.exists(keys.stream(JOB, Stage.SCORED), keys.dead(JOB, Stage.ROLLOUTS)) == 0
    assert zombie.held == 0
    assert [await heir.hop(entry, Stage.SCORED, b"heir") for entry in claimed] == [True] * 4


async def test_a_consumer_whose_name_a_newer_process_took_writes_nothing_though_the_entries_are_still_the_names(
    redis: Redis, blocking: Redis
) -> None:
    await fill(redis, 4)
    zombie = consumer(redis, blocking, fence=await take_incarnation(redis, "a"))
    held = await zombie.read(4, 0.5)
    token = await take_incarnation(redis, "a")
    heir = consumer(redis, blocking, fence=token)
    for write in (
        zombie.hop(held[0], Stage.SCORED, b"zombie"),
        zombie.dead_letter(held[1], "zombie"),
        zombie.ack(held[2]),
        zombie.renew(),
        add(redis, JOB, Stage.SCORED, "train:9:1", b"zombie", fence=zombie._fence),
    ):
        with pytest.raises(Fenced, match="worker a: this process is incarnation 1"):
            await write
    assert await entries_of(redis, keys.stream(JOB, Stage.SCORED)) == []
    assert await entries_of(redis, keys.dead(JOB, Stage.ROLLOUTS)) == []
    own = await heir.read(4, 0.5)
    assert [entry.id for entry in own] == [entry.id for entry in held]
    await redis.delete(token.record)  # as a Redis that was put back to an older state
    assert [await heir.hop(entry, Stage.SCORED, b"heir") for entry in own] == [True] * 4


async def test_of_entries_acked_together_only_the_consumers_own_go(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 2)
    slow, quick = consumer(redis, blocking, "slow"), consumer(redis, blocking, "quick")
    mine, other = await slow.read(2, 0.5)
    await redis.xclaim(keys.stream(JOB, Stage.ROLLOUTS), "g", "quick", 0, [other.id])
    assert await slow.ack(mine, other) == 1
    assert [entry.id for entry in await quick.read(2, 0.1)] == [other.id]


async def test_streams_of_an_active_job_are_not_forgotten(redis: Redis) -> None:
    await fill(redis, 1)
    await redis.hset(keys.ACTIVE, JOB, "{}")
    await forget(redis, JOB)
    assert await members(redis, Stage.ROLLOUTS) == ["train:0:1"]
    await redis.hdel(keys.ACTIVE, JOB)
    await forget(redis, JOB)
    assert await redis.keys("millrace:{job-1}:*") == []


async def test_an_acked_entry_is_gone(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 1)
    reader = consumer(redis, blocking)
    [entry] = await reader.read(1, 0.5)
    await reader.ack(entry)
    await reader.ack(entry)
    assert reader.held == 0
    assert (await depths(redis, JOB))[Stage.ROLLOUTS] == 0


async def test_an_entry_without_our_fields_is_delivered_to_be_put_aside(redis: Redis, blocking: Redis) -> None:
    await redis.xadd(keys.stream(JOB, Stage.ROLLOUTS), {"something": "else"})
    [entry] = await consumer(redis, blocking).read(1, 0.5)
    assert (entry.member, entry.payload) == ("", b"")


async def test_a_flushed_server_heals(redis: Redis, blocking: Redis) -> None:
    await fill(redis, 3)
    reader = consumer(redis, blocking, lease_s=0.2)
    held = await reader.read(2, 0.5)
    await redis.flushall()
    await reader.renew()
    assert await reader.hop(held[0], Stage.SCORED, b"judged") in {True, False}
    await reader.dead_letter(held[1], "spoiled")
    assert reader.held == 0

    await fill(redis, 2)
    await asyncio.sleep(0.3)
    found = [entry.member for _ in range(3) for entry in await reader.read(5, 0.1)]
    assert found == ["train:0:1", "train:1:1"]


async def test_a_flush_during_a_blocking_read_heals(redis: Redis, blocking: Redis) -> None:
    reader = consumer(redis, blocking)
    assert await reader.read(1, 0.05) == []
    waiting = asyncio.create_task(reader.read(1, 2.0))
    await asyncio.sleep(0.1)
    await redis.flushall()
    assert await asyncio.wait_for(waiting, 3.0) == []
    await fill(redis, 1)
    assert [entry.member for entry in await reader.read(1, 1.0)] == ["train:0:1"]


async def test_a_reader_that_is_cancelled_ends_even_while_it_connects(redis_url: str, redis: Redis) -> None:
    dice = random.Random(3)

    async def read_on(reader: Consumer) -> None:
        while True:
            await reader.read(1, 0.2)

    for _ in range(100):
        fresh = connect(redis_url, block_s=0.2)
        reading = asyncio.create_task(read_on(consumer(redis, fresh)))
        await asyncio.sleep(dice.uniform(0, 0.02))
        reading.cancel()
        done, _ = await asyncio.wait({reading}, timeout=2.0)
        assert done, "the cancellation was swallowed"
        assert reading.cancelled()
        await fresh.aclose()


async def test_stages_and_jobs_do_not_mix(redis: Redis, blocking: Redis) -> None:
    await add(redis, JOB, Stage.TASKS, "train:0:1", b"task")
    await add(redis, "job-2", Stage.ROLLOUTS, "train:0:1", b"other job")
    assert await add(redis, JOB, Stage.ROLLOUTS, "train:0:1", b"rollout")
    [entry] = await consumer(redis, blocking).read(10, 0.5)
    assert entry.payload == b"rollout"
    assert {text(key).count("{job-1}") for key in await redis.keys("millrace:{job-1}:*")} == {1}
