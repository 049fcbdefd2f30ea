"""A checkpoint that ends the servers that load it is refused after a few, by name; a real Redis, the engine is not started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.common.config.settings import Platform, Settings
from services.common.errors import ModelError
from services.common.jobs import deaths
from services.common.jobs.deaths import Death
from services.common.jobs.record import RECORD_FIELDS, JobRecord, JobState
from services.common.redis import keys
from services.rollout.chat.exports import ExportLoader
from services.rollout.engine.engine import Engine
from services.rollout.engine.update import EngineError
from tests.unit.rollout.chat.test_policies import a_record

ENDED = 1000.0


def record() -> JobRecord:
    values: dict[str, Any] = {name: getattr(a_record("ended-1"), name) for name in RECORD_FIELDS}
    return JobRecord(**(values | {"finished_at": ENDED, "state": JobState.SUCCEEDED}))


@pytest.fixture
def loader(redis: Redis, tmp_path: Path) -> ExportLoader:
    return ExportLoader(Engine(Platform.CPU), Settings(home=tmp_path), redis, "r0")


async def test_a_checkpoint_that_cannot_be_read_leaves_no_mark_and_no_death(
    loader: ExportLoader, redis: Redis, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"MANIFEST\.json: cannot be read"):
        await loader.load(record(), tmp_path / "hf")
    assert await redis.hgetall(keys.serving("r0")) == {}
    assert await deaths.deaths(redis, "ended-1") == []


async def test_whatever_its_load_raises_is_the_checkpoints(
    loader: ExportLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: Path) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("services.rollout.chat.exports.check_export", check)
    with pytest.raises(ModelError, match="IndexError: tuple index out of range"):
        await loader.load(record(), tmp_path / "hf")


async def test_an_engine_that_is_spoilt_by_it_is_a_death_of_its_job(
    loader: ExportLoader, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: Path) -> None:
        raise EngineError("the weights are half applied")

    monkeypatch.setattr("services.rollout.chat.exports.check_export", check)
    with pytest.raises(EngineError):
        await loader.load(record(), tmp_path / "hf")
    (death,) = await deaths.deaths(redis, "ended-1")
    assert death.loading
    assert await redis.hgetall(keys.serving("r0")) == {}


@pytest.mark.parametrize(("at", "refused"), [(ENDED + 1, True), (ENDED - 1, False)])
async def test_a_checkpoint_that_servers_died_of_since_its_job_ended_is_loaded_no_more(
    loader: ExportLoader, redis: Redis, tmp_path: Path, at: float, refused: bool
) -> None:
    for number in range(2):
        await deaths.report(redis, "ended-1", Death(f"r{number}", "its process was killed", at, loading=True))
    expected = "2 servers ended while they loaded it: its process was killed" if refused else "cannot be read"
    with pytest.raises(ModelError, match=expected):
        await loader.load(record(), tmp_path / "hf")
