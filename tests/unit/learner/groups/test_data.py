"""Tasks from a child that may be killed: the same as without one, and what a source does to its process is told of the task."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.common.config.settings import Settings
from services.common.data.order import task_index
from services.common.data.source import open_source
from services.common.errors import DataError
from services.common.sandbox.pool import Sandbox
from services.common.spec.job import JobSpec
from services.common.streams.codec import encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.learner.groups import data as job_data
from services.learner.groups.data import JobData, TaskFactory, TaskNotMade
from services.learner.groups.sources import held_out_rows, pack, unpack
from tests.unit.learner.odd_sources import CRASHES, HANGS, RAISES
from tests.unit.learner.scored_groups import job_spec

ODD = "tests.unit.learner.odd_sources:OddSources"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox() as made:
        yield made


def spec_of(**data: Any) -> JobSpec:
    source = {"source": "reasoning_gym:chain_sum", "size": 300}
    sections = {"train": source, "eval": source | {"seed": 7}} | data
    return job_spec(data=sections, eval={"enabled": True, "tasks": 9})


def odd_spec() -> JobSpec:
    return job_spec(data={"train": {"source": "reasoning_gym:chain_sum"}, "shuffle": False})


async def opened(sandbox: Sandbox, spec: JobSpec, settings: Settings | None = None) -> JobData:
    data = JobData(sandbox, spec, settings or Settings())
    await data.open()
    return data


async def prompt(data: JobData, ordinal: int) -> str:
    return (await data.training(ordinal)).prompt[0].content


@pytest.mark.parametrize("shuffle", [True, False])
async def test_tasks_order_and_fingerprint_are_those_of_the_source_itself_byte_by_byte(
    sandbox: Sandbox, shuffle: bool
) -> None:
    spec = spec_of(shuffle=shuffle, seed=3)
    data = await opened(sandbox, spec)
    train, held_out = (
        open_source(source, Settings(), field="data") for source in (spec.data.train, spec.data.eval) if source
    )
    assert data.fingerprint == train.fingerprint
    factory = TaskFactory("job", spec, lineage=1, data=data)
    for ordinal in [*range(700), 12, 650, 5, 700]:  # two epochs and more, and some are issued again
        task = await factory.training(ordinal, 1, 0)
        record = train[task_index(3, ordinal, 300, shuffle)]
        direct = (record.prompt, record.data_source, record.ground_truth, record.extra_info)
        assert (task.prompt, task.data_source, task.ground_truth, task.extra_info) == direct
        assert list(task.extra_info) == list(record.extra_info)
        assert pack(record) == pack(unpack(pack(record)))
        encode(task, MIN_ENTRY_BYTES)
    rows = held_out_rows(held_out, train, 9)
    assert data.held_out_tasks == len(rows) == 9
    for _ in range(2):
        found = [(await factory.evaluation(n, n, 0)).prompt for n in range(9)]
        assert found == [held_out[row].prompt for row in rows]


async def test_a_task_that_raises_is_told_alone_and_the_others_come(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_data, "SOURCES", ODD)
    data = await opened(sandbox, odd_spec())
    assert [await prompt(data, ordinal) for ordinal in range(RAISES)] == [str(n) for n in range(RAISES)]
    for _ in range(2):
        with pytest.raises(TaskNotMade) as told:
            await data.training(RAISES)
        assert str(told.value) == f"data.train: task {RAISES}: ZeroDivisionError: division by zero"
    assert await prompt(data, RAISES + 1) == str(RAISES + 1)


@pytest.mark.parametrize(("bad", "why"), [(HANGS, "was not made within 1 s$"), (CRASHES, "was not made.*SIGSEGV")])
async def test_a_task_that_never_comes_ends_the_job_with_field_index_and_reason(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, bad: int, why: str
) -> None:
    monkeypatch.setattr(job_data, "SOURCES", ODD)
    monkeypatch.setattr(job_data, "TASK_S", 1.0)
    data = await opened(sandbox, odd_spec())
    seen = HANGS + 1 if bad == CRASHES else 6
    while seen < bad:
        assert await prompt(data, seen) == str(seen), "those made ahead of a bad one are not lost"
        seen += 1
    with pytest.raises(DataError, match=rf"^data\.train: task {bad} {why}"):
        await data.training(bad)


@pytest.mark.parametrize("field", ["train", pytest.param("eval", marks=pytest.mark.slow)])
async def test_a_source_that_never_opens_is_named(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(job_data, "OPEN_S", 8.0)
    huge = 9223372036854775783  # the largest prime of 63 bits: its factors are looked for below 3·10⁹
    hangs = {"source": "reasoning_gym:prime_factorization", "config": {"min_value": huge, "max_value": huge}, "size": 9}
    started = time.monotonic()
    with pytest.raises(DataError, match=rf"^data\.{field}: was not read within 8 s"):
        await opened(sandbox, spec_of(**{field: hangs}))
    assert time.monotonic() - started < 60


async def test_a_child_that_is_killed_from_outside_costs_nothing(sandbox: Sandbox) -> None:
    data = await opened(sandbox, spec_of(shuffle=False))
    expected = [await prompt(data, ordinal) for ordinal in range(100)]
    again = await opened(sandbox, spec_of(shuffle=False))
    found = []
    for ordinal in range(100):
        if ordinal % 30 == 10:
            await again.close()
        found.append(await prompt(again, ordinal))
    assert found == expected


async def test_a_file_is_read_by_the_child_and_its_errors_name_the_row(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = tmp_path / "data" / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 3 =", "data_source": "odd", "ground_truth": "5"}\n{"prompt": 7}\n')
    source = {"source": "rows.jsonl"}
    settings = Settings(home=tmp_path)
    with pytest.raises(DataError, match=r"^data\.train\.source: .*rows\.jsonl: row 2"):
        await opened(sandbox, spec_of(train=source), settings)
    rows.write_text('{"prompt": "2 + 3 =", "data_source": "odd", "ground_truth": "5"}\n')
    data = await opened(sandbox, spec_of(train=source), settings)
    assert await prompt(data, 0) == "2 + 3 ="


async def test_a_file_that_changed_while_no_child_was_there_ends_the_job(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = tmp_path / "data" / "rows.jsonl"
    line = '{"prompt": "2 + 3 =", "data_source": "odd", "ground_truth": "5"}\n'
    rows.write_text(line * 3)
    data = await opened(sandbox, spec_of(train={"source": "rows.jsonl"}), Settings(home=tmp_path))
    assert await prompt(data, 0) == "2 + 3 ="
    await data.close()
    assert await prompt(data, 1) == "2 + 3 ="
    rows.write_text(line * 4)
    await data.close()
    with pytest.raises(DataError, match=r"^data\.train: has changed since the job began"):
        await data.training(20)
