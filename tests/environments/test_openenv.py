"""A server of OpenEnv's own package, in a process of its own, and episodes in processes as in the service.

Run by `make test-environments`: the package is no part of the other environments.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.config.settings import Settings
from services.common.sandbox.pool import Sandbox
from services.environment import switches
from services.environment.base import Message
from services.environment.players import Call, EpisodeFailed, Players
from tests.environments.echo_process import echo_server

pytestmark = [
    pytest.mark.skipif(find_spec("openenv") is None, reason="make test-environments"),
    pytest.mark.asyncio(loop_scope="module"),
]

PLACES = 2
"""Of the server."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Its host and port."""
    with echo_server(Path(sys.executable), PLACES) as where:
        yield where


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def players(server: str) -> AsyncIterator[Players]:
    variables = switches.variables(Settings(openenv_hosts=[server, "127.0.0.1:1"]))
    async with Sandbox(prepare=["services.environment.player:prepare"], environment=variables) as sandbox:
        yield Players(sandbox, places=8)


def call(where: str, seed: int = 1, **config: object) -> Call:
    return Call("openenv", {"url": f"http://{where}", **config}, seed, {}, queue_s=60.0, step_timeout_s=60.0)


async def test_the_echo_environment_is_played_with_the_default_settings(players: Players, server: str) -> None:
    async with players.episode(call(server, seed=7)) as episode:
        begun = await episode.reset()
        assert begun.messages == (Message("user", "Echo environment ready, 7!"),)
        said = await episode.step("Hello")
        assert (said.messages, said.reward) == ((Message("user", "Hello"),), 0.5)
        end = await episode.step("bye")
    assert end.done
    assert end.reward == pytest.approx(0.8)


async def test_an_episode_may_end_after_so_many_turns(players: Players, server: str) -> None:
    async with players.episode(call(server, turns=1)) as episode:
        await episode.reset()
        assert (await episode.step("ten chars.")).reward == pytest.approx(1.0)


async def test_every_episode_gives_its_session_back(players: Players, server: str) -> None:
    for _ in range(3 * PLACES):
        async with players.episode(call(server)) as episode:
            await episode.reset()


async def test_a_session_too_many_is_a_failure_with_the_servers_words(players: Players, server: str) -> None:
    async with AsyncExitStack() as open_episodes:
        episodes = [await open_episodes.enter_async_context(players.episode(call(server))) for _ in range(PLACES + 1)]
        for episode in episodes[:PLACES]:
            await episode.reset()
        with pytest.raises(EpisodeFailed, match=f"http://{server} answered with an error: CAPACITY_REACHED") as failure:
            await episodes[PLACES].reset()
    assert not failure.value.permanent


async def test_an_action_of_other_fields_is_a_failure_with_the_servers_words(players: Players, server: str) -> None:
    async with AsyncExitStack() as open_episodes:
        episode = await open_episodes.enter_async_context(players.episode(call(server, action_field="text")))
        await episode.reset()
        with pytest.raises(EpisodeFailed, match="answered with an error: VALIDATION_ERROR"):
            await episode.step("Hello")


async def test_an_unreachable_server_fails_the_episode_and_is_named(players: Players) -> None:
    with pytest.raises(
        EpisodeFailed, match=r"http://127\.0\.0\.1:1 cannot be reached: ConnectionRefusedError"
    ) as failure:
        async with players.episode(call("127.0.0.1:1")) as episode:
            await episode.reset()
    assert not failure.value.permanent


async def test_a_host_that_the_operator_does_not_allow_is_refused_for_good(players: Players) -> None:
    with pytest.raises(EpisodeFailed, match=r"jobs may not reach 127\.0\.0\.1:2") as failure:
        async with players.episode(call("127.0.0.1:2")):
            pass
    assert failure.value.permanent
