"""A job comes back to exactly where it was, or to the newest sound state in a higher lineage, and the journal alone tells every fate."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from services.common.jobs.fates import Fate
from services.common.jobs.folder import JobFolder
from services.common.jobs.history_mark import HistoryMark
from services.common.jobs.record import JobState
from services.common.redis import keys
from services.common.redis.keys import Stage
from services.common.spec.job import JobSpec
from services.common.streams.codec import decode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import RolloutGroup, ScoredGroup, Task
from services.learner.audit.files import audit_job
from services.learner.groups.batch import assemble
from services.learner.groups.buffer import Judged
from services.learner.storage.job_store import HeadStore
from services.learner.storage.journal import Journal
from services.learner.storage.lineage import read_rises
from services.learner.storage.offline import close_ledger, ledger_on_disk
from tests.integration.learner import peers
from tests.integration.learner.scripted_ranks import ROWS, ScriptedLearner, chain
from tests.integration.rollout.conftest import write_model

STEPS = 12

pytestmark = pytest.mark.parametrize("redis_url", ["embedded"], indirect=True, scope="session")
"""What differs between servers is tested elsewhere."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "tiny")
    return folder


@pytest.fixture
async def learner(redis: Redis, redis_url: str, tmp_path: Path, models: Path) -> AsyncIterator[ScriptedLearner]:
    (tmp_path / "models").symlink_to(models)
    made = ScriptedLearner(tmp_path, redis_url, redis)
    yield made
    await made.stop()


peers_of = partial(peers.peers_of, delay_s=0.002)


def job_spec(steps: int = STEPS, **checkpoint: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "recovering",
            "model": {"path": "tiny"},
            "data": {"train": ROWS},
            "rollout": {"group_size": 2, "rollout_max_tokens": 8},
            "algorithm": {"filter_groups_train_batch_size": 2},
            "learner": {"steps": steps},
            "checkpoint": {"interval_steps": 4, "export": False} | checkpoint,
        }
    )


def audit(folder: Path, summary: dict[str, int]) -> dict[int, str]:
    """The fate of every ordinal by the journal alone: exactly one each, summing to what the record says; the audit agrees."""
    assert not audit_job(folder).violations
    fates: dict[int, str] = {}
    issued = 0
    for record in Journal(folder / "journal").records():
        trained = [decode(ScoredGroup, payload, MIN_ENTRY_BYTES).group.task.group_id for payload in record.groups]
        assert trained == [s.group_id for s in record.settled if s.fate is Fate.TRAINED]
        for settled in record.settled:
            assert settled.group_id not in fates, "two fates"
            fates[settled.group_id] = settled.fate
        issued = max(issued, record.issued)
    assert sorted(fates) == list(range(issued)), "an ordinal without a fate"
    assert summary == {"issued": issued, "active": 0, **{f.value: Counter(fates.values())[f] for f in Fate}}
    return fates


def weights_by_journal(folder: Path, spec: JobSpec) -> bytes:
    """What ranks hold that trained the journal's batches in order, without any interruption."""
    state = b"\0" * 16
    for record in Journal(folder / "journal").records():
        if record.groups:
            groups = [Judged(decode(ScoredGroup, payload, MIN_ENTRY_BYTES), payload, None) for payload in record.groups]
            state = chain(state, assemble(groups, spec))
    return state


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


def segment_of(folder: Path) -> Path:
    (segment,) = (folder / "journal").glob("segment-*.wal")
    return segment


