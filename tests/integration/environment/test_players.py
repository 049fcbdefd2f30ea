"""Whatever an episode's environment does, its place is free in time, nothing of it is left, and no other episode notices."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.environments.types import Reason
from services.common.sandbox.pool import Sandbox
from services.environment.base import Message, Observation
from services.environment.players import Call, EpisodeFailed, Players
from tests.integration.environment.children import SLACK_S, all_end, children, settled
from tests.integration.environment.odd_package import install

LIMIT_S = 1.0
PLACES = 4


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    """Children that have the odd environments installed, under `odd`."""
    async with Sandbox(prepare=["services.environment.player:prepare"], environment=install(tmp_path)) as made:
        await made.start()
        yield made


@pytest.fixture
def forkserver(sandbox: Sandbox) -> int:
    assert sandbox.pid is not None
    return sandbox.pid


@pytest.fixture
def players(sandbox: Sandbox) -> Players:
    return Players(sandbox, places=PLACES)


def call(name: str = "odd", seed: int = 3, **config: Any) -> Call:
    return Call(name, config, seed, {}, queue_s=2 * LIMIT_S, step_timeout_s=LIMIT_S, memory_mib=256, most_chars=1000)


async def playing(players: Players, at: Call, replies: int = 1) -> list[Observation]:
    async with players.episode(at) as episode:
        return [await episode.reset(), *[await episode.step(f"reply {number}") for number in range(replies)]]


async def until_struck(child: psutil.Process) -> None:
    """Until a signal that ends or stops it has reached the process."""
    while child.is_running() and child.status() not in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}:
        await asyncio.sleep(0.01)


async def test_episodes_of_an_environment_are_played_by_the_same_child_each_from_its_beginning(
    forkserver: int, players: Players
) -> None:
    used = set[int]()
    for seed in range(5):
        said = await playing(players, call(seed=seed), replies=3)
        assert [observation.messages[0].content for observation in said] == [f"seed {seed}, 0", "ok", "ok", "ok"]
        used |= {child.pid for child in children(forkserver)}
    assert len(used) == 1
    await players.end_idle(after_s=0.0)
    assert await all_end(forkserver)


async def test_a_child_plays_one_environment_only_and_ends_after_so_many_episodes(
    forkserver: int, players: Players, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.environment.players.RECYCLE_AFTER", 2)
    used = []
    for name, left in (("odd", 1), ("guess_number", 2), ("odd", 1), ("odd", 2)):
        await playing(players, call(name))
        used.append(await settled(forkserver, left))
    odd, both, after_two, again = used
    assert len(odd) == 1
    assert odd < both
    assert after_two == both - odd
    assert len(again - both) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_idle_child_that_is_lost_is_replaced_unnoticed(
    forkserver: int, players: Players, number: signal.Signals
) -> None:
    await playing(players, call())
    (child,) = children(forkserver)
    child.send_signal(number)
    await until_struck(child)
    assert len(await playing(players, call())) == 2
    (other,) = await settled(forkserver, 1)
    assert other != child.pid


async def test_there_are_no_more_children_than_places(forkserver: int, sandbox: Sandbox) -> None:
    players = Players(sandbox, places=2)
    for name in ("odd", "guess_number", "calculator", "odd"):
        await playing(players, call(name))
        await settled(forkserver, 2)


async def test_an_environment_that_does_not_close_costs_its_child_and_nothing_else(
    forkserver: int, players: Players
) -> None:
    began = time.monotonic()
    assert len(await playing(players, call(what="sleeps", at="close"))) == 2
    assert time.monotonic() - began < SLACK_S
    assert await all_end(forkserver)


async def test_as_many_episodes_as_there_are_places_are_played_at_once_and_all_get_their_turn(players: Players) -> None:
    def won(number: int) -> Call:
        return call("guess_number", seed=number, numbers=[5, 11])

    games = await asyncio.gather(*(playing(players, won(number), replies=2) for number in range(6 * PLACES)))
    assert {game[0] for game in games} == {Observation((Message("user", "5 6 7 8 9 10 11?"),))}


WRONG = [
    ("sleeps", "step", Reason.TIMEOUT), ("sleeps", "reset", Reason.TIMEOUT), ("sleeps", "make", Reason.TIMEOUT),
    ("computes", "step", Reason.TIMEOUT), ("exits", "step", Reason.DIED), ("exits", "make", Reason.DIED), ("dies", "reset", Reason.DIED),
    ("stops", "step", Reason.KILLED), ("eats", "step", Reason.DIED), ("shouts", "step", Reason.DIED), ("raises", "step", Reason.ERROR),
    ("nonsense", "reset", Reason.ERROR), ("unrewarded", "step", Reason.BAD_OBSERVATION), ("breeds", "step", Reason.TIMEOUT),
    ("raises", "make", Reason.CONFIG), ("away", "make", Reason.UNAVAILABLE), ("away", "reset", Reason.UNAVAILABLE),
    ("away", "step", Reason.UNAVAILABLE),
]  # fmt: skip


@pytest.mark.parametrize(("what", "at", "reason"), WRONG, ids=[f"{what} at {at}" for what, at, _ in WRONG])
async def test_a_failed_episode_says_why_in_time_and_leaves_nothing(
    forkserver: int, players: Players, what: str, at: str, reason: Reason
) -> None:
    beside = asyncio.create_task(playing(players, call("guess_number"), replies=1))
    began = time.monotonic()
    with pytest.raises(EpisodeFailed, match=r"^environment odd ") as failed:
        await playing(players, call(what=what, at=at))
    assert time.monotonic() - began < LIMIT_S + SLACK_S
    assert (failed.value.reason, failed.value.permanent) == (reason, reason is Reason.CONFIG)
    assert len(await beside) == 2, "another episode does not notice"
    await players.end_idle(after_s=0.0)
    assert await all_end(forkserver)


async def test_a_second_answer_fails_the_episode_and_is_never_heard_in_another(
    forkserver: int, players: Players
) -> None:
    with pytest.raises(EpisodeFailed) as failed:
        await playing(players, call(what="answers twice"), replies=2)
    assert failed.value.reason is Reason.DIED
    assert await all_end(forkserver)
    assert await playing(players, call(what="answers twice"), replies=1)  # it ends before the second answer is read
    said = await playing(players, call(seed=5), replies=2)
    assert [observation.messages[0].content for observation in said] == ["seed 5, 0", "ok", "ok"]


async def test_an_idle_child_that_was_stopped_costs_no_episode_its_limit(forkserver: int, players: Players) -> None:
    await playing(players, call())
    (child,) = children(forkserver)
    child.send_signal(signal.SIGSTOP)
    await until_struck(child)
    began = time.monotonic()
    assert len(await playing(players, call())) == 2
    assert time.monotonic() - began < LIMIT_S


async def test_a_child_that_is_killed_from_outside_is_no_fault_of_the_environment(
    forkserver: int, players: Players
) -> None:
    async with players.episode(call()) as episode:
        await episode.reset()
        (child,) = children(forkserver)
        child.send_signal(signal.SIGKILL)
        with pytest.raises(EpisodeFailed) as failed:
            await episode.step("still there?")
    assert (failed.value.reason, failed.value.permanent) == (Reason.KILLED, False)


async def test_an_episode_that_is_left_ends_its_child_at_once(forkserver: int, players: Players) -> None:
    task = asyncio.create_task(playing(players, call(what="sleeps")))
    while not children(forkserver):
        await asyncio.sleep(0.01)
    task.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < SLACK_S
    assert await all_end(forkserver)


async def test_without_a_place_in_time_an_episode_fails_and_with_one_it_does_not(sandbox: Sandbox) -> None:
    players = Players(sandbox, places=1)
    async with players.episode(call()):
        with pytest.raises(EpisodeFailed, match=r"had no place within 0\.2 s") as failed:
            await playing(players, replace(call(), queue_s=0.2))
    assert not failed.value.permanent
    assert len(await playing(players, call())) == 2


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("nowhere", {}, "there is no environment 'nowhere'"),
        ("missing", {}, "cannot be imported"),
        ("guess_number", {"width": 1}, "width must be 2 to 100"),
        ("odd", {"speed": 1}, "refuses its config: TypeError"),
    ],
)
async def test_a_name_or_setting_that_cannot_be_played_fails_for_good(
    players: Players, name: str, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(EpisodeFailed) as failed:
        await playing(players, call(name, **config))
    assert failed.value.permanent
    assert said in str(failed.value)
