"""Openings: a group whose environments are away or full begins later, holds nothing meanwhile, and spends no attempt on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.common.environments.types import EnvironmentFailed, Observation, Reason
from services.common.streams.types import Message, Task
from services.rollout.sampling import openings
from services.rollout.sampling.openings import Openings
from tests.unit.rollout.sampling.test_episodes import TASK

BEGUN = Observation((Message("user", "go"),))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(openings, "_LONGEST_PAUSE_S", 0.04)


@dataclass
class Full:
    """Worlds of a server that has so many sessions, or says something else for the first requests."""

    sessions: int = 100
    says: Iterable[Reason | None] = ()
    held: int = 0
    most_held: int = 0
    asked: int = 0
    _says: Any = field(init=False)

    def __post_init__(self) -> None:
        self._says = iter(self.says)

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[Any]:  # noqa: ARG002  a `Worlds`
        session = _Session(self)
        try:
            yield session
        finally:
            self.held -= session.held


@dataclass
class _Session:
    server: Full
    held: bool = False

    async def reset(self) -> Observation:
        self.server.asked += 1
        await asyncio.sleep(0.001)
        if (reason := next(self.server._says, None)) is not None:
            raise EnvironmentFailed(f"said {reason}", reason=reason)
        if self.server.held == self.server.sessions:
            raise EnvironmentFailed("no session is left", reason=Reason.UNAVAILABLE)
        self.held = True
        self.server.held += 1
        self.server.most_held = max(self.server.held, self.server.most_held)
        return BEGUN


async def play(all_of: Openings, task: Task, seconds: float = 0.02) -> None:
    async with all_of.open(task) as begun:
        assert [said for _, said in begun] == [BEGUN] * task.group_size
        await asyncio.sleep(seconds)


async def test_more_groups_than_a_server_has_sessions_for_all_begin_one_after_the_other() -> None:
    server = Full(sessions=5)
    all_of = Openings(server)
    async with asyncio.timeout(10.0):
        await asyncio.gather(*(play(all_of, replace(TASK, group_id=number)) for number in range(12)))
    assert server.most_held == 5
    assert server.held == 0
    assert all_of.trouble == ""


@pytest.mark.parametrize("reason", [Reason.UNAVAILABLE, Reason.NO_PLACE])
async def test_what_passes_is_waited_for_and_is_the_trouble_meanwhile(reason: Reason) -> None:
    server = Full(says=[reason] * 8)
    all_of = Openings(server)
    playing = asyncio.create_task(play(all_of, TASK))
    while not (trouble := all_of.trouble):
        await asyncio.sleep(0.001)
    assert trouble == f"said {reason}"
    assert server.held == 0, "nothing is held while it waits"
    await playing
    assert server.asked >= 8
    assert all_of.trouble == ""


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.UNAVAILABLE, Reason.NO_PLACE}))
async def test_any_other_failure_is_one_at_once(reason: Reason) -> None:
    server = Full(says=[reason])
    with pytest.raises(EnvironmentFailed, match=f"said {reason}"):
        await play(Openings(server), TASK)
    assert server.asked <= TASK.group_size
    assert server.held == 0


async def test_the_wait_ends_with_its_cause_before_the_attempts_time() -> None:
    all_of, began = Openings(Full(sessions=0)), time.monotonic()
    with pytest.raises(EnvironmentFailed, match="no session is left"):
        await play(all_of, replace(TASK, timeout_s=0.6))
    assert 0.15 < time.monotonic() - began < 0.6
    assert all_of.trouble == ""


async def test_a_group_that_is_cancelled_while_it_waits_leaves_no_trouble() -> None:
    all_of = Openings(Full(sessions=0))
    playing = asyncio.create_task(play(all_of, TASK))
    while not all_of.trouble:
        await asyncio.sleep(0.001)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert all_of.trouble == ""