async def test_an_interrupted_job_ends_with_the_weights_of_one_that_was_not(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    spec = job_spec()
    job_id = await learner.submit(spec)
    async with peers_of(redis, redis_url, job_id) as peers:
        for stop_at in (1, 3, 6, 9):
            await learner.start(job_id)
            await learner.until(job_id, lambda record, at=stop_at: record.step >= at)
            await learner.stop()
        await learner.start(job_id)
        record = await learner.ended(job_id)
    assert (record.lineage, record.policy_version) == (1, STEPS)
    audit(learner.folder(job_id), record.groups)
    assert weights_by_journal(learner.folder(job_id), spec) == learner.ranks.state
    assert all(member.startswith("train:1:") and member.endswith(":1") for member in peers.asked)
    assert len(peers.asked) == len(set(peers.asked)), "a group was generated twice"
    assert [step["step"] for step in await history(redis, job_id)] == list(range(1, STEPS + 1))


@pytest.mark.slow
async def test_a_group_settled_while_a_record_is_prepared_keeps_its_entry_until_a_record_has_its_fate(
    learner: ScriptedLearner, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = HeadStore.history_mark

    async def slow_mark(store: HeadStore) -> HistoryMark:
        found = await mark(store)
        await asyncio.sleep(0.3)  # the peers answer meanwhile, every fifth group without a spread
        return found

    monkeypatch.setattr(HeadStore, "history_mark", slow_mark)
    job_id = await learner.submit(job_spec())
    async with peers_of(redis, redis_url, job_id) as peers:
        for stop_at in (1, 2, 3, 4):
            await learner.start(job_id)
            await learner.until(job_id, lambda record, at=stop_at: record.step >= at)
            await learner.stop()
            assert await without_fate_or_entry(redis, learner.folder(job_id), job_id, peers.asked) == set()


async def without_fate_or_entry(redis: Redis, folder: Path, job_id: str, asked: list[str]) -> set[str]:
    """Members that were asked, and that neither the journal nor a stream has."""
    known = {f"train:1:{s.group_id}:1" for record in Journal(folder / "journal").records() for s in record.settled}
    for stage in (Stage.TASKS, Stage.SCORED):
        entries: Any = await redis.xrange(keys.stream(job_id, stage))
        known |= {fields[b"member"].decode() for _, fields in entries}
    return set(asked) - known


async def history(redis: Redis, job_id: str) -> list[dict[str, object]]:
    return [json.loads(raw) for raw in await redis.lrange(keys.steps(job_id), 0, -1)]


async def test_a_damaged_record_begins_a_lineage_in_which_what_it_lost_is_issued_again(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    spec = job_spec(interval_steps=1000)
    job_id = await learner.submit(spec)
    folder = learner.folder(job_id)
    async with peers_of(redis, redis_url, job_id) as peers:
        await learner.start(job_id)
        await learner.until(job_id, lambda record: record.step >= 7)
        await learner.stop()
        segment = segment_of(folder)
        before = list(Journal(folder / "journal").records())
        flip(segment, segment.stat().st_size // 2)
        await learner.start(job_id)
        record = await learner.ended(job_id)
    assert (record.lineage, record.policy_version) == (2, STEPS)
    rise = read_rises(folder)[-1]
    assert (rise.lineage, "is damaged" in rise.reason) == (2, True)
    assert 0 < rise.after_step < before[-1].step
    aside = folder / "journal" / "damaged-1"
    assert (aside / segment.name).stat().st_size > 0
    records = list(Journal(folder / "journal").records())
    assert records[: rise.after_step] == before[: rise.after_step]
    assert [r.lineage for r in records] == [1] * rise.after_step + [2] * (len(records) - rise.after_step)
    lost = {s.group_id for r in before[rise.after_step :] for s in r.settled}
    fates = audit(folder, record.groups)
    assert lost
    assert lost <= fates.keys()
    assert {int(m.split(":")[2]) for m in peers.asked if m.startswith("train:2:")} >= lost
    assert weights_by_journal(folder, spec) == learner.ranks.state
    told = await history(redis, job_id)
    assert [step["step"] for step in told] == list(range(1, STEPS + 1))
    assert [step["lineage"] for step in told] == [1] * rise.after_step + [2] * (STEPS - rise.after_step)


async def test_a_damaged_checkpoint_costs_a_longer_replay_and_nothing_else(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    spec = job_spec()
    job_id = await learner.submit(spec)
    folder = learner.folder(job_id)
    async with peers_of(redis, redis_url, job_id, delay_s=0.05) as peers:
        await learner.start(job_id)
        reached = (await learner.until(job_id, lambda record: record.step >= 9)).step
        await learner.stop()
        older, newest = sorted((folder / "checkpoints").glob("step-????????"))
        flip(newest / "rank-00000.bin", 77)
        await learner.start(job_id)
        record = await learner.ended(job_id)
        assert learner.ranks.loaded == [(older.name, True, True)]
        assert learner.ranks.trained[: reached - 4] == list(range(5, reached + 1))
    assert record.lineage == 1
    audit(folder, record.groups)
    assert weights_by_journal(folder, spec) == learner.ranks.state
    assert len(peers.asked) == len(set(peers.asked))


@pytest.mark.slow
async def test_with_every_checkpoint_damaged_the_journal_is_replayed_from_its_beginning(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    spec = job_spec()
    job_id = await learner.submit(spec)
    folder = learner.folder(job_id)
    async with peers_of(redis, redis_url, job_id):
        await learner.start(job_id, last_step=9)
        reached = (await learner.until(job_id, lambda record: record.step >= 9)).step
        await learner.stop()
        for checkpoint in (folder / "checkpoints").glob("step-*"):
            flip(checkpoint / "MANIFEST.json", 60)
        await learner.start(job_id)
        record = await learner.ended(job_id)
        assert learner.ranks.loaded == []
        assert learner.ranks.trained[:reached] == list(range(1, reached + 1))
    assert record.lineage == 1
    audit(folder, record.groups)
    assert weights_by_journal(folder, spec) == learner.ranks.state


async def test_a_published_version_that_nothing_leads_to_begins_a_lineage(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    spec = job_spec(interval_steps=1000)
    job_id = await learner.submit(spec)
    folder = learner.folder(job_id)
    async with peers_of(redis, redis_url, job_id):
        await learner.start(job_id)
        await learner.until(job_id, lambda record: record.step >= 5)
        await learner.stop()
        published = (await learner.store.get(job_id)).policy_version
        segment = segment_of(folder)
        segment.write_bytes(segment.read_bytes()[:-3])  # looks like a torn tail, and was acked
        await learner.start(job_id)
        record = await learner.ended(job_id)
    rise = read_rises(folder)[-1]
    assert (record.lineage, rise.after_step) == (2, published - 1)
    assert rise.reason == f"version {published} of lineage 1 was published, and only step {published - 1} came back"
    audit(folder, record.groups)
    assert weights_by_journal(folder, spec) == learner.ranks.state


@pytest.mark.slow
async def test_a_lost_journal_behind_a_sound_checkpoint_begins_a_lineage_once(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    job_id = await learner.submit(job_spec())
    folder = learner.folder(job_id)
    async with peers_of(redis, redis_url, job_id, delay_s=0.05):
        await learner.start(job_id)
        await learner.until(job_id, lambda record: record.step >= 4)
        await learner.until(job_id, lambda _: (folder / "checkpoints" / "step-00000004").exists())
        await learner.stop()
        shutil.rmtree(folder / "journal")
        await redis.hset(keys.record(job_id), "policy_version", 4)
        await redis.delete(keys.ACTIVE)
        await learner.start(job_id)
        record = await learner.ended(job_id)
    assert record.lineage == 2
    rise = read_rises(folder)[-1]
    assert (rise.after_step, len(read_rises(folder))) == (4, 2)
    assert "ends before the checkpoint's step 4" in rise.reason
    records = list(Journal(folder / "journal").records(after_step=4))
    assert [r.step for r in records if r.groups] == list(range(5, STEPS + 1))


@pytest.mark.slow
async def test_random_damage_anywhere_never_stops_a_job_and_never_gives_a_group_two_fates(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    rng = random.Random(5)
    spec = job_spec(steps=40)
    job_id = await learner.submit(spec)
    folder = learner.folder(job_id)
    lineages = []
    async with peers_of(redis, redis_url, job_id):
        for stop_at in range(4, 40, 6):
            await learner.start(job_id)
            record = await learner.until(job_id, lambda record, at=stop_at: record.step >= at or record.state.ended)
            await learner.stop()
            lineages.append(record.lineage)
            journals = sorted((folder / "journal").glob("segment-*.wal"))
            checkpoints = sorted((folder / "checkpoints").glob("step-*/*"))
            victim = rng.choice([path for path in (journals + checkpoints) if path.stat().st_size])
            flip(victim, rng.randrange(victim.stat().st_size))
        await learner.start(job_id)
        record = await learner.ended(job_id)
    assert lineages == sorted(lineages)
    assert record.lineage > 1
    records = list(Journal(folder / "journal").records())
    settled = [s.group_id for r in records for s in r.settled]
    assert len(settled) == len(set(settled))
    assert record.groups["active"] == 0


@pytest.mark.parametrize("interval", [2, 1000])
async def test_the_journal_of_a_cancelled_job_tells_every_fate(
    learner: ScriptedLearner, redis: Redis, redis_url: str, interval: int
) -> None:
    job_id = await learner.submit(job_spec(interval_steps=interval))
    async with peers_of(redis, redis_url, job_id) as peers:
        await learner.start(job_id)
        await learner.until(job_id, lambda record: record.step >= 3)
        peers.answering.clear()
        await learner.store.cancel(job_id)
        record = await learner.ended(job_id, JobState.CANCELLED)
    fates = audit(learner.folder(job_id), record.groups)
    assert Counter(fates.values())["cancelled"] > 0
    last = list(Journal(learner.folder(job_id) / "journal").records())[-1]
    assert last.groups == ()
    assert {s.reason for s in last.settled if s.fate is Fate.CANCELLED} == {"the job cancelled"}


async def test_the_ledger_of_a_job_that_died_is_closed_from_its_folder(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    job_id = await learner.submit(job_spec())
    async with peers_of(redis, redis_url, job_id):
        await learner.start(job_id)
        record = await learner.until(job_id, lambda record: record.step >= 5)
        await learner.stop()
    folder = learner.folder(job_id)
    issued = record.groups["issued"] + 3
    summary = close_ledger(folder, issued, "the job failed: rank 0: killed")
    fates = audit(folder, summary)
    assert summary["issued"] >= issued
    assert fates[issued - 1] == "cancelled"
    assert close_ledger(folder, 0, "again") == summary
    assert ledger_on_disk(folder)[1].summary() == summary


async def test_three_steps_in_a_row_that_are_not_finite_fail_the_job_with_the_last_good_weights(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    job_id = await learner.submit(job_spec())
    bad = {2, 5, 6, 7}
    async with peers_of(redis, redis_url, job_id):
        await learner.start(job_id, not_finite=bad, last_step=5)
        await learner.until(job_id, lambda record: record.step >= 5)
        await learner.stop()  # in a row means over a restart too
        await learner.start(job_id, not_finite=bad)
        record = await learner.ended(job_id, JobState.FAILED)
    assert "was not finite in 3 steps in a row, the last 7: the weights are those of step 4" in record.cause
    assert (record.step, record.policy_version) == (7, 7)
    folder = learner.folder(job_id)
    audit(folder, record.groups)
    told = await history(redis, job_id)
    assert [bool(step["skipped"]) for step in told] == [step in bad for step in range(1, 8)]
    saved = (folder / "checkpoints" / "step-00000007" / "rank-00000.bin").read_bytes()[:16]
    good = (folder / "checkpoints" / "step-00000004" / "rank-00000.bin").read_bytes()[:16]
    assert saved == good == learner.ranks.state
    await redis.hset(keys.record(job_id), "state", JobState.RUNNING)  # as if it had died just before it had ended
    await learner.start(job_id, not_finite=bad)
    again = await learner.ended(job_id, JobState.FAILED)
    assert (again.cause, again.groups, learner.ranks.trained) == (record.cause, record.groups, [])


async def test_a_checkpoint_is_written_beside_the_steps_that_follow_and_a_pause_waits_for_it(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    job_id = await learner.submit(job_spec(steps=200, interval_steps=2))
    folder = learner.folder(job_id) / "checkpoints"
    async with peers_of(redis, redis_url, job_id):
        await learner.start(job_id, write_s=1.0)
        during = await learner.until(job_id, lambda record: record.step >= 6)
        assert list(folder.glob("step-????????")) == [], "the steps did not wait for it"
        assert learner.ranks.saves == [2], "one at a time"
        await learner.store.pause(job_id)
        paused = await learner.until(job_id, lambda record: record.state is JobState.PAUSED)
        names = sorted(path.name for path in folder.glob("step-*"))
        assert names == ["step-00000002", f"step-{paused.step:08d}"]
        assert paused.step >= during.step
        await learner.store.cancel(job_id)
        await learner.ended(job_id, JobState.CANCELLED)


async def test_a_dataset_that_is_not_the_one_trained_on_is_refused_by_name(
    learner: ScriptedLearner, redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    data = tmp_path / "data" / "sums.jsonl"
    rows = [{"prompt": f"{n} + 1 =", "data_source": "exact", "ground_truth": str(n + 1)} for n in range(50)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    spec = JobSpec.model_validate(job_spec().model_dump() | {"data": {"train": {"source": "sums.jsonl"}}})
    job_id = await learner.submit(spec)
    async with peers_of(redis, redis_url, job_id):
        await learner.start(job_id)
        await learner.until(job_id, lambda record: record.step >= 5)
        await learner.stop()
        data.write_text("\n".join(json.dumps(row) for row in rows[1:]))
        await learner.start(job_id)
        record = await learner.ended(job_id, JobState.FAILED)
    assert "step-00000004 was not made of what this job is made of: dataset: " in record.cause


class TestBeginningElsewhere:
    """`checkpoint.load`, and what is taken of it."""

    async def first_job(self, learner: ScriptedLearner, redis: Redis, redis_url: str) -> str:
        job_id = await learner.submit(job_spec(steps=6))
        async with peers_of(redis, redis_url, job_id):
            await learner.start(job_id)
            await learner.ended(job_id)
        return job_id

    @pytest.mark.parametrize(
        ("options", "loaded", "first_step"),
        [
            ({}, ("step-00000006", True, True), 7),
            pytest.param({"no_load_optim": True}, ("step-00000006", False, True), 7, marks=pytest.mark.slow),
            pytest.param({"no_load_rng": True}, ("step-00000006", True, False), 7, marks=pytest.mark.slow),
            ({"finetune": True}, ("step-00000006", False, False), 1),
        ],
        ids=["all", "no_load_optim", "no_load_rng", "finetune"],
    )
    async def test_a_job_takes_what_was_asked_for_and_does_not_depend_on_the_other_any_more(
        self,
        learner: ScriptedLearner,
        redis: Redis,
        redis_url: str,
        options: dict[str, bool],
        loaded: tuple[str, bool, bool],
        first_step: int,
    ) -> None:
        first = await self.first_job(learner, redis, redis_url)
        weights = learner.ranks.state
        offset = ledger_on_disk(learner.folder(first))[1].frontier
        job_id = await learner.submit(job_spec(load=first, interval_steps=1000, **options))
        folder = learner.folder(job_id)
        async with peers_of(redis, redis_url, job_id):
            await learner.start(job_id)
            await learner.until(job_id, lambda record: record.step >= first_step)
            assert learner.ranks.loaded == [loaded]
            await learner.stop()
            base = folder / "checkpoints" / f"step-{first_step - 1:08d}"
            assert (base / "rank-00000.bin").read_bytes()[:16] == weights
            assert json.loads((base / "MANIFEST.json").read_text())["state"]["data_offset"] == (
                0 if options.get("finetune") else offset
            )
            shutil.rmtree(learner.folder(first))
            await learner.start(job_id)
            record = await learner.ended(job_id)
            assert learner.ranks.loaded == [(base.name, True, True)]
        audit(folder, record.groups)
        assert record.lineage == 1
        assert [step["step"] for step in await history(redis, job_id)] == list(range(first_step, STEPS + 1))

    async def test_a_hugging_face_directory_gives_its_weights(
        self, learner: ScriptedLearner, redis: Redis, redis_url: str
    ) -> None:
        job_id = await learner.submit(job_spec(steps=2, load="tiny"))
        async with peers_of(redis, redis_url, job_id):
            await learner.start(job_id)
            await learner.ended(job_id)
            assert learner.ranks.loaded == [("tiny", False, False)]

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"checkpoint": {"load": "nothing-here"}}, "nothing-here is not there"),
            ({"checkpoint": {"load": "../secret"}}, "must not contain `..`"),
            ({"learner": {"steps": 6}}, "it is at step 6, and learner.steps is 6"),
            ({"data": {"train": {"source": "reasoning_gym:chain_sum", "size": 99}}}, "dataset differs"),
        ],
        ids=["nothing", "outside", "no steps left", "other data"],
    )
    async def test_what_does_not_fit_is_refused_by_name(
        self,
        learner: ScriptedLearner,
        redis: Redis,
        redis_url: str,
        changes: dict[str, dict[str, object]],
        said: str,
    ) -> None:
        first = await self.first_job(learner, redis, redis_url)
        spec = job_spec(load=first).model_dump()
        job_id = await learner.submit(JobSpec.model_validate(spec | {k: spec[k] | v for k, v in changes.items()}))
        await learner.start(job_id)
        record = await learner.ended(job_id, JobState.FAILED)
        assert record.cause.startswith("checkpoint.load: ")
        assert said in record.cause


SPOILED: dict[int, Callable[[RolloutGroup], RolloutGroup]] = {
    1: lambda group: replace(group, prompt_token_ids=b""),
    4: lambda group: replace(group, prompt_token_ids=np.array([10**6], "<i4").tobytes()),
    7: lambda group: replace(
        group, rollouts=tuple(replace(r, token_ids=b"", inference_logprobs=b"") for r in group.rollouts)
    ),
    8: lambda group: replace(
        group, rollouts=tuple(replace(r, token_ids=b"\xff" * len(r.token_ids)) for r in group.rollouts)
    ),
}
"""Groups that a rank would break on, by group_id."""


@pytest.mark.slow
async def test_groups_that_a_rank_would_break_on_fail_with_the_reason_and_none_is_journalled(
    learner: ScriptedLearner, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = peers.answer

    def spoil(task: Task, version: int) -> ScoredGroup:
        scored, change = answer(task, version), SPOILED.get(task.group_id)
        return scored if change is None else replace(scored, group=change(scored.group))

    monkeypatch.setattr(peers, "answer", spoil)
    job_id = await learner.submit(job_spec())
    async with peers_of(redis, redis_url, job_id):
        await learner.start(job_id)
        record = await learner.ended(job_id)
    fates = audit(learner.folder(job_id), record.groups)
    assert {group_id for group_id, fate in fates.items() if fate == Fate.FAILED} == SPOILED.keys()
    report = audit_job(learner.folder(job_id))
    assert not report.violations
    assert sorted(report.failed_reasons) == [
        "a response has token -1, and the model knows 0 to 127",
        "no rollout that was judged has a token",
        "the prompt has no token",
        "the prompt has token 1000000, and the model knows 0 to 127",
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A volume of 4 MiB below the jobs' folder."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(jobs)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield jobs
    subprocess.run(["umount", "--lazy", str(jobs)], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    """Takes all space but so much."""
    ballast = disk / f"ballast-{len(list(disk.iterdir()))}"
    free = os.statvfs(disk)
    with suppress(OSError):
        ballast.write_bytes(b"\0" * max(0, free.f_bavail * free.f_frsize - leave_bytes))
    return ballast


@pytest.mark.parametrize(
    "leave_bytes",
    [0, *(pytest.param(left, marks=pytest.mark.slow) for left in (4096, 100_000))],
    ids=["journal", "a part of a record", "checkpoint"],
)
async def test_a_full_disk_pauses_the_job_with_the_reason_and_it_goes_on_by_itself(
    small_disk: Path, learner: ScriptedLearner, redis: Redis, redis_url: str, leave_bytes: int
) -> None:
    spec = job_spec()
    job_id = await learner.submit(spec)
    folder = learner.folder(job_id)
    async with peers_of(redis, redis_url, job_id) as peers:
        await learner.start(job_id)
        await learner.until(job_id, lambda record: record.step >= 2)
        ballast = fill(small_disk, leave_bytes)
        paused = await learner.until(job_id, lambda record: record.state is JobState.PAUSED)
        assert paused.cause.startswith(f"no space left on {folder}: ")
        rest = []
        for _ in range(4):  # an attempt that failed gives its room back: a job may make do with it once more
            rest.append(fill(small_disk, 0))
            await asyncio.sleep(1.0)
        for _ in range(2):
            await asyncio.sleep(2.5)
            still = await learner.store.get(job_id)
            assert still.state is JobState.PAUSED
            assert [r.step for r in Journal(folder / "journal").records() if r.groups] == list(range(1, still.step + 1))
        for file in (ballast, *rest):
            file.unlink()
        record = await learner.ended(job_id)
    assert (record.lineage, record.cause) == (1, "")
    audit(folder, record.groups)
    assert weights_by_journal(folder, spec) == learner.ranks.state
    assert len(peers.asked) == len(set(peers.asked))


@pytest.mark.parametrize("kind", ["step", "eval"])
async def test_a_disk_that_is_full_under_the_history_pauses_the_job_and_the_history_lacks_nothing(
    small_disk: Path, learner: ScriptedLearner, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    append = JobFolder.append
    ballast: list[Path] = []

    def full_at_step_4(folder: JobFolder, line: str, step: int, data: dict[str, Any]) -> None:
        if line == kind and step == 4 and not ballast:
            ballast.append(fill(small_disk, 0))
        append(folder, line, step, data)

    monkeypatch.setattr(JobFolder, "append", full_at_step_4)
    source = {"source": "reasoning_gym:chain_sum", "size": 500}
    evaluated = {
        "data": {"train": source, "eval": source | {"size": 2, "seed": 7}},
        "eval": {"enabled": kind == "eval", "interval_steps": 4, "samples": 2},
    }
    spec = JobSpec.model_validate(job_spec().model_dump() | evaluated)
    job_id = await learner.submit(spec)
    async with peers_of(redis, redis_url, job_id):
        await learner.start(job_id)
        paused = await learner.until(job_id, lambda record: record.state is JobState.PAUSED)
        assert paused.cause.startswith(f"no space left on {learner.folder(job_id)}: ")
        ballast[0].unlink()
        record = await learner.ended(job_id)
    kept = JobFolder(learner.folder(job_id)).history()
    assert [step["step"] for step in kept.steps] == list(range(1, STEPS + 1))
    assert kept.steps == await history(redis, job_id)
    assert [item["step"] for item in kept.evals] == ([0, 4, 8, 12] if kind == "eval" else [])
    audit(learner.folder(job_id), record.groups)


@pytest.mark.slow
async def test_a_job_can_be_cancelled_and_a_learner_drained_while_the_disk_is_full(
    small_disk: Path, learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    job_id = await learner.submit(job_spec())
    async with peers_of(redis, redis_url, job_id):
        await learner.start(job_id)
        await learner.until(job_id, lambda record: record.step >= 2)
        fill(small_disk, 0)
        await learner.until(job_id, lambda record: record.state is JobState.PAUSED)
        await asyncio.wait_for(learner.stop(), 10)
        await learner.start(job_id)
        await learner.until(job_id, lambda record: record.state is JobState.PAUSED and "no space" in record.cause)
        await learner.store.cancel(job_id)
        record = await learner.ended(job_id, JobState.CANCELLED)
    assert record.cause.startswith("cancelled on request: its end could not be saved: no space left on ")
