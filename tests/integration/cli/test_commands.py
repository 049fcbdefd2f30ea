"""The commands against a real gateway and a real Redis; the test plays the learner, through the job store."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
from pyarrow import parquet
from redis.asyncio import Redis

from services.cli.stack.state import write_state
from services.common.jobs.fates import FATES_FILE, FateLine, collect
from services.common.jobs.record import LIVE, PAUSED_CAUSE, JobState
from services.common.jobs.store import JobStore
from services.common.redis.keys import Stage
from services.common.service.process_tree import created_at
from services.common.service.stack_state import UpState
from services.common.streams.consumer import Consumer
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.stream import add
from tests.gateway_process import GatewayProcess, running, write_home
from tests.unit.common.capacity.step_records import records
from tests.unit.learner.journalled_job import JournalledJob

SPEC = {
    "name": "demo", "model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}},
    "learner": {"steps": 2},
}  # fmt: skip
STEP = {
    "reward": 0.5, "accuracy": 0.5, "accept_rate": 0.9, "policy_age_mean": 0.0, "generated_tokens_per_s": 100.0,
    "trained_tokens_per_s": 50.0, "sync_s": 0.01, "pause_s": 0.001,
}  # fmt: skip


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    error: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Cli:
    """`millrace` in a home whose gateway runs."""

    home: Path
    gateway: GatewayProcess

    async def start(self, *arguments: str, **variables: str) -> asyncio.subprocess.Process:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        return await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("millrace")), *arguments,
            env=kept | {"MILLRACE_HOME": str(self.home), "COLUMNS": "200"} | variables,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def run(self, *arguments: str, **variables: str) -> Done:
        return await ended(await self.start(*arguments, **variables))

    async def submit(self, *arguments: str) -> str:
        done = await self.run("submit", str(self.home / "job.yaml"), *arguments)
        assert done.code == 0, done.error
        return done.out.strip()


async def ended(process: asyncio.subprocess.Process) -> Done:
    try:
        async with asyncio.timeout(60):
            out, error = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), error.decode())


@pytest.fixture(scope="module")
def stack(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """`up.json` as `millrace up` writes it; the supervisor in it is this process."""
    home = write_home(tmp_path_factory.mktemp("cli") / "home")
    (home / "job.yaml").write_text(yaml.safe_dump(SPEC))
    with running(redis_url, home) as gateway:
        token = str(home / "gateway.token")
        pid = os.getpid()
        write_state(home, UpState(pid, created_at(pid), gateway.url, redis_url, token, ready=True))
        yield Cli(home, gateway)


@pytest.fixture
def cli(stack: Cli, redis: Redis) -> Iterator[Cli]:  # noqa: ARG001
    """Without the jobs of the tests before."""
    yield stack
    stack.gateway.forget_jobs()


async def train(store: JobStore, job_id: str, state: JobState = JobState.SUCCEEDED) -> None:
    """What a learner does with a job, as far as people see."""
    assert await store.claim("learner-a")
    await store.transition(job_id, JobState.RUNNING, allowed=LIVE)
    for step in (1, 2):
        await store.history.append_step(job_id, step, {"step": step, **STEP})
        await store.update(job_id, step=step, policy_version=step, reward=STEP["reward"])
    await store.transition(job_id, state, allowed=LIVE, cause="" if state is JobState.SUCCEEDED else "rank 0 died")


async def test_every_reading_command_has_json_that_is_the_gateways(cli: Cli, redis: Redis) -> None:
    done = await cli.run("submit", str(cli.home / "job.yaml"), "--json")
    job_id = done.json["id"]
    await train(JobStore(redis), job_id)
    listed = (await cli.run("jobs", "--json")).json
    assert [(job["id"], job["state"]) for job in listed] == [(job_id, "succeeded")]
    shown = (await cli.run("show", job_id, "--json")).json
    assert (shown["id"], shown["step"], shown["evals"]) == (job_id, 2, [])
    assert (await cli.run("rollouts", job_id, "--json")).json == []
    assert (await cli.run("workers", "--json")).json == []


async def test_a_plan_needs_steps_and_then_has_a_forecast_for_each_number_of_servers(cli: Cli, redis: Redis) -> None:
    store, job_id = JobStore(redis), await cli.submit("--set", "learner.steps=40")
    refused = await cli.run("plan", job_id)
    assert (refused.code, refused.error.count("\n")) == (1, 1)
    assert f"millrace: job {job_id}: a plan needs 11 steps in a row" in refused.error
    for record in records(40):
        await store.history.append_step(job_id, record.step, record.as_json())
    await store.update(job_id, step=40, policy_version=40)
    shown = await cli.run("plan", job_id, "--servers", "1", "--servers", "3")
    assert shown.code == 0, shown.error
    assert "37 steps up to step 40, 1 rollout server" in shown.out
    found = (
        await cli.run("plan", job_id, "--servers", "2", "--set", "off_policy.max_off_policy_steps=0", "--json")
    ).json
    (forecast,) = found["forecasts"]
    assert (forecast["servers"], forecast["slow"]["policy_age_max"], forecast["fast"]["limit"]) == (2, 0, "slots")
    wrong = await cli.run("plan", job_id, "--set", "learner.lr=1")
    assert (wrong.code, "--set learner.lr: may change the rates" in wrong.error) == (1, True)


async def test_delete_takes_ended_jobs_and_says_why_it_leaves_others(cli: Cli, redis: Redis) -> None:
    store = JobStore(redis)
    first, second, waits = [await cli.submit() for _ in range(3)]
    for job_id in (first, second):
        await store.cancel(job_id)
    done = await cli.run("delete", first, waits, "demo-0000000a", second)
    assert done.code == 1
    assert done.out == f"{first} is deleted\n{second} is deleted\n"
    assert f"job {waits} is queued: only a job that has ended can be deleted" in done.error
    assert "there is no such job" in done.error
    assert [record.id for record in await store.list()] == [waits]


async def test_prune_says_what_goes_and_needs_a_limit(cli: Cli, redis: Redis) -> None:
    store = JobStore(redis)
    old, new = [await cli.submit() for _ in range(2)]
    for job_id in (old, new):
        await store.cancel(job_id)
    assert (await cli.run("prune")).code == 2
    assert (await cli.run("prune", "--max-bytes", "lots")).code == 2
    told = await cli.run("prune", "--keep", "1", "--dry-run")
    assert old in told.out
    assert "would be deleted" in told.error
    assert len(await store.list()) == 2
    assert (await cli.run("prune", "--older-than", "1", "--max-bytes", "1GiB", "--json")).json["jobs"] == []
    assert [job["id"] for job in (await cli.run("prune", "--keep", "1", "--json")).json["jobs"]] == [old]
    assert [record.id for record in await store.list()] == [new]


async def test_pause_resume_and_cancel_say_what_became_of_the_job(cli: Cli, redis: Redis) -> None:
    store, job_id = JobStore(redis), await cli.submit()
    assert (await cli.run("pause", job_id)).out == f"{job_id} is paused\n"
    assert (await cli.run("resume", job_id)).out == f"{job_id} is queued\n"
    assert await store.claim("learner-a")
    assert "it pauses when the step under way is done" in (await cli.run("pause", job_id)).out
    await store.transition(job_id, JobState.PAUSED, allowed=LIVE, cause=PAUSED_CAUSE)
    assert "its learner was asked to go on" in (await cli.run("resume", job_id)).out
    assert "its learner was asked to stop" in (await cli.run("cancel", job_id)).out
    refused = await cli.run("resume", await cli.submit())
    assert (refused.code, "only a paused job can be resumed" in refused.error) == (1, True)


async def test_resuming_a_job_that_has_ended_says_how_to_go_on_from_its_checkpoint(cli: Cli, redis: Redis) -> None:
    job_id = await cli.submit()
    await train(JobStore(redis), job_id, JobState.CANCELLED)
    refused = await cli.run("resume", job_id)
    assert refused.code == 1
    assert f"`millrace resubmit {job_id} --set checkpoint.load={job_id}` goes on" in refused.error


async def test_dead_letters_are_listed_shown_and_put_back(cli: Cli, redis: Redis) -> None:
    job_id = await cli.submit()
    assert (await cli.run("dead-letters", "list", job_id)).out == "no dead letters\n"
    await add(redis, job_id, Stage.ROLLOUTS, "train:1:0:1", msgpack.packb({"server": "rollout-a"}))
    reader = Consumer(
        redis, redis, job_id, Stage.ROLLOUTS, group="reward", name="reward-a", limit_bytes=MIN_ENTRY_BYTES
    )
    (entry,) = await reader.read(1, 0.5)
    await reader.dead_letter(entry, "task: Field required")
    listed = (await cli.run("dead-letters", "list", job_id)).out
    (letter,) = (await cli.run("dead-letters", "list", job_id, "--stage", "rollouts", "--json")).json["letters"]
    for word in (letter["id"], "train:1:0:1", "task: Field required"):
        assert word in listed
    shown = (await cli.run("dead-letters", "show", job_id, "rollouts", letter["id"])).out
    for word in ("given up by reward-a", "18 bytes, whole", '"server": "rollout-a"'):
        assert word in shown
    done = await cli.run("dead-letters", "requeue", job_id, "rollouts", letter["id"])
    assert done.out == f"{letter['id']} (train:1:0:1) is back on the rollouts stream of {job_id}\n"
    assert [again.member for again in await reader.read(1, 0.5)] == ["train:1:0:1"]
    gone = await cli.run("dead-letters", "requeue", job_id, "rollouts", letter["id"])
    assert (gone.code, "there is no such dead letter" in gone.error) == (1, True)
    assert (await cli.run("dead-letters", "show", job_id, "verdicts", "1-0")).code == 2


@pytest.mark.parametrize(("state", "code"), [(JobState.SUCCEEDED, 0), (JobState.FAILED, 1)])
async def test_a_followed_job_shows_its_steps_and_ends_with_its_state(
    cli: Cli, redis: Redis, state: JobState, code: int
) -> None:
    store = JobStore(redis)
    follower = await cli.start("submit", str(cli.home / "job.yaml"), "--follow")
    assert follower.stdout is not None
    job_id = (await follower.stdout.readline()).decode().strip()
    await train(store, job_id, state)
    done = await ended(follower)
    assert done.code == code, done.error
    lines = done.out.splitlines()
    assert lines[0].split()[0] == "step"
    assert [text.split()[0] for text in lines if text.split()[0] in {"1", "2"}] == ["1", "2"]
    assert lines[-1] == f"{job_id} {state}{': rank 0 died' if code else ''}"


async def test_a_job_that_is_there_is_followed_by_the_beginning_of_its_id(cli: Cli, redis: Redis) -> None:
    job_id = await cli.submit()
    await train(JobStore(redis), job_id)
    done = await cli.run("follow", job_id[:6])
    assert (done.code, done.out.splitlines()[-1]) == (0, f"{job_id} succeeded")


async def test_a_sweep_is_a_family_of_jobs_under_one_tag(cli: Cli) -> None:
    done = await cli.run(
        "submit",
        str(cli.home / "job.yaml"),
        "--sweep",
        "learner.lr=1e-6,3e-6",
        "--sweep",
        "rollout.group_size=4,8",
        "--json",
    )
    assert done.code == 0, done.error
    specs = [job["spec"] for job in done.json]
    assert [(spec["learner"]["lr"], spec["rollout"]["group_size"]) for spec in specs] == [
        (1e-6, 4), (1e-6, 8), (3e-6, 4), (3e-6, 8)
    ]  # fmt: skip
    ((family,),) = {tuple(spec["tags"]) for spec in specs}
    assert family.startswith("sweep:demo-")
    await cli.submit()
    found = (await cli.run("jobs", "--tag", family, "--json")).json
    assert {job["id"] for job in found} == {job["id"] for job in done.json}
    both = await cli.run("submit", str(cli.home / "job.yaml"), "--sweep", "learner.lr=1e-6", "--follow")
    assert (both.code, "follows one job" in both.error) == (2, True)
    wrong = await cli.run("submit", str(cli.home / "job.yaml"), "--sweep", "learner.lr")
    assert (wrong.code, "must look like learner.lr=1e-6,3e-6" in wrong.error) == (1, True)


async def test_a_check_shows_the_prompts_and_submits_nothing(cli: Cli, redis: Redis) -> None:
    done = await cli.run("submit", str(cli.home / "job.yaml"), "--check")
    assert done.code == 0, done.error
    assert "data.train" in done.out
    assert "  │ " in done.out
    assert "references were not judged: no reward server is running" in done.out
    assert await JobStore(redis).list() == []
    wrong = await cli.run("submit", str(cli.home / "job.yaml"), "--check", "--set", "learner.lr=-1")
    assert (wrong.code, "learner.lr" in wrong.error) == (1, True)
    assert (await cli.run("submit", str(cli.home / "job.yaml"), "--response", "42")).code == 2
    assert (await cli.run("submit", str(cli.home / "job.yaml"), "--check", "--follow")).code == 2


async def test_a_verifier_is_tried_on_rows_with_no_service_running(cli: Cli, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n} + 0?", "data_source": "mine", "reward_model": {"ground_truth": str(n)}} for n in (41, 42, 43)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = str(tmp_path / "rows.jsonl")
    done = await cli.run("verify", "gsm8k", data, "-n", "2", "--response", "it is 42")
    assert done.code == 0, done.error
    assert "task 0: gsm8k judges '41' right: alone" in done.out
    assert "your response: scored, reward 1, accuracy 1: 42 is right" in done.out
    found = (await cli.run("verify", "gsm8k", data, "--json")).json
    assert [(each["index"], each["right"]) for each in found] == [(0, True), (1, True), (2, True)]
    strict = ("--set", "reward.config.format.format_pattern=never")
    assert (await cli.run("verify", "format", data, *strict)).code == 1
    absent = await cli.run("verify", "absent", data)
    assert (absent.code, "there is no verifier 'absent'" in absent.error) == (1, True)
    assert (await cli.run("verify", "reasoning_gym", "reasoning_gym:chain_sum")).code == 0


async def test_tags_and_notes_are_changed_and_shown(cli: Cli) -> None:
    job_id = await cli.submit("--set", "tags=[first, lr]", "--set", "notes=as in the paper")
    assert (await cli.run("show", job_id, "--json")).json["notes"] == "as in the paper"
    done = await cli.run("label", job_id, "--add", "kept", "--add", "lr", "--remove", "first", "--notes", "seed 7")
    assert done.out == f"{job_id}: lr, kept; seed 7\n"
    shown = (await cli.run("jobs", "--name", job_id[:9])).out
    assert "lr kept" in shown
    assert (await cli.run("label", job_id, "--add", "no spaces")).code == 1
    assert (await cli.run("jobs", "--state", "failed", "--json")).json == []


async def test_metrics_are_tables_that_other_programs_read(cli: Cli, redis: Redis, tmp_path: Path) -> None:
    store, job_id = JobStore(redis), await cli.submit()
    await train(store, job_id)
    await store.history.append_eval(job_id, {"step": 2, "k": 8, "tasks": 4, "avg_at_k": 0.25, "avg_at_k_se": 0.1})
    (first, second) = csv.DictReader(io.StringIO((await cli.run("metrics", job_id)).out))
    assert (first["step"], second["step"], second["reward"]) == ("1", "2", "0.5")
    lines = (await cli.run("metrics", job_id, "--format", "jsonl")).out.splitlines()
    assert [json.loads(line)["sync_s"] for line in lines] == [0.01, 0.01]
    file = tmp_path / "evals.parquet"
    assert (await cli.run("metrics", job_id, "--evals", "--format", "parquet", "--out", str(file))).code == 0
    assert parquet.read_table(file).select(["step", "avg_at_k"]).to_pylist() == [{"step": 2, "avg_at_k": 0.25}]
    refused = await cli.run("metrics", job_id, "--out", str(tmp_path / "none" / "x.csv"))
    assert (refused.code, "x.csv cannot be written: No such file" in refused.error) == (1, True)


async def test_jobs_are_compared_by_their_scores_and_the_settings_that_differ(cli: Cli, redis: Redis) -> None:
    store, first = JobStore(redis), await cli.submit("--set", "name=first")
    second = (await cli.run("resubmit", first, "--set", "name=second", "--set", "learner.lr=3e-6")).out.strip()
    for job_id, score in ((first, 0.25), (second, 0.5)):
        await train(store, job_id)
        for step, value in ((0, 0.1), (1, score), (2, score - 0.1)):
            await store.history.append_eval(
                job_id, {"step": step, "k": 8, "tasks": 4, "avg_at_k": value, "avg_at_k_se": 0.125}
            )
    found = (await cli.run("compare", first, second, "--json")).json
    assert found["differences"] == [{"path": "learner.lr", "values": [1e-6, 3e-6]}]
    assert [(run["id"], run["last_step"]["reward"], run["best_eval"]["step"]) for run in found["runs"]] == [
        (first, 0.5, 1), (second, 0.5, 1)
    ]  # fmt: skip
    shown = (await cli.run("compare", first[:4], second[:4])).out
    for words in (("0.250 ± 0.125",), ("0.500 ± 0.125",), ("learner.lr", "1e-06", "3e-06")):
        assert any(all(word in line for word in words) for line in shown.splitlines()), words
    twice = await cli.run("compare", first, first)
    assert (twice.code, "a job is named twice" in twice.error) == (1, True)
    assert "there is no such job" in (await cli.run("compare", first, "nothing")).error


async def test_ctrl_c_ends_the_following_and_not_the_job(cli: Cli, redis: Redis) -> None:
    follower = await cli.start("submit", str(cli.home / "job.yaml"), "--follow")
    assert follower.stdout is not None
    job_id = (await follower.stdout.readline()).decode().strip()
    await follower.stdout.readline()  # the headings: it follows now
    follower.send_signal(signal.SIGINT)
    done = await ended(follower)
    assert (done.code, f"{job_id} goes on" in done.out) == (130, True)
    assert (await JobStore(redis).get(job_id)).state is JobState.QUEUED


async def test_a_followed_jobs_json_is_its_record_at_the_end(cli: Cli, redis: Redis) -> None:
    follower = await cli.start("submit", str(cli.home / "job.yaml"), "--follow", "--json")
    store = JobStore(redis)
    async with asyncio.timeout(30):
        while not (jobs := await store.list()):
            await asyncio.sleep(0.05)
    await train(store, jobs[0].id)
    done = await ended(follower)
    assert (done.code, done.json["id"], done.json["state"]) == (0, jobs[0].id, "succeeded")
    assert "succeeded" in done.error


async def test_job_ids_are_completed_with_their_states(cli: Cli) -> None:
    job_id = await cli.submit()
    asked = {"_MILLRACE_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    assert (await cli.run(**asked, COMP_WORDS="millrace pause ")).out.split() == [job_id]
    assert (await cli.run(**asked, COMP_WORDS="millrace pause other")).out.split() == []


async def test_errors_tell_the_next_step(cli: Cli) -> None:
    unknown = await cli.run("show", "demo-00000000")
    assert (unknown.code, "`millrace jobs` lists the jobs" in unknown.error) == (1, True)
    stranger = await cli.run("jobs", MILLRACE_TOKEN="not-the-token")  # noqa: S106
    assert (stranger.code, "gateway.token" in stranger.error, "MILLRACE_TOKEN" in stranger.error) == (1, True, True)
    assert "not-the-token" not in stranger.error


async def test_the_logs_of_a_job_are_those_of_the_home(cli: Cli) -> None:
    job_id = await cli.submit()
    await cli.run("pause", job_id)
    done = await cli.run("logs", job_id)
    assert (done.code, "gateway  POST /jobs/{job_id}/pause -> 200" in done.out) == (0, True)
    assert "GET" not in done.out
    lines = [json.loads(line) for line in (await cli.run("logs", job_id, "--json")).out.splitlines()]
    assert {line["job_id"] for line in lines} == {job_id}
    nothing = await cli.run("logs", "demo-00000000")
    assert (nothing.code, "no line about demo-00000000" in nothing.error) == (1, True)


async def test_following_logs_shows_what_is_logged_meanwhile(cli: Cli) -> None:
    job_id = await cli.submit()
    follower = await cli.start("logs", job_id, "--follow", PYTHONUNBUFFERED="1")
    await asyncio.sleep(1)
    await cli.run("pause", job_id)
    assert follower.stdout is not None
    async with asyncio.timeout(30):
        assert b"/pause -> 200" in await follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    assert (await ended(follower)).code == 130


async def test_the_doctor_finds_gateway_and_redis_and_what_this_redis_lacks(cli: Cli) -> None:
    done = await cli.run("doctor", "--json")
    found = {item["name"]: item for item in done.json["checks"]}
    assert (found["gateway"]["level"], "takes the token" in found["gateway"]["found"]) == ("ok", True)
    assert found["port"]["found"].endswith(cli.gateway.url)
    assert (found["redis"]["level"], found["redis maxmemory-policy"]["found"]) == ("ok", "noeviction")
    assert found["redis appendonly"]["level"] == "ok"
    assert done.code == (0 if done.json["ok"] else 1)


async def test_the_doctor_says_that_a_token_is_wrong_and_ends_with_1(cli: Cli) -> None:
    done = await cli.run("doctor", "--json", MILLRACE_TOKEN="not-the-token")  # noqa: S106
    found = {item["name"]: item for item in done.json["checks"]}
    assert (done.code, found["gateway"]["level"]) == (1, "problem")
    assert "gateway.token" in found["gateway"]["remedy"]
    assert "not-the-token" not in done.out


async def test_a_redis_that_forgets_is_a_problem_and_up_refuses_it(cli: Cli, redis: Redis, redis_url: str) -> None:
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    await redis.config_set("appendonly", "no")
    try:
        done = await cli.run("doctor", "--json")
        found = {item["name"]: item["level"] for item in done.json["checks"]}
        assert (found["redis maxmemory-policy"], found["redis appendonly"]) == ("problem", "warning")
        assert done.code == 1
        other = str(cli.home.parent / "other")
        up = await cli.run("up", "--home", other, "--port", "0", REDIS_URL=redis_url)
        assert (up.code, "redis maxmemory-policy: allkeys-lru: start it with" in up.error) == (1, True)
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
        await redis.config_set("appendonly", "yes")


async def test_a_redis_that_refuses_the_user_is_told_apart_from_one_that_is_away(cli: Cli, redis_url: str) -> None:
    wrong = redis_url.replace("redis://", "redis://somebody:hidden-word@")
    up = await cli.run("up", "--home", str(cli.home.parent / "other"), "--port", "0", REDIS_URL=wrong)
    assert (up.code, "refuses the user" in up.error, "MILLRACE_REDIS_PASSWORD_FILE" in up.error) == (1, True, True)
    assert "hidden-word" not in up.error
    away = await cli.run("up", "--home", str(cli.home.parent / "other"), REDIS_URL="redis://127.0.0.1:1/0")
    assert (away.code, "does not answer" in away.error) == (1, True)
    assert len(away.error.strip().splitlines()) == 1


async def test_up_refuses_a_secret_that_is_not_there(cli: Cli) -> None:
    up = await cli.run("up", "--home", str(cli.home.parent / "other"), MILLRACE_TOKEN_FILE="/not/there")  # noqa: S106
    assert (up.code, len(up.error.strip().splitlines())) == (1, 1)
    assert "MILLRACE_TOKEN_FILE: cannot read /not/there" in up.error


async def test_the_audit_asks_the_gateway_what_the_folder_does_not_say(cli: Cli, redis: Redis) -> None:
    store, job_id = JobStore(redis), await cli.submit()
    job = JournalledJob(job_id)
    await asyncio.to_thread(job.write, cli.home / "jobs" / job_id)
    await store.claim("learner-a")
    (cli.home / "jobs" / job_id / "job.json").unlink()
    for step in job.history:
        await store.history.append_step(job_id, step["step"], step)
    done = await cli.run("audit", job_id, "--json")
    told = 2 * len(job.history)  # by the folder and by the gateway
    assert (done.code, done.json["ended"], done.json["history_steps"]) == (0, False, told), done.out
    assert done.json["remarks"] == []
    await store.transition(job_id, JobState.SUCCEEDED, allowed=LIVE)
    assert (await cli.run("audit", job_id, "--json")).json["ended"] is True
    await store.history.append_step(job_id, 6, {**job.history[-1], "step": 6})
    done = await cli.run("audit", job_id)
    assert done.code == 1
    assert "history the gateway's history, step 6: the journal does not hold this step" in done.out


async def test_the_ledger_shows_the_sums_and_lists_a_fate(cli: Cli) -> None:
    job_id = await cli.submit()
    done = await cli.run("ledger", job_id)
    assert done.code == 0, done.error
    assert "sums and reasons" in done.out
    job = JournalledJob(job_id)
    lines = [
        FateLine(r.step, 1, r.issued, collect((s.group_id, s.fate, s.reason) for s in r.settled)) for r in job.records
    ]
    folder = cli.home / "jobs" / job_id
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread((folder / FATES_FILE).write_text, "".join(line.dump() for line in lines))
    done = await cli.run("ledger", job_id, "--fate", "failed", "-n", "2", "--offset", "1")
    assert done.code == 0, done.error
    assert "5 × only 1 of 2 rollouts could be judged" in done.out
    rows = [line.split()[:3] for line in done.out.splitlines()]
    assert [row for row in rows if row[1:2] == ["failed"]] == [["7", "failed", "3"], ["11", "failed", "4"]]
    done = await cli.run("ledger", job_id, "--json", "--fate", "cancelled")
    assert (done.json["total"], done.json["groups"][0]["group_id"], done.json["active"]) == (1, 20, 0)
    assert (await cli.run("ledger", job_id, "--fate", "odd")).code == 2
