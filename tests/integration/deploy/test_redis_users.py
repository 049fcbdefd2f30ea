"""Each service's Redis user can do its service's whole work, and nothing of the others'."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from services.common.config.settings import Settings
from services.common.jobs import deaths
from services.common.jobs.folder import JobFolder
from services.common.jobs.record import ActiveJob, JobState
from services.common.jobs.restore import Restorer
from services.common.jobs.retention import Policy, Retention
from services.common.jobs.step_record import StepRecord
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.fencing import Fence
from services.common.redis.keys import Stage
from services.common.service.heartbeat import (
    WorkerKind,
    WorkerStatus,
    live_workers,
    remove_worker,
    take_incarnation,
    write_heartbeat,
)
from services.common.spec.job import JobSpec, parse_spec
from services.common.streams import dead_letters
from services.common.streams.consumer import Consumer
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.stream import add, depths, forget
from services.common.streams.trial import TrialReply, TrialRequest, answer, ask, take
from services.common.streams.types import ScoredGroup
from services.gateway.metrics import GatewayMetrics
from services.learner.storage.job_store import HeadStore
from services.reward.samples import keep_sample
from tests.integration.deploy.conftest import DEPLOY, USERS, Connect, render
from tests.unit.learner.scored_groups import scored_group

SPEC = "name: demo\nmodel: {path: tiny}\ndata: {train: {source: 'reasoning_gym:chain_sum'}}\n"


READERS = tuple(user for user in USERS if user != "environment")
"""They see who works; an environment service sees nobody."""


def spec() -> JobSpec:
    return parse_spec(SPEC)


def consumer(connect_as: Connect, user: str, job: str, stage: Stage, name: str, fence: Fence | None = None) -> Consumer:
    blocking = connect_as(user, block_s=0.1)
    return Consumer(
        connect_as(user),
        blocking,
        job,
        stage,
        group=user,
        name=name,
        lease_s=0.01,
        fence=fence,
        limit_bytes=MIN_ENTRY_BYTES,
    )


def active(job: str) -> ActiveJob:
    return ActiveJob(job, 1, "learner:1234", 0, "/var/lib/millrace/models/tiny", {})


async def test_a_job_goes_its_whole_way_through_the_four_users(connect_as: Connect) -> None:
    people, learner = JobStore(connect_as("gateway")), JobStore(connect_as("learner"))
    record, _ = await people.create_once(spec(), "a-key")
    job = record.id
    claimed = await learner.claim("learner")
    assert claimed is not None
    assert claimed.id == job
    await learner.activate(active(job))
    await learner.transition(job, JobState.RUNNING, allowed=[JobState.STARTING])

    assert await add(connect_as("learner"), job, Stage.TASKS, "train:0:1", b"task")
    assert job in await JobStore(connect_as("rollout")).active()
    assert await JobStore(connect_as("rollout")).find(job) is not None
    await hand_on(consumer(connect_as, "rollout", job, Stage.TASKS, "rollout-a"), Stage.ROLLOUTS)
    assert job in await JobStore(connect_as("reward")).active()
    await hand_on(consumer(connect_as, "reward", job, Stage.ROLLOUTS, "reward-a"), Stage.SCORED)
    await keep_sample(connect_as("reward"), judged(job))

    scored = consumer(connect_as, "learner", job, Stage.SCORED, "learner")
    await scored.ack(*await scored.read(8, 0.1))
    await learner.history.append_step(job, 1, {"step": 1})
    await learner.history.append_eval(job, {"step": 1})
    await learner.update(job, step=1)
    assert await learner.history.evaluated_steps(job) == {1}
    assert await depths(connect_as("learner"), job) == dict.fromkeys(Stage, 0)
    await learner.transition(job, JobState.SUCCEEDED, allowed=[JobState.RUNNING])
    await learner.retire(job)
    await read_as_people_do(connect_as("gateway"), job)


def judged(job: str) -> ScoredGroup:
    scored = scored_group(0, [1.0, 0.0])
    return replace(scored, group=replace(scored.group, task=replace(scored.group.task, job_id=job)))


async def hand_on(source: Consumer, to: Stage) -> None:
    """Reads, renews, reads again as after a lost reply, and hops."""
    entries = await source.read(8, 0.1)
    assert [entry.member for entry in entries] == ["train:0:1"]
    await source.renew()
    assert await source.hop(entries[0], to, b"more")
    assert not await source.read(8, 0.1)


async def test_a_trial_goes_from_the_gateways_user_to_the_rewards_and_back(connect_as: Connect) -> None:
    asking = asyncio.create_task(ask(connect_as("gateway"), TrialRequest("a-trial", "{}", (), limit_s=20.0)))
    server = connect_as("reward")
    while (request := await take(server)) is None:
        await asyncio.sleep(0.01)
    await answer(server, request.token, TrialReply((), "as it was asked"))
    assert await asking == TrialReply((), "as it was asked")
    for user in ("rollout", "learner"):
        with pytest.raises(NoPermissionError):
            await take(connect_as(user))


async def test_a_head_of_the_learners_restores_its_record_and_people_put_entries_back(
    connect_as: Connect, tmp_path: Path
) -> None:
    tester, learner = connect_as("tester"), connect_as("learner")
    people = JobStore(connect_as("gateway"), tmp_path)
    job = (await people.create_once(spec(), "a-key"))[0].id
    assert await JobStore(learner, tmp_path).claim("learner")
    head = await HeadStore.begin(learner, tmp_path, job)
    await head.activate(active(job))
    await head.append_step(1, StepRecord(step=1))
    await head.append_eval({"step": 1})
    await tester.flushall()
    await head.transition(JobState.RUNNING, allowed=[JobState.STARTING])
    assert await learner.hexists(keys.ACTIVE, job)
    await head.rewind(0)
    assert await tester.llen(keys.steps(job)) == 0

    assert await add(learner, job, Stage.TASKS, "train:0:1", b"task", fence=head.fence)
    rollout = consumer(connect_as, "rollout", job, Stage.TASKS, "rollout-a")
    (entry,) = await rollout.read(8, 0.1)
    await rollout.dead_letter(entry, "spoiled")
    (letter,) = await dead_letters.read(connect_as("gateway"), job, Stage.TASKS)
    await dead_letters.requeue(connect_as("gateway"), job, Stage.TASKS, letter.id)
    assert len(await rollout.read(8, 0.1)) == 1


async def test_people_and_learners_put_jobs_back_that_redis_has_lost(connect_as: Connect, tmp_path: Path) -> None:
    people = JobStore(connect_as("gateway"), tmp_path)
    queued, running = [(await people.create_once(spec(), key))[0].id for key in ("one", "two")]
    learner = JobStore(connect_as("learner"), tmp_path)
    await learner.transition(running, JobState.RUNNING, allowed=[JobState.QUEUED], learner="learner")
    JobFolder(tmp_path / running).append("step", 1, {"step": 1})
    await connect_as("tester").flushall()
    owned = Restorer(connect_as("learner"), tmp_path, "learner", lambda record: record.learner == "learner")
    assert await owned.restore_lost() == [running]
    assert await Restorer(connect_as("gateway"), tmp_path, "gateway", lambda _: True).restore_lost() == [queued]
    assert await connect_as("gateway").llen(keys.steps(running)) == 1
    assert [record.id for record in await people.list()] == [running, queued]


async def read_as_people_do(redis: Redis, job: str) -> None:
    assert [record.state for record in await JobStore(redis).list()] == [JobState.SUCCEEDED]
    assert await redis.llen(keys.steps(job)) == await redis.llen(keys.evals(job)) == 1
    assert json.loads((await redis.lrange(keys.samples(job), 0, 0))[0])["group_id"] == 0
    assert len(await redis.xrange(keys.events(job), min="-", count=10) or []) > 3
    metrics = GatewayMetrics()
    await metrics.system.refresh(redis)
    assert metrics.registry.get_sample_value("millrace_gateway_redis_up") == 1


async def test_people_may_pause_resume_and_cancel_a_job(connect_as: Connect) -> None:
    people = JobStore(connect_as("gateway"))
    job = (await people.create(spec())).id
    assert (await people.pause(job)).state is JobState.PAUSED
    assert (await people.resume(job)).state is JobState.QUEUED
    assert (await people.cancel(job)).state is JobState.CANCELLED
    assert await JobStore(connect_as("learner")).claim("learner") is None


async def test_people_may_delete_a_job_that_has_ended_and_its_part_of_redis_goes_before(
    connect_as: Connect, tmp_path: Path
) -> None:
    redis, tester = connect_as("gateway"), connect_as("tester")
    people = JobStore(redis, tmp_path / "jobs")
    retention = Retention(redis, people, Settings(home=tmp_path))
    jobs = [(await people.create_once(spec(), key))[0].id for key in ("one", "two")]
    for job in jobs:
        await add(tester, job, Stage.TASKS, "train:0:1", b"task")
        await tester.lpush(keys.samples(job), "{}")
        await people.cancel(job)
    assert await retention.archive(-1.0) == 2
    assert sorted(await tester.keys("millrace:{*")) == sorted(keys.record(job).encode() for job in jobs)
    assert await retention.delete(jobs[0])
    assert [job.id for job in await retention.prune(Policy(keep=0))] == jobs[1:]
    await retention.sweep()
    assert await tester.keys("*") == [b"millrace:order"]


@pytest.mark.parametrize(
    ("user", "stage", "name"),
    [
        ("rollout", Stage.TASKS, "rollout-a"),
        ("reward", Stage.ROLLOUTS, "reward-a"),
        ("learner", Stage.SCORED, "learner"),
    ],
)
async def test_a_service_takes_over_and_buries_the_entries_of_its_stream(
    connect_as: Connect, user: str, stage: Stage, name: str
) -> None:
    tester = connect_as("tester")
    for number in range(3):
        await add(tester, "demo-1", stage, f"train:{number}:1", b"x")
    lost = consumer(connect_as, user, "demo-1", stage, f"{name}-dead")
    assert len(await lost.read(2, 0.1)) == 2
    heir = consumer(connect_as, user, "demo-1", stage, name, await take_incarnation(connect_as(user), name))
    entries = [entry for _ in range(4) for entry in await heir.read(8, 0.1)]
    assert sorted(entry.member for entry in entries) == ["train:0:1", "train:1:1", "train:2:1"]
    for entry in entries:
        await heir.dead_letter(entry, "broken")
    assert await tester.xlen(keys.dead("demo-1", stage)) == 3
    assert await connect_as("gateway").xlen(keys.dead("demo-1", stage)) == 3


@pytest.mark.parametrize("user", ["rollout", "reward", "environment", "learner"])
async def test_a_worker_tells_that_it_lives_and_leaves(connect_as: Connect, user: str) -> None:
    redis, name = connect_as(user), f"{user}-host"
    fence = await take_incarnation(redis, name)
    await write_heartbeat(redis, WorkerStatus(name, WorkerKind(user), "idle"), fence)
    await connect_as("tester").delete(fence.record)
    await write_heartbeat(redis, WorkerStatus(name, WorkerKind(user), "idle"), fence)
    for reader in READERS:
        assert [status.name for status in await live_workers(connect_as(reader))] == [name]
    await remove_worker(redis, name, fence)
    assert await live_workers(connect_as("gateway")) == []


@pytest.mark.parametrize("user", ["rollout", "learner"])
async def test_a_worker_tells_what_it_died_of_and_people_and_learners_read_it(connect_as: Connect, user: str) -> None:
    redis, name = connect_as(user), f"{user}-0"
    death = deaths.Death(name, "the engine does not start", 1.0, loading=True)
    await deaths.serving(redis, "demo-1", name, loading=True)
    await deaths.report(redis, "demo-1", death)
    await deaths.serving(redis, "demo-1", name, loading=False)
    await deaths.report_killed(redis, name)
    await deaths.served(redis, "demo-1", name)
    for reader in ("gateway", "learner"):
        assert (await deaths.deaths(connect_as(reader), "demo-1"))[0] == death


@pytest.mark.parametrize("user", ["rollout", "reward", "learner"])
async def test_what_a_retired_job_left_can_be_deleted(connect_as: Connect, user: str) -> None:
    tester = connect_as("tester")
    for stage in Stage:
        await add(tester, "demo-1", stage, "train:0:1", b"x")
    await forget(connect_as(user), "demo-1")
    assert await tester.keys("*demo-1*") == []


FORBIDDEN = {
    "gateway": [
        ("XREADGROUP", "GROUP", "g", "c", "STREAMS", "millrace:{demo-1}:tasks", ">"), ("DEL", "millrace:{demo-1}:record"),
        ("DEL", "millrace:{demo-1}:tasks"), ("SET", "millrace:{demo-1}:record", "x"), ("XACK", "millrace:{demo-1}:tasks", "g", "1-0"),
        ("LTRIM", "millrace:{demo-1}:steps", "0", "0"), ("UNLINK", "millrace:active"), ("UNLINK", "millrace:worker:rollout-a"),
        ("HSET", "millrace:active", "demo-1", "{}"), ("SET", "millrace:worker:rollout-a", "{}"),
    ],
    "rollout": [
        ("XADD", "millrace:{demo-1}:scored", "*", "d", "x"), ("XADD", "millrace:{demo-1}:events", "*", "d", "x"),
        ("XRANGE", "millrace:{demo-1}:scored", "-", "+"), ("HSET", "millrace:{demo-1}:record", "state", "failed"),
        ("HSET", "millrace:active", "demo-1", "{}"), ("DEL", "millrace:{demo-1}:record"), ("LRANGE", "millrace:{demo-1}:samples", "0", "1"),
        ("SET", "millrace:worker:reward-a", "{}"), ("GET", "millrace:idempotency:x"), ("HSET", "millrace:serving:learner", "demo-1", "{}"),
        ("DEL", "millrace:{demo-1}:deaths"),
    ],
    "reward": [
        ("XADD", "millrace:{demo-1}:tasks", "*", "d", "x"), ("HGETALL", "millrace:{demo-1}:record"),
        ("RPUSH", "millrace:{demo-1}:steps", "x"),
        ("HSET", "millrace:active", "demo-1", "{}"), ("ZRANGE", "millrace:jobs", "0", "1"), ("SET", "millrace:worker:learner", "{}"),
        ("UNLINK", "millrace:{demo-1}:record"),
    ],
    "environment": [
        ("SMEMBERS", "millrace:workers"), ("GET", "millrace:worker:environment-a"), ("HGETALL", "millrace:active"),
        ("HGETALL", "millrace:{demo-1}:record"), ("XADD", "millrace:{demo-1}:tasks", "*", "d", "x"),
        ("XADD", "millrace:{demo-1}:rollouts", "*", "d", "x"), ("XREADGROUP", "GROUP", "g", "c", "STREAMS", "millrace:{demo-1}:tasks", ">"),
        ("LRANGE", "millrace:{demo-1}:samples", "0", "1"), ("SET", "millrace:worker:rollout-a", "{}"), ("DEL", "millrace:worker:reward-a"),
        ("HINCRBY", "millrace:incarnation:learner", "incarnation", "1"),
    ],
    "learner": [
        ("INCR", "millrace:order"), ("DEL", "millrace:order"), ("DEL", "millrace:{demo-1}:steps"),
        ("XADD", "millrace:{demo-1}:rollouts", "*", "d", "x"),
        ("LPUSH", "millrace:{demo-1}:samples", "x"), ("DEL", "millrace:{demo-1}:record"), ("SET", "millrace:worker:rollout-a", "{}"),
        ("SET", "millrace:{demo-1}:record", "x"), ("DEL", "millrace:jobs"),
    ],
}  # fmt: skip
FOR_NO_ONE = [
    ("FLUSHALL",), ("CONFIG", "GET", "*"), ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"), ("ACL", "LIST"), ("ACL", "WHOAMI"),
    ("KEYS", "*"), ("SCAN", "0"), ("SHUTDOWN",), ("SAVE",), ("CLIENT", "LIST"), ("CLIENT", "KILL", "ID", "1"), ("MONITOR",),

    ("REPLICAOF", "127.0.0.1", "1"), ("MODULE", "LIST"), ("FUNCTION", "LIST"), ("SCRIPT", "FLUSH"), ("GET", "other"), ("SET", "other", "1"),
    ("PUBLISH", "a", "b"), ("EVAL", "return 1", "0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("user", "command"), [(user, command) for user in USERS for command in [*FORBIDDEN[user], *FOR_NO_ONE]]
)
async def test_a_user_may_not_do_what_its_service_does_not(
    connect_as: Connect, user: str, command: tuple[str, ...]
) -> None:
    with pytest.raises(NoPermissionError):
        await connect_as(user).execute_command(*command)  # type: ignore[no-untyped-call]


async def test_a_script_has_no_more_rights_than_its_caller(connect_as: Connect) -> None:
    with pytest.raises(ResponseError, match=r"(?i)permission|can't access"):
        await add(connect_as("reward"), "demo-1", Stage.TASKS, "train:0:1", b"x")
    assert await connect_as("tester").exists(keys.stream("demo-1", Stage.TASKS)) == 0


@pytest.mark.parametrize("user", ["default", "rollout"])
async def test_no_one_is_let_in_without_the_right_password(guarded_port: int, user: str) -> None:
    async with Redis(port=guarded_port, username=user, password="wrong") as stranger:  # noqa: S106
        with pytest.raises(AuthenticationError):
            await stranger.ping()
    async with Redis(port=guarded_port) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.ping()


def test_the_file_holds_digests_only(secrets_dir: Path) -> None:
    acl = render(secrets_dir)
    assert "canary" not in acl
    assert "@" not in acl.replace("+@", "").replace("-@", "")
    assert [line.split()[1] for line in acl.splitlines()] == ["default", *USERS]


@pytest.mark.parametrize(("content", "word"), [(None, "missing"), ("", "empty")])
def test_a_missing_or_empty_password_stops_the_start_with_one_line_that_names_it(
    tmp_path: Path, content: str | None, word: str
) -> None:
    for user in USERS:
        (tmp_path / f"redis_{user}_password").write_text("x")
    file = tmp_path / "redis_reward_password"
    file.unlink() if content is None else file.write_text(content)
    command = ["sh", str(DEPLOY / "redis/users.sh"), str(DEPLOY / "redis/users.acl"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"redis: the secret {file} is {word}")
    assert done.stderr.count("\n") == 1
