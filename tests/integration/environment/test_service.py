"""Episodes over gRPC: whatever environment, service or client do, no wait is longer than its limit and a margin, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.common.environments import client as client_module
from services.common.environments.client import MARGIN_S, EnvironmentClient
from services.common.environments.types import EnvironmentFailed, Observation
from services.common.pb import environment_pb2 as pb
from services.common.streams.types import EnvironmentCall, Message, Purpose, Task
from tests.integration.environment.children import SLACK_S, all_end, children
from tests.integration.environment.service_process import PLACES

TOKEN = "a token of the tests"  # noqa: S105
LIMIT_S = 1.0
ROOT = Path(__file__).parents[3]


@dataclass
class Service:
    """A running service."""

    process: subprocess.Popen[str]
    port: int
    forkserver: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def is_idle(self) -> bool:
        """Whether all episodes end in time."""
        return await all_end(self.forkserver, 2 * SLACK_S)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    command = [sys.executable, "-m", "tests.integration.environment.service_process", str(tmp_path), TOKEN]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    port, forkserver = map(int, process.stdout.readline().split())
    try:
        yield Service(process, port, forkserver)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[EnvironmentClient]:
    made = EnvironmentClient(service.address, TOKEN)
    yield made
    await made.close()


def task(name: str = "odd", seed: int = 3, **config: Any) -> Task:
    call = EnvironmentCall(
        name, config, seed, max_turns=3, max_turn_tokens=8, max_observation_tokens=16, step_timeout_s=LIMIT_S
    )
    return Task(
        job_id="job", lineage=1, group_id=0, attempt=1, purpose=Purpose.TRAIN, prompt=(), data_source="environment", ground_truth="",
        extra_info={"row": 7}, group_size=2, temperature=1.0, max_tokens=64, min_policy_version=0, timeout_s=20.0, environment=call,
    )  # fmt: skip


async def played(client: EnvironmentClient, at: Task, replies: int = 1) -> list[Observation]:
    async with client.episode(at) as world:
        return [await world.reset(), *[await world.step(f"reply {number}") for number in range(replies)]]


async def test_an_episode_is_played_to_its_end(client: EnvironmentClient, service: Service) -> None:
    async with client.episode(task("guess_number", numbers=[5, 11])) as world:
        assert await world.reset() == Observation((Message("user", "5 6 7 8 9 10 11?"),))
        said = [await world.step(str(number)) for number in (5, 6, 7)]
    assert said[-1].done
    assert said[-1].reward in {0.0, 1.0}
    assert said[-1].accuracy == said[-1].reward
    assert (
        all(
            not observation.done and observation.messages[0].content.startswith(("higher: ", "lower: "))
            for observation in said[:1]
        )
        or said[0].done
    )
    assert (await played(client, task()))[0].messages[0].content == "seed 3, 1", "an environment sees the row"
    assert await service.is_idle()


async def test_an_episode_that_the_policy_ends_leaves_its_child_to_the_next(
    client: EnvironmentClient, service: Service
) -> None:
    used = set[int]()
    for seed in range(8):
        await played(client, task(seed=seed))
        await asyncio.sleep(0.05)  # the end of a stream is not waited for
        used |= {child.pid for child in children(service.forkserver)}
    assert len(used) <= 2


async def test_many_episodes_take_turns_on_the_places(client: EnvironmentClient, service: Service) -> None:
    games = await asyncio.gather(
        *(played(client, task("guess_number", seed, numbers=[5, 11])) for seed in range(8 * PLACES))
    )
    assert {game[0].messages for game in games} == {(Message("user", "5 6 7 8 9 10 11?"),)}
    assert await service.is_idle()


@pytest.mark.parametrize(
    "what", ["sleeps", "computes", "exits", "dies", "stops", "eats", "shouts", "raises", "nonsense", "breeds"]
)
async def test_an_environment_that_fails_is_named_in_time_and_another_is_not_held_up(
    client: EnvironmentClient, service: Service, what: str
) -> None:
    beside = asyncio.create_task(played(client, task("guess_number"), replies=2))
    began = time.monotonic()
    with pytest.raises(EnvironmentFailed, match=r"^environment odd ") as failed:
        await played(client, task(what=what))
    assert time.monotonic() - began < LIMIT_S + MARGIN_S + SLACK_S
    assert not failed.value.permanent
    assert len(await beside) == 3
    assert await service.is_idle()


@pytest.mark.parametrize(
    ("at", "said"), [(task("nowhere"), "no environment 'nowhere'"), (task(speed=1), "refuses its config")]
)
async def test_what_can_never_be_played_fails_for_good(client: EnvironmentClient, at: Task, said: str) -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        await played(client, at)
    assert failed.value.permanent
    assert said in str(failed.value)


async def test_a_client_without_the_token_gets_nothing(service: Service) -> None:
    stranger = EnvironmentClient(service.address, "another token")
    with pytest.raises(EnvironmentFailed, match="UNAUTHENTICATED"):
        await played(stranger, task())
    assert children(service.forkserver) == []
    await stranger.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_a_service_that_is_stopped_or_killed_in_a_turn_holds_nobody(
    client: EnvironmentClient, service: Service, number: signal.Signals
) -> None:
    async with client.episode(task()) as world:
        await world.reset()
        service.process.send_signal(number)
        began = time.monotonic()
        with pytest.raises(EnvironmentFailed, match="the service at") as failed:
            await world.step("still there?")
        assert time.monotonic() - began < LIMIT_S + MARGIN_S + SLACK_S
        assert not failed.value.permanent, "another service may play it"


async def test_a_client_that_goes_away_takes_its_episode_with_it(client: EnvironmentClient, service: Service) -> None:
    gone = asyncio.create_task(played(client, task(what="sleeps")))
    while not children(service.forkserver):
        await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert await service.is_idle()


async def test_a_policy_that_does_not_reply_loses_its_place(client: EnvironmentClient, service: Service) -> None:
    async with client.episode(replace(task(), timeout_s=0.3)) as world:
        await world.reset()
        await asyncio.sleep(0.3 + SLACK_S)
        assert await service.is_idle()
        with pytest.raises(EnvironmentFailed, match=r"waited 0\.3 s for a reply"):
            await world.step("late")


async def test_a_place_that_is_not_free_in_time_fails_the_episode_and_not_the_next(
    client: EnvironmentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "QUEUE_S", 0.3)
    holding = [asyncio.create_task(played(client, task(what="sleeps"))) for _ in range(PLACES)]
    await asyncio.sleep(0.2)
    with pytest.raises(EnvironmentFailed, match=r"had no place within 0\.3 s"):
        await played(client, task())
    await asyncio.gather(*holding, return_exceptions=True)
    assert len(await played(client, task())) == 2


async def test_a_reply_out_of_turn_ends_the_episode(client: EnvironmentClient, service: Service) -> None:
    stream = client._stub.Play(metadata=client._metadata)
    limits = pb.Limits(queue_s=1, step_timeout_s=1, reply_timeout_s=5, max_observation_chars=100)
    await stream.write(pb.FromPolicy(begin=pb.Begin(environment="odd", limits=limits)))
    assert (await stream.read()).HasField("observed")
    for _ in range(2):
        await stream.write(pb.FromPolicy(reply=pb.Reply(turn=1, text="twice")))
    assert (await stream.read()).HasField("observed")
    assert (await stream.read()).failed.detail == "environment odd was not given the reply of turn 2"
    assert await stream.read() is grpc.aio.EOF
    assert await service.is_idle()


@pytest.mark.parametrize("wrong", [{"config": "[1]"}, {"config": "{"}, {"task": "7"}])
async def test_a_first_message_that_is_none_is_refused_for_good(
    client: EnvironmentClient, wrong: dict[str, Any]
) -> None:
    stream = client._stub.Play(metadata=client._metadata)
    await stream.write(
        pb.FromPolicy(begin=pb.Begin(environment="odd", limits=pb.Limits(queue_s=1, step_timeout_s=1), **wrong))
    )
    failed = (await stream.read()).failed
    assert failed.permanent
    assert failed.reason == "config"
