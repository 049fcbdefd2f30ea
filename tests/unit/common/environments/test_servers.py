"""Environment servers: new episodes go to those that are there; one that drains, dies or cannot be reached has none of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from services.common.environments import servers as module
from services.common.environments.client import QUEUE_S
from services.common.environments.servers import KNOWN_FOR_S, EnvironmentServers
from services.common.environments.types import EnvironmentFailed, Observation, Reason
from services.common.service.heartbeat import EXPIRES_S, WorkerKind, WorkerStatus
from services.common.streams.types import Task

TASK = cast("Task", None)


class Fleet:
    """The list of workers, the servers behind their addresses, and a clock that sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.listed: dict[str, WorkerStatus] = {}
        self.failing: dict[str, EnvironmentFailed] = {}
        self.played: list[str] = []
        self.on_sleep: list[Any] = []
        """Called one after the other, each time that somebody waits."""

    def beat(self, *names: str, pid: int = 1, address: bool = True) -> None:
        """A heartbeat of each."""
        for name in names:
            where = name if address else None
            self.listed[name] = WorkerStatus(
                name, WorkerKind.ENVIRONMENT, "idle", environment_address=where, host="h", pid=pid, at=self.now
            )

    def pass_time(self, seconds: float = KNOWN_FOR_S) -> None:
        """Later."""
        self.now += seconds

    async def live_workers(self, _: object) -> list[WorkerStatus]:
        return [WorkerStatus("rollout-0", WorkerKind.ROLLOUT, "sampling"), *self.listed.values()]

    async def sleep(self, seconds: float) -> None:
        self.pass_time(seconds)
        if self.on_sleep:
            self.on_sleep.pop(0)()

    async def play(self, servers: EnvironmentServers, times: int = 1) -> list[str]:
        """The addresses of so many episodes."""
        self.played.clear()
        for _ in range(times):
            async with servers.episode(TASK) as world:
                await world.reset()
        return list(self.played)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    fleet = Fleet()

    class Client:
        def __init__(self, address: str, _: str | None) -> None:
            self.address = address

        @asynccontextmanager
        async def episode(self, _: Task) -> AsyncIterator[Client]:
            yield self

        async def reset(self) -> Observation:
            fleet.played.append(self.address)
            if failure := fleet.failing.get(self.address):
                raise failure
            return Observation(())

        async def close(self) -> None: ...

    monkeypatch.setattr(module, "EnvironmentClient", Client)
    monkeypatch.setattr(module, "live_workers", fleet.live_workers)
    monkeypatch.setattr(time, "monotonic", lambda: fleet.now)
    monkeypatch.setattr(asyncio, "sleep", fleet.sleep)
    return fleet


@pytest.fixture
def servers() -> EnvironmentServers:
    return EnvironmentServers(cast("Any", None), None)


async def test_servers_take_turns(fleet: Fleet, servers: EnvironmentServers) -> None:
    fleet.beat("a", "b", "c")
    assert sorted(await fleet.play(servers, 6)) == ["a", "a", "b", "b", "c", "c"]


async def test_a_draining_server_is_given_no_new_episode(fleet: Fleet, servers: EnvironmentServers) -> None:
    fleet.beat("a", "b")
    await fleet.play(servers)
    fleet.beat("a", address=False)
    fleet.pass_time()
    assert set(await fleet.play(servers, 4)) == {"b"}


async def test_a_server_whose_heartbeat_expired_is_not_chosen_and_one_that_came_is(
    fleet: Fleet, servers: EnvironmentServers
) -> None:
    fleet.beat("a")
    await fleet.play(servers)
    del fleet.listed["a"]
    fleet.beat("b")
    fleet.pass_time()
    assert set(await fleet.play(servers, 4)) == {"b"}


async def test_the_next_attempt_goes_past_a_server_that_died_while_its_heartbeat_is_still_there(
    fleet: Fleet, servers: EnvironmentServers
) -> None:
    fleet.beat("a", "b")
    fleet.failing["a"] = EnvironmentFailed("environment e: the service at a failed", reason=Reason.LOST)
    with pytest.raises(EnvironmentFailed, match="at a failed"):
        await fleet.play(servers, 2)
    fleet.pass_time()
    assert set(await fleet.play(servers, 4)) == {"b"}


@pytest.mark.parametrize(("pid", "later_s"), [(2, KNOWN_FOR_S), (1, EXPIRES_S + KNOWN_FOR_S)])
async def test_a_lost_server_has_episodes_again_when_another_process_is_there_or_it_lives_on(
    fleet: Fleet, servers: EnvironmentServers, pid: int, later_s: float
) -> None:
    fleet.beat("a", "b")
    fleet.failing["a"] = EnvironmentFailed("environment e: the service at a failed", reason=Reason.LOST)
    with pytest.raises(EnvironmentFailed):
        await fleet.play(servers, 2)
    fleet.failing.clear()
    fleet.pass_time(later_s)
    fleet.beat("a", "b", pid=pid)
    assert set(await fleet.play(servers, 4)) == {"a", "b"}


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.SILENT, Reason.ERROR])
async def test_a_server_keeps_its_turn_when_its_environment_fails(
    fleet: Fleet, servers: EnvironmentServers, reason: Reason
) -> None:
    fleet.beat("a")
    fleet.failing["a"] = EnvironmentFailed("environment e failed", reason=reason)
    for _ in range(2):
        with pytest.raises(EnvironmentFailed):
            await fleet.play(servers)
    assert fleet.played == ["a"]


async def test_an_episode_waits_for_a_server_to_come(fleet: Fleet, servers: EnvironmentServers) -> None:
    fleet.on_sleep = [lambda: None, lambda: fleet.beat("a")]
    began = fleet.now
    assert await fleet.play(servers) == ["a"]
    assert fleet.now - began <= 3 * KNOWN_FOR_S


async def test_without_a_server_an_episode_fails_after_a_while_and_names_the_wait(
    fleet: Fleet, servers: EnvironmentServers
) -> None:
    with pytest.raises(EnvironmentFailed, match=f"is there, and none has come within {QUEUE_S:g} s$") as failed:
        await fleet.play(servers)
    assert (failed.value.reason, failed.value.permanent) == (Reason.NO_PLACE, False)


async def test_who_does_not_wait_hears_at_once_that_no_server_is_there(fleet: Fleet) -> None:
    began = fleet.now
    with pytest.raises(EnvironmentFailed, match=r"^no environment server is there$"):
        await fleet.play(EnvironmentServers(cast("Any", None), None, wait_s=0.0))
    assert fleet.now == began
