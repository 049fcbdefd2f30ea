"""The guard of the event loop: a loop that hangs ends its process, and so does one that slept through its leases."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from services.common.service.watchdog import BLOCKED_S, EXIT_CODE, STOPPED_S, LoopGuard


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ended() -> list[int]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_loop_that_turns_is_left_alone(clock: Clock, ended: list[int]) -> None:
    guard = LoopGuard(clock=clock, end=ended.append)
    for _ in range(500):
        clock.now += 1.0
        guard.record_turn()
        guard.check()
    assert ended == []


def test_a_loop_that_does_not_turn_ends_the_process(clock: Clock, ended: list[int]) -> None:
    guard = LoopGuard(clock=clock, end=ended.append)
    for _ in range(int(BLOCKED_S)):
        clock.now += 1.0
        guard.check()
    assert ended == []
    clock.now += 1.0
    guard.check()
    assert ended == [EXIT_CODE]


def test_a_process_that_slept_through_its_leases_ends_when_it_wakes(clock: Clock, ended: list[int]) -> None:
    guard = LoopGuard(clock=clock, end=ended.append)
    clock.now += STOPPED_S - 1.0
    guard.check()
    assert ended == [], "its work is still its own"
    clock.now += STOPPED_S + 1.0
    guard.check()
    assert ended == [EXIT_CODE]


async def test_a_live_loop_is_seen_to_turn(ended: list[int]) -> None:
    guard = LoopGuard(0.01, end=ended.append)
    guard.start()
    await asyncio.sleep(1.2)
    assert guard._turned > time.monotonic() - 1.0
    guard.stop()


def test_a_blocked_service_really_ends() -> None:
    script = (
        "import asyncio, time\n"
        "from services.common.service.lifecycle import Drain, run_service\n"
        "async def hang():\n"
        "    time.sleep(60)\n"
        "asyncio.run(run_service(Drain(), {'hang': hang}, drain_timeout_s=1.0, blocked_s=2.0))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == EXIT_CODE
    assert "in hang" in done.stderr, "where it hung"
