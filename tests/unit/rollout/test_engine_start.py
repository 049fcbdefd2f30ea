"""Starts of the engine that hang or fail, over real processes in vLLM's place: they end, with a cause, and the next one may begin."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from services.common.config.settings import Platform
from services.common.errors import ModelError
from services.common.spec.job import JobSpec
from services.rollout.engine import engine as engine_module
from services.rollout.engine import health
from services.rollout.engine.engine import Engine
from services.rollout.engine.model_tensors import Shapes
from tests.unit.common.models.test_prompts import TEMPLATE, save

SPEC = JobSpec.model_validate({"model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}})
SLEEPS = "import time; time.sleep(600)"
FAILS = "print('(Worker pid=8) ERROR 11-22 18:00:01 [worker.py:2] ValueError: Head size 16 is not supported')"
Starts = Callable[[str], None]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine(Platform.CPU)
    yield made
    await made.aclose()


@pytest.fixture
def started() -> list[subprocess.Popen[bytes]]:
    return []


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]) -> Starts:
    """What vLLM is replaced by: it starts a process and waits for its end, as vLLM does, and then fails."""

    def replaced_by(code: str) -> None:
        def start(*_: object) -> None:
            started.append(subprocess.Popen([sys.executable, "-c", code]))
            started[-1].wait()
            raise SystemExit("Engine core initialization failed. See root cause above.")

        monkeypatch.setattr(engine_module, "start_vllm", start)

    def no_shapes(_: Path) -> Shapes:
        return {}

    monkeypatch.setattr(engine_module, "model_shapes", no_shapes)
    return replaced_by


async def test_a_start_that_hangs_is_killed_and_the_next_one_may_begin(
    engine: Engine, starts: Starts, started: list[subprocess.Popen[bytes]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(health, "START_STILL_S", 2.0)
    starts(SLEEPS)
    model = save(tmp_path, TEMPLATE)
    for _ in range(2):
        with pytest.raises(ModelError, match="the engine hangs while it starts: its processes have neither computed"):
            await asyncio.wait_for(engine.start(model, SPEC), 60)
        assert not engine.starting
    assert [process.poll() is not None for process in started] == [True, True]


async def test_a_start_that_fails_is_told_in_the_engines_own_words_whatever_it_raises(
    engine: Engine, starts: Starts, tmp_path: Path
) -> None:
    starts(FAILS)
    with pytest.raises(ModelError, match="the engine does not start: ValueError: Head size 16 is not supported"):
        await engine.start(save(tmp_path, TEMPLATE), SPEC)


async def test_a_start_that_nobody_waits_for_ends_before_the_next_one(
    engine: Engine, starts: Starts, started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    starts(SLEEPS)
    model = save(tmp_path, TEMPLATE)
    first = asyncio.create_task(engine.start(model, SPEC))
    async with asyncio.timeout(60):
        while not started:
            await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert psutil.pid_exists(started[0].pid)
    starts(FAILS)
    began = time.monotonic()
    with pytest.raises(ModelError, match="Head size 16"):
        await engine.start(model, SPEC)
    assert started[0].poll() is not None
    assert time.monotonic() - began < 30.0
