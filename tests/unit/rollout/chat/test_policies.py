"""Who has the engine: training, or people who talk to an ended job. The engine and the load are stand-ins; the rules are real."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from services.common.config.inference import RefusalReason
from services.common.errors import ConfigError, ModelError
from services.common.jobs.record import RECORD_FIELDS, JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.spec.job import JobSpec
from services.common.weights.snapshot import PolicyVersion
from services.rollout.chat.policies import Policies
from services.rollout.chat.queue import ChatQueue
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import ChatRefused
from services.rollout.engine.update import EngineError, VersionLabel


class StandInEngine:
    """Loads when it is told that the load is done."""

    def __init__(self) -> None:
        self.label = VersionLabel()
        self.started: list[Path] = []
        self.may_start = asyncio.Event()
        self.error: Exception | None = None

    @property
    def version(self) -> PolicyVersion | None:
        return self.label.version

    async def load(self, _record: JobRecord, export: Path) -> None:
        await self.label.change(None)
        await self.may_start.wait()
        if self.error is not None:
            raise self.error
        self.started.append(export)
        await self.label.change(PolicyVersion(1, 30))


class StandInStore:
    def __init__(self, *records: JobRecord) -> None:
        self.records = {record.id: record for record in records}

    async def find(self, job_id: str) -> JobRecord | None:
        return self.records.get(job_id)


def a_record(job_id: str, state: JobState = JobState.SUCCEEDED, export: str | None = "/exports/hf") -> JobRecord:
    spec = JobSpec.model_validate({"model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}})
    values: dict[str, Any] = dict.fromkeys(RECORD_FIELDS, 0)
    return JobRecord(**(values | {"id": job_id, "state": state, "export": export, "spec": spec}))


@pytest.fixture
def engine() -> StandInEngine:
    return StandInEngine()


@pytest.fixture
def policies(engine: StandInEngine) -> Policies:
    store = StandInStore(
        a_record("ended-1"), a_record("ended-2"), a_record("live", JobState.RUNNING), a_record("bare", export=None)
    )
    return Policies(cast("Engine", engine), ChatQueue(2), cast("JobStore", store), engine.load, load_limit_s=0.2)


async def reason(policies: Policies, job_id: str) -> RefusalReason:
    with pytest.raises(ChatRefused) as refused:
        await policies.open(job_id)
    return refused.value.reason


async def load(policies: Policies, engine: StandInEngine, job_id: str) -> None:
    loading = await policies.open(job_id)
    assert loading is not None
    engine.may_start.set()
    await policies.loaded(job_id, loading)


async def test_the_attached_job_answers_once_it_has_a_version(policies: Policies, engine: StandInEngine) -> None:
    await policies.claim("live")
    assert await reason(policies, "live") is RefusalReason.NOT_HERE
    await engine.label.change(PolicyVersion(1, 4))
    assert await policies.open("live") is None
    assert await reason(policies, "ended-1") is RefusalReason.NOT_HERE
    await policies.clear("it leaves")
    assert await reason(policies, "live") is RefusalReason.NOT_HERE


async def test_an_export_is_loaded_once_for_all_who_ask(policies: Policies, engine: StandInEngine) -> None:
    first, second = await asyncio.gather(policies.open("ended-1"), policies.open("ended-1"))
    assert first is second is not None
    assert policies.hosting == "loading"
    await load(policies, engine, "ended-1")
    assert await policies.open("ended-1") is None
    assert (policies.hosting, engine.version, len(engine.started)) == ("serving", PolicyVersion(1, 30), 1)


async def test_a_load_that_takes_long_goes_on_after_the_wait(policies: Policies, engine: StandInEngine) -> None:
    loading = await policies.open("ended-1")
    assert loading is not None
    with pytest.raises(ChatRefused, match="it goes on") as refused:
        await policies.loaded("ended-1", loading)
    assert refused.value.reason is RefusalReason.NOT_LOADED
    engine.may_start.set()
    await policies.loaded("ended-1", loading)
    assert await policies.open("ended-1") is None


async def test_training_takes_the_engine_in_the_middle_of_a_load(policies: Policies, engine: StandInEngine) -> None:
    loading = await policies.open("ended-1")
    assert loading is not None
    waiting = asyncio.create_task(policies.loaded("ended-1", loading))
    await asyncio.sleep(0)
    epoch = policies.epoch
    await policies.claim("live")
    with pytest.raises(ChatRefused, match="training took this server"):
        await waiting
    assert policies.hosted is None
    assert policies.epoch > epoch
    engine.may_start.set()
    await asyncio.sleep(0.01)
    assert engine.started == [], "the load did not go on behind training's back"
    assert await reason(policies, "ended-1") is RefusalReason.NOT_HERE
    policies.release()
    await load(policies, engine, "ended-1")


async def test_training_takes_a_loaded_export_away_and_its_version_with_it(
    policies: Policies, engine: StandInEngine
) -> None:
    await load(policies, engine, "ended-1")
    await policies.claim("live")
    assert engine.version is None


async def test_another_jobs_export_replaces_one_that_nobody_talks_to(policies: Policies, engine: StandInEngine) -> None:
    await load(policies, engine, "ended-1")
    epoch = policies.epoch
    await load(policies, engine, "ended-2")
    assert policies.hosted == "ended-2"
    assert policies.epoch > epoch, "a chat that was about to begin finds out"


async def test_a_load_is_not_broken_off_for_another_job(policies: Policies) -> None:
    await policies.open("ended-1")
    assert await reason(policies, "ended-2") is RefusalReason.BUSY


async def test_what_cannot_be_loaded_is_said_and_may_be_tried_again(policies: Policies, engine: StandInEngine) -> None:
    loading = await policies.open("ended-1")
    assert loading is not None
    engine.error = ModelError("config.json: is not JSON")
    engine.may_start.set()
    with pytest.raises(ChatRefused, match="is not JSON") as refused:
        await policies.loaded("ended-1", loading)
    assert refused.value.reason is RefusalReason.NOT_LOADED
    assert policies.hosting is None
    engine.error = None
    await load(policies, engine, "ended-1")


async def test_only_an_ended_job_with_an_export_is_loaded(policies: Policies) -> None:
    for job_id in ("live", "bare", "nobody"):
        assert await reason(policies, job_id) is RefusalReason.NOT_FOUND


async def test_a_server_that_drains_takes_no_chat(policies: Policies, engine: StandInEngine) -> None:
    await policies.claim("live")
    await engine.label.change(PolicyVersion(1, 4))
    await policies.drain()
    assert await reason(policies, "live") is RefusalReason.NOT_HERE


@pytest.mark.parametrize("error", [ConfigError("stage directory /x is in use"), KeyError("tensors"), MemoryError()])
async def test_a_load_that_fails_for_any_other_reason_is_told_and_ends_nothing(
    policies: Policies, engine: StandInEngine, error: Exception
) -> None:
    engine.error = error
    engine.may_start.set()
    loading = await policies.open("ended-1")
    assert loading is not None
    with pytest.raises(ChatRefused, match="the checkpoint of job ended-1 cannot be loaded"):
        await policies.loaded("ended-1", loading)
    assert (policies.fault, policies.hosted) == (None, None)


async def test_a_load_that_breaks_the_engine_is_noted_for_the_watchdog(
    policies: Policies, engine: StandInEngine
) -> None:
    engine.error = EngineError("half applied")
    engine.may_start.set()
    loading = await policies.open("ended-1")
    assert loading is not None
    with pytest.raises(ChatRefused, match="half applied"):
        await policies.loaded("ended-1", loading)
    assert policies.fault is engine.error
