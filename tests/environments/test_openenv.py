"""A server of OpenEnv's own package, in a process of its own, and episodes in processes as in the service.

Run by `make test-environments`: the package is no part of the other environments.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from services.common.config.settings import Settings
from services.common.sandbox.pool import Sandbox
from services.environment import switches
from services.environment.base import Message
from services.environment.players import Call, EpisodeFailed, Players

pytestmark = [
    pytest.mark.skipif(find_spec("openenv") is None, reason="make test-environments"),
    pytest.mark.asyncio(loop_scope="module"),
]

START_S = 120.0
PLACES = 2
"""Of the server."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[str]:
    """Its host and port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    script = Path(__file__).with_name("echo_server.py")
    process = await asyncio.create_subprocess_exec(sys.executable, script, where.rpartition(":")[2])
    try:
        async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
            while not await healthy(client, where):
                assert process.returncode is None
                await asyncio.sleep(0.1)
        yield where
    finally:
        process.kill()
        await process.wait()


async def healthy(client: httpx.AsyncClient, where: str) -> bool:
    try:
        return (await client.get(f"http://{where}/health")).is_success
    except httpx.TransportError:
        return False


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
