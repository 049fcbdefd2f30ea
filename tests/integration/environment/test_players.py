"""Whatever an episode's environment does, its place is free in time, nothing of it is left, and no other episode notices."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.sandbox.pool import Sandbox
from services.environment.base import Message, Observation
from services.environment.players import Call, EpisodeFailed, Players, Reason
from tests.integration.environment.children import SLACK_S, all_end, children
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


async def test_an_episode_is_played_in_a_child_that_ends_with_it(forkserver: int, players: Players) -> None:
    said = await playing(players, call(), replies=3)
    assert [observation.messages[0].content for observation in said] == ["seed 3, 0", "ok", "ok", "ok"]
    assert await all_end(forkserver)


async def test_as_many_episodes_as_there_are_places_are_played_at_once_and_all_get_their_turn(players: Players) -> None:
    def won(number: int) -> Call:
        return call("guess_number", seed=number, lows=[5, 5])

    games = await asyncio.gather(*(playing(players, won(number), replies=2) for number in range(6 * PLACES)))
    assert {game[0] for game in games} == {Observation((Message("user", "5-11?"),))}


WRONG = [
    ("sleeps", "step", Reason.TIMEOUT), ("sleeps", "reset", Reason.TIMEOUT), ("sleeps", "make", Reason.TIMEOUT),
    ("computes", "step", Reason.TIMEOUT), ("exits", "step", Reason.DIED), ("exits", "make", Reason.DIED), ("dies", "reset", Reason.DIED),
    ("stops", "step", Reason.KILLED), ("eats", "step", Reason.DIED), ("shouts", "step", Reason.DIED), ("raises", "step", Reason.ERROR),
    ("nonsense", "reset", Reason.ERROR), ("unrewarded", "step", Reason.BAD_OBSERVATION), ("breeds", "step", Reason.TIMEOUT),
    ("raises", "make", Reason.CONFIG),
]  # fmt: skip


@pytest.mark.parametrize(("what", "at", "reason"), WRONG, ids=[f"{what} at {at}" for what, at, _ in WRONG])
async def test_a_failed_episode_says_why_in_time_and_leaves_nothing(
    forkserver: int, players: Players, what: str, at: str, reason: Reason
) -> None:
    beside = asyncio.create_task(playing(players, call("guess_number"), replies=2))
    began = time.monotonic()
    with pytest.raises(EpisodeFailed, match=r"^environment odd ") as failed:
        await playing(players, call(what=what, at=at))
    assert time.monotonic() - began < LIMIT_S + SLACK_S
    assert (failed.value.reason, failed.value.permanent) == (reason, reason is Reason.CONFIG)
    assert len(await beside) == 3, "another episode does not notice"
    assert await all_end(forkserver)


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
        ("guess_number", {"width": 1}, "width must be 2 to 1000"),
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
