"""When an engine is held to hang: by its tokens, its answers and its processes; the engine is scripted, its processes are real."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from services.common.service import watchdog
from services.rollout.engine import health
from services.rollout.engine.health import EngineMonitor, StartMonitor

BUSY = "while True: sum(range(10000))"
IDLE = "import time; time.sleep(600)"


class Scripted:
    """An engine of one process that answers beats, or does not."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.requests = self.chats = self.beats = 0
        self.progress_at = time.monotonic()
        self.up, self.starting, self.changing, self.answers = True, False, False, True
        self.processes = [psutil.Process(process.pid)]

    async def beat(self) -> None:
        self.beats += 1
        if not self.answers:
            await asyncio.sleep(600)
        self.progress_at = time.monotonic()


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr(watchdog, "PERIOD_S", 1.5)
    monkeypatch.setattr(health, "POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr(watchdog, "IDLE_S", 2.0)
    process = subprocess.Popen([sys.executable, "-c", getattr(request, "param", IDLE)])
    yield Scripted(process)
    process.kill()
    process.wait()


async def looks(engine: Scripted, seconds: float) -> str | None:
    """What the monitor says within so many seconds."""
    monitor = EngineMonitor(engine)
    until = time.monotonic() + seconds
    try:
        while (fault := monitor.fault()) is None and time.monotonic() < until:
            await asyncio.sleep(0.1)
    finally:
        monitor.close()
    return fault


async def test_an_idle_engine_that_answers_is_left_alone(engine: Scripted) -> None:
    assert await looks(engine, 5.0) is None
    assert engine.beats >= 2


async def test_an_idle_engine_that_answers_nothing_hangs(engine: Scripted) -> None:
    engine.answers = False
    fault = await looks(engine, 20.0) or ""
    assert re.search(r"no answer for \d+ s, and it uses no processor time", fault)


async def test_requests_without_a_token_and_without_computing_hang(engine: Scripted) -> None:
    engine.requests = 3
    fault = await looks(engine, 20.0) or ""
    assert re.search(r"no token with 3 requests in flight for \d+ s, and it uses no processor time", fault)
    assert engine.beats == 0, "tokens are the heartbeat"


@pytest.mark.parametrize("engine", [BUSY], indirect=True)
async def test_a_long_step_is_no_hang_until_its_limit(engine: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.requests = 1
    assert await looks(engine, 5.0) is None
    monkeypatch.setattr(watchdog, "BUSY_S", 1.0)
    assert "no token with 1 requests in flight" in (await looks(engine, 20.0) or "")


@pytest.mark.parametrize("changing", [True, False])
async def test_a_stopped_process_is_a_hang_whatever_the_engine_was_doing(engine: Scripted, changing: bool) -> None:
    engine.changing, engine.up = changing, not changing
    pid = engine.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert await looks(engine, 20.0) == f"the engine hangs: process {pid} is stopped"
    assert time.monotonic() - began < 2 * watchdog.PERIOD_S + 2.0


async def test_a_monitor_that_was_held_up_itself_accuses_nobody(engine: Scripted) -> None:
    engine.requests = 1
    monitor = EngineMonitor(engine)
    assert monitor.fault() is None
    time.sleep(5.0)  # noqa: ASYNC251  the loop is blocked: no token could be taken in
    assert monitor.fault() is None


class Clock:
    """Time that passes as the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def start_looks(
    engine: Scripted, monitor: StartMonitor, clock: Clock, seconds: int, *, really: float = 0.0
) -> str | None:
    """What the monitor of a start says within so many seconds of its clock, each taking `really` seconds."""
    for _ in range(seconds):
        clock.now += 1.0
        time.sleep(really)
        if fault := monitor.fault(engine.processes):
            return fault
    return None


def test_a_start_whose_processes_stand_still_is_given_up(engine: Scripted) -> None:
    clock = Clock()
    monitor = StartMonitor(1800.0, clock)
    time.sleep(1.0)  # the interpreter has started
    fault = start_looks(engine, monitor, clock, int(health.START_STILL_S) + 5)
    assert fault == "hangs while it starts: its processes have neither computed nor read for 120 s"
    assert clock.now >= health.START_STILL_S


@pytest.mark.parametrize("engine", [BUSY], indirect=True)
def test_a_start_that_computes_has_time_until_its_limit(engine: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "START_STILL_S", 30.0)
    # The test's clock runs ten times as fast as the process that computes.
    monkeypatch.setattr(health, "STILL_COMPUTES_S", health.STILL_COMPUTES_S / 10)
    clock = Clock()
    fault = start_looks(engine, StartMonitor(50.0, clock), clock, 60, really=0.1)
    assert fault == "is not up after 50 s"


def test_a_start_that_has_no_process_yet_does_not_stand_still(engine: Scripted) -> None:
    clock = Clock()
    engine.processes = []
    assert start_looks(engine, StartMonitor(1800.0, clock), clock, 300) is None


def test_a_start_that_is_stopped_is_given_up_soon(engine: Scripted) -> None:
    clock, pid = Clock(), engine.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    fault = start_looks(engine, StartMonitor(1800.0, clock), clock, 60)
    assert fault == f"hangs while it starts: process {pid} is stopped"
    assert clock.now < 2 * watchdog.PERIOD_S + 10


async def test_an_engine_that_is_being_started_is_left_to_its_own_monitor(engine: Scripted) -> None:
    engine.up, engine.starting = False, True
    os.kill(engine.processes[0].pid, signal.SIGSTOP)
    assert await looks(engine, 6.0) is None
