"""Job records on real servers: an older head writes nothing, a lost reply changes nothing, and what Redis loses comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from services.common.errors import Fenced, JobConflict, RecordGone
from services.common.jobs.folder import JobFolder
from services.common.jobs.record import LIVE, ActiveJob, JobRecord, JobState
from services.common.jobs.restore import Restorer, restore
from services.common.jobs.step_record import StepRecord
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.fencing import MAX_RESTORES
from services.common.redis.keys import Stage
from services.common.spec.job import JobSpec, parse_spec
from services.common.streams.consumer import Consumer
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.stream import add
from services.learner.storage import job_store
from services.learner.storage.job_store import HeadStore

Redis = redis.asyncio.Redis
SPEC = "name: demo\nmodel: {path: tiny}\ndata: {train: {source: 'reasoning_gym:chain_sum'}}\n"


def spec() -> JobSpec:
    return parse_spec(SPEC)


@pytest.fixture
def store(redis: Redis, tmp_path: Path) -> JobStore:
    return JobStore(redis, tmp_path)


async def running(store: JobStore, redis: Redis, jobs_dir: Path) -> tuple[str, HeadStore]:
    """A job that a learner has claimed, and its head."""
    job_id = (await store.create(spec())).id
    assert await store.claim("learner") is not None
    head = await HeadStore.begin(redis, jobs_dir, job_id)
    await head.activate(ActiveJob(job_id, 1, "here:1", 0, "/models/tiny", {}))
    await head.transition(JobState.RUNNING, allowed=LIVE)
    return job_id, head


async def snapshot(redis: Redis) -> dict[bytes, Any]:
    """Everything that Redis holds."""
    return {name: await redis.dump(name) async for name in redis.scan_iter("*")}


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


Write = Callable[[HeadStore, str], Awaitable[Any]]
WRITES: dict[str, Write] = {
    "transition": lambda head, _job: head.transition(JobState.FAILED, allowed=LIVE, cause="zombie"),
    "update": lambda head, _job: head.update(step=99),
    "event": lambda head, _job: head.event("step", {"step": 99}),
    "step": lambda head, _job: head.append_step(2, StepRecord(step=2)),
    "evaluation": lambda head, _job: head.append_eval({"step": 1}),
    "activate": lambda head, job: head.activate(ActiveJob(job, 9, "zombie:1", 9, "/models/tiny", {})),
    "retire": lambda head, _job: head.retire(),
    "rewind": lambda head, _job: head.rewind(0),
    "task": lambda head, job: add(head._redis, job, Stage.TASKS, "train:9:1", b"zombie", fence=head.fence),
    "read": lambda head, _job: head.record(),
    "a file of the job": lambda head, _job: asyncio.to_thread(head.require_newest),
}


@pytest.mark.parametrize("write", WRITES)
async def test_a_head_of_an_older_incarnation_writes_nothing(
    redis: Redis, store: JobStore, tmp_path: Path, write: str
) -> None:
    job_id, old = await running(store, redis, tmp_path)
    await add(redis, job_id, Stage.TASKS, "train:0:1", b"task", fence=old.fence)
    await old.append_step(1, StepRecord(step=1))
    new = await HeadStore.begin(redis, tmp_path, job_id)
    assert new.fence.incarnation == old.fence.incarnation + 1
    before, files = await snapshot(redis), contents(tmp_path)
    with pytest.raises(Fenced, match="incarnation 1"):
        await WRITES[write](old, job_id)
    assert await snapshot(redis) == before
    assert contents(tmp_path) == files
    await new.update(step=1)


async def test_a_head_of_an_older_incarnation_acks_and_buries_nothing(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, old = await running(store, redis, tmp_path)
    for number in range(2):
        await add(redis, job_id, Stage.SCORED, f"train:{number}:1", b"scored")
    consumer = Consumer(
        redis,
        redis,
        job_id,
        Stage.SCORED,
        group="learner",
        name="learner",
        fence=old.fence,
        limit_bytes=MIN_ENTRY_BYTES,
    )
    one, two = await consumer.read(2, 0.5)
    await HeadStore.begin(redis, tmp_path, job_id)  # the same consumer name: the entries are the new head's
    before = await snapshot(redis)
    with pytest.raises(Fenced):
        await consumer.ack(one)
    with pytest.raises(Fenced):
        await consumer.dead_letter(two, "zombie")
    with pytest.raises(Fenced):
        await consumer.renew()
    assert await snapshot(redis) == before


async def test_incarnations_rise_even_when_redis_has_forgotten_them(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, _ = await running(store, redis, tmp_path)
    for expected in (2, 3):
        assert (await HeadStore.begin(redis, tmp_path, job_id)).fence.incarnation == expected
    await redis.flushall()
    assert (await HeadStore.begin(redis, tmp_path, job_id)).fence.incarnation == 4


async def test_incarnations_rise_even_when_others_have_written_the_record_of_an_emptied_redis(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, old = await running(store, redis, tmp_path)
    await redis.flushall()
    assert await Restorer(redis, tmp_path, "learner", lambda _: True).restore_lost() == [job_id]
    await store.records.save(job_id)
    await store.pause(job_id)
    new = await HeadStore.begin(redis, tmp_path, job_id)
    assert new.fence.incarnation == old.fence.incarnation + 1
    with pytest.raises(Fenced):
        await old.update(step=99)


async def test_an_older_head_cannot_bring_a_lost_record_back(redis: Redis, store: JobStore, tmp_path: Path) -> None:
    job_id, old = await running(store, redis, tmp_path)
    new = await HeadStore.begin(redis, tmp_path, job_id)
    await redis.flushall()
    with pytest.raises(Fenced):
        await old.update(step=99)
    assert await redis.keys("*") == []
    await new.update(step=3)
    assert (await store.get(job_id)).step == 3


async def test_a_running_job_whose_redis_is_emptied_is_back_at_its_next_write(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, head = await running(store, redis, tmp_path)
    for step in (1, 2, 3):
        await head.update(step=step, policy_version=step, groups=json.dumps({"issued": step}))
        await head.append_step(step, StepRecord(step=step))
    await head.append_eval({"step": 0, "avg_at_k": 0.5})
    before, restored = await store.get(job_id), []
    head.on_restored = lambda: restored.append(1)

    await redis.flushall()
    await asyncio.gather(*(head.event("checkpoint", {"step": 3}) for _ in range(5)))
    assert restored == [1], "many writes find it gone, one brings it back"
    assert await store.get(job_id) == before
    assert [json.loads(raw)["step"] for raw in await redis.lrange(keys.steps(job_id), 0, -1)] == [1, 2, 3]
    assert await head.evaluated_steps() == {0}
    assert job_id in await store.active(), "servers may attach again"
    assert await store.held_by("learner") == before
    assert await redis.zrange(keys.QUEUE, 0, -1) == []


async def test_a_redis_emptied_again_before_servers_see_the_job_is_put_right_again(
    redis: Redis, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, head = await running(store, redis, tmp_path)
    lost: list[str] = []

    async def restore_and_lose(redis: Redis, jobs_dir: Path, record: JobRecord, incarnation: int | None = None) -> bool:
        restored = await restore(redis, jobs_dir, record, incarnation)
        if not lost:
            lost.append(job_id)
            await redis.flushall()
        return restored

    monkeypatch.setattr(job_store, "restore", restore_and_lose)
    await redis.flushall()
    await head.event("checkpoint", {"step": 3})
    assert lost
    assert job_id in await store.active()
    assert (await store.get(job_id)).incarnation == head.fence.incarnation


@pytest.mark.parametrize(("times", "back"), [(MAX_RESTORES, True), (MAX_RESTORES + 1, False)])
async def test_a_write_outlives_a_redis_that_is_emptied_again_while_it_is_put_right(
    redis: Redis, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, back: bool
) -> None:
    original, left = HeadStore.restore, times

    async def restore_and_lose(head: HeadStore) -> None:
        nonlocal left
        left -= 1
        await original(head)
        if left > 0:
            await redis.flushall()

    monkeypatch.setattr(HeadStore, "restore", restore_and_lose)
    job_id, head = await running(store, redis, tmp_path)
    await redis.flushall()
    if back:
        await head.event("checkpoint", {"step": 3})
        assert job_id in await store.active()
    else:
        with pytest.raises(RecordGone, match="stays gone"):
            await head.event("checkpoint", {"step": 3})


async def test_a_head_that_only_looks_notices_that_redis_was_emptied(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, head = await running(store, redis, tmp_path)
    await redis.flushall()
    assert (await head.record()).state is JobState.RUNNING
    assert job_id in await store.active()


async def test_a_record_that_the_gateway_put_back_is_still_restored_by_its_head(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, head = await running(store, redis, tmp_path)
    restored: list[int] = []
    head.on_restored = lambda: restored.append(1)
    await redis.flushall()
    assert await Restorer(redis, tmp_path, "gateway", lambda _: True).restore_lost() == [job_id]
    await store.pause(job_id)  # a person's request in between is kept
    assert await store.active() == {}
    record = await head.record()
    assert restored == [1]
    assert (record.state, record.pause_requested, record.incarnation) == (JobState.RUNNING, True, 1)
    assert job_id in await store.active()


async def test_a_redis_put_back_to_an_older_state_is_brought_up_to_date(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, old = await running(store, redis, tmp_path)
    await old.append_step(1, StepRecord(step=1))
    past = await snapshot(redis)
    head = await HeadStore.begin(redis, tmp_path, job_id)
    for step in (2, 3):
        await head.append_step(step, StepRecord(step=step))
    await redis.flushall()
    for name, value in past.items():
        await redis.restore(name, 0, value)
    await head.append_step(4, StepRecord(step=4))
    assert [json.loads(raw)["step"] for raw in await redis.lrange(keys.steps(job_id), 0, -1)] == [1, 2, 3, 4]
    assert (await store.get(job_id)).incarnation == head.fence.incarnation


async def test_a_rewind_drops_later_steps_and_evaluations_for_good(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, head = await running(store, redis, tmp_path)
    for step in (1, 2, 3):
        await head.append_step(step, StepRecord.model_validate({"step": step, "course": "first"}))
        await head.append_eval({"step": step})
    await head.rewind(1)
    await head.append_step(2, StepRecord.model_validate({"step": 2, "course": "second"}))
    for _ in range(2):
        steps = [json.loads(raw) for raw in await redis.lrange(keys.steps(job_id), 0, -1)]
        assert [(step["step"], step["course"]) for step in steps] == [(1, "first"), (2, "second")]
        assert await head.evaluated_steps() == {1}
        await redis.flushall()
        await head.record()


async def test_a_head_without_record_and_folder_says_so(redis: Redis, tmp_path: Path) -> None:
    with pytest.raises(RecordGone, match="knows job demo-1"):
        await HeadStore.begin(redis, tmp_path, "demo-1")


async def test_a_write_to_a_job_that_is_not_there_makes_none(redis: Redis) -> None:
    with pytest.raises(JobConflict):
        await JobStore(redis).update("demo-1", step=3)
    assert await redis.keys("*") == []


async def test_what_waited_in_the_queue_waits_again_in_its_order_with_its_key(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    jobs = [(await store.create_once(spec(), f"key-{n}"))[0].id for n in range(3)]
    await store.pause(jobs[1])
    await store.cancel(jobs[2])
    before = [await store.get(row.id) for row in await store.list()]
    restorer = Restorer(redis, tmp_path, "gateway", lambda _: True)
    assert await restorer.restore_lost() == []
    await redis.flushall()
    assert await restorer.restore_lost() == jobs
    assert await restorer.restore_lost() == []
    assert [await store.get(row.id) for row in await store.list()] == before
    assert await redis.zrange(keys.QUEUE, 0, -1) == [job.encode() for job in jobs[:2]]
    again, new = await store.create_once(spec(), "key-0")
    assert (again.id, new) == (jobs[0], False)
    assert 0 < await redis.ttl(keys.idempotency("key-0")) <= 24 * 3600
    newest, new = await store.create_once(spec(), "key-3")
    assert new
    assert [record.id for record in await store.list()] == [newest.id, *reversed(jobs)]
    claimed = await store.claim("learner")
    assert claimed is not None
    assert claimed.id == jobs[0]


async def test_jobs_submitted_to_an_emptied_redis_do_not_hide_that_it_was(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    first = await store.create(spec())
    restorer = Restorer(redis, tmp_path, "gateway", lambda _: True)
    await restorer.restore_lost()
    await redis.flushall()
    second = await store.create(spec())
    assert await restorer.restore_lost() == [first.id]
    assert {record.id for record in await store.list()} == {first.id, second.id}


async def test_a_learner_puts_back_its_own_jobs_only(redis: Redis, store: JobStore, tmp_path: Path) -> None:
    mine = (await store.create(spec())).id
    await store.claim("learner-a")
    others = (await store.create(spec())).id
    await store.claim("learner-b")
    await store.create(spec())
    await redis.flushall()

    def owned(record: JobRecord) -> bool:
        return record.learner == "learner-a" and record.state in LIVE

    assert await Restorer(redis, tmp_path, "learner-a", owned).restore_lost() == [mine]
    claimed = await store.claim("learner-a")
    assert claimed is not None
    assert claimed.id == mine
    assert await store.find(others) is None


async def test_a_folder_that_holds_nothing_that_is_understood_is_passed_over(
    redis: Redis, store: JobStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = (await store.create(spec())).id
    for name, content in {"torn-1": '{"format": 1, "na', "future-1": '{"format": 2}', "odd-1": '{"format": 1}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(content)
        (tmp_path / name / "spec.yaml").write_text(SPEC)
    (tmp_path / "empty-1").mkdir()
    await redis.flushall()
    assert await Restorer(redis, tmp_path, "gateway", lambda _: True).restore_lost() == [good]
    for name in ("torn-1", "future-1", "odd-1"):
        assert name in caplog.text


async def test_of_writers_that_race_the_newest_state_stays_in_the_folder(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id = (await store.create(spec())).id
    writers = [JobStore(redis, tmp_path) for _ in range(8)]
    await asyncio.gather(*(writer.update(job_id, step=step) for step, writer in enumerate(writers, 1)))
    assert store.records.load(job_id) == await store.get(job_id)


async def test_a_folder_that_cannot_be_written_does_not_stop_a_job(
    redis: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    record = await JobStore(redis, tmp_path / "file").create(spec())
    assert record.state is JobState.QUEUED
    assert "cannot be written" in caplog.text


def test_a_torn_last_line_of_a_history_hides_no_other(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.append("step", 1, {"step": 1})
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 2, "da')
    assert [step["step"] for step in folder.history().steps] == [1]
    folder.append("step", 2, {"step": 2})
    assert [step["step"] for step in folder.history().steps] == [1, 2]


async def test_the_look_for_a_held_job_does_not_grow_with_the_jobs_that_ever_were(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, head = await running(store, redis, tmp_path)
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(1, 1201):
            pipe.hset(keys.record(f"later-{number}"), mapping={"state": "succeeded", "learner": "another"})
            pipe.zadd(keys.JOBS, {f"later-{number}": 1000 + number})
        await pipe.execute()
    before = (await redis.info("commandstats"))["cmdstat_hmget"]["calls"]
    held = await store.held_by("learner")
    assert held is not None
    assert held.id == job_id
    assert await store.held_by("another") is None
    assert (await redis.info("commandstats"))["cmdstat_hmget"]["calls"] - before == 2
    await head.transition(JobState.SUCCEEDED, allowed=LIVE)
    assert await store.held_by("learner") is None
    assert await redis.zcard(keys.HELD) == 0


@pytest.mark.parametrize("lost", ["the list alone", "everything"])
async def test_a_held_job_is_found_in_a_redis_without_the_list(
    redis: Redis, store: JobStore, tmp_path: Path, lost: str
) -> None:
    job_id, _ = await running(store, redis, tmp_path)
    await (redis.delete(keys.HELD) if lost == "the list alone" else redis.flushall())
    await Restorer(redis, tmp_path, "learner", lambda _: True).restore_lost()
    held = await store.held_by("learner")
    assert held is not None
    assert held.id == job_id


async def test_records_from_before_failures_were_told_stay_readable(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, head = await running(store, redis, tmp_path)
    await head.update(failure="boom", failed_reasons=json.dumps({"boom": 3}))
    told = await store.get(job_id)
    assert (told.failure, told.failed_reasons) == ("boom", {"boom": 3})
    assert store.records.load(job_id) == told
    await redis.hdel(keys.record(job_id), "failure", "failed_reasons")
    old = await store.get(job_id)
    assert (old.failure, old.failed_reasons) == ("", {})
    path = tmp_path / job_id / "job.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in document.items() if k not in {"failure", "failed_reasons"}}))
    assert store.records.load(job_id) == old


async def test_a_note_is_read_at_once_and_kept_with_the_next_move(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job_id, head = await running(store, redis, tmp_path)
    before = (tmp_path / job_id / "job.json").read_bytes()
    await head.update_in_redis(failure="boom")
    assert (await store.get(job_id)).failure == "boom"
    assert (tmp_path / job_id / "job.json").read_bytes() == before
    await head.transition(JobState.STALLED, allowed=LIVE, cause="why")
    assert json.loads((tmp_path / job_id / "job.json").read_text())["failure"] == "boom"


def hub_spec() -> JobSpec:
    return parse_spec(SPEC.replace("path: tiny", "path: 'hf:org/tiny'"))


async def test_a_job_that_waits_for_a_fetch_is_claimed_only_after_it_in_the_order_of_submission(
    store: JobStore,
) -> None:
    first, _ = await store.create_once(hub_spec(), None, fetching="model.path: hf:org/tiny is being fetched")
    second = await store.create(spec())
    assert (first.state, first.cause) == (JobState.QUEUED, "model.path: hf:org/tiny is being fetched")
    assert await store.fetching() == [first.id]
    claimed = await store.claim("learner-a")
    assert claimed is not None
    assert claimed.id == second.id
    assert await store.claim("learner-b") is None
    third = await store.create(spec())
    await store.fetched(first.id)
    await store.fetched(first.id)
    assert await store.fetching() == []
    order = [await store.claim(f"learner-{name}") for name in "bc"]
    assert [record.id for record in order if record] == [first.id, third.id]


@pytest.mark.parametrize("end", ["cancel", "pause"])
async def test_of_a_job_that_ends_during_its_fetch_nothing_waits_and_a_paused_one_stays_paused(
    redis: Redis, store: JobStore, end: str
) -> None:
    job, _ = await store.create_once(hub_spec(), None, fetching="…")
    await (store.cancel(job.id) if end == "cancel" else store.pause(job.id))
    await store.fetched(job.id)
    assert await store.fetching() == []
    assert await store.claim("learner") is None
    if end == "pause":
        await store.resume(job.id)
        assert (await store.claim("learner")) is not None
    assert await redis.zrange(keys.QUEUE, 0, -1) == []


async def test_a_job_that_redis_has_lost_waits_for_its_fetch_again(
    redis: Redis, store: JobStore, tmp_path: Path
) -> None:
    job, _ = await store.create_once(hub_spec(), None, fetching="…")
    restorer = Restorer(redis, tmp_path, "gateway", lambda _: True)
    await restorer.restore_lost()
    await redis.flushall()
    assert await restorer.restore_lost() == [job.id]
    assert await store.fetching() == [job.id]
    assert await store.claim("learner") is None


async def test_a_repeated_submission_is_known_by_what_was_sent_though_its_revision_resolves_otherwise(
    store: JobStore,
) -> None:
    sent = hub_spec()
    resolved = [sent.with_references({"model.path": sent.references["model.path"].at(digit * 40)}) for digit in "ab"]
    first, _ = await store.create_once(resolved[0], "key", sent=sent, fetching="…")
    again, new = await store.create_once(resolved[1], "key", sent=sent, fetching="…")
    assert (again.id, new) == (first.id, False)
    assert again.spec == resolved[0]
