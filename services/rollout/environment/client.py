"""Client of the environment service: one stream for each episode. Every wait ends within its limit and a margin, whatever the service does.

A service that is stopped, killed or cut off is no fault of the environment: the episode fails, and may be played again elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio

from services.common.errors import PromptError
from services.common.models.prompts import CHARACTERS_PER_TOKEN
from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.streams.types import EnvironmentCall, Message, Task
from services.common.weights.channel import CLIENT_OPTIONS, token_metadata
from services.rollout.environment.types import EnvironmentFailed, Observation, World

MARGIN_S = 0.5
"""Beyond a limit of the service, for the way there and back."""
QUEUE_S = 60.0
"""Longest wait for a place."""

_Stream = grpc.aio.StreamStreamCall[pb.FromPolicy, pb.FromWorld]


class EnvironmentClient:
    """The environments of one service; `types.Worlds` describes the method."""

    def __init__(self, address: str, token: str | None) -> None:
        """Connects at the first episode."""
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._metadata = token_metadata(token)
        self._stub = pb_grpc.EnvironmentStub(self._channel)  # type: ignore[no-untyped-call]  # generated code

    async def close(self) -> None:
        """Ends the connection, and what is played over it."""
        await self._channel.close()

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[World]:
        """An episode of the task's environment."""
        if task.environment is None:
            raise PromptError("the task has no environment")
        stream: _Stream = self._stub.Play(metadata=self._metadata)
        episode = _Episode(stream, task, task.environment, self._address)
        try:
            yield episode
        finally:
            episode.end()


class _Episode:
    """One episode; `types.World` describes the methods."""

    def __init__(self, stream: _Stream, task: Task, call: EnvironmentCall, address: str) -> None:
        self._stream, self._task, self._call, self._address = stream, task, call, address
        self._turn = 0
        self._answer = asyncio.create_task(self._read())
        """The next message: it is read before it is asked for, as a service that gives an episode up says why at any time."""

    async def reset(self) -> Observation:
        """Begins it."""
        call = self._call
        limits = pb.Limits(
            queue_s=QUEUE_S, step_timeout_s=call.step_timeout_s, reply_timeout_s=self._task.timeout_s,
            max_observation_chars=CHARACTERS_PER_TOKEN * call.max_observation_tokens,
        )  # fmt: skip
        begin = pb.Begin(
            environment=call.name, config=json.dumps(call.config), task=json.dumps(self._task.extra_info), seed=call.seed,
            limits=limits,
        )  # fmt: skip
        return await self._ask(pb.FromPolicy(begin=begin), QUEUE_S + 2 * call.step_timeout_s)  # it is made, then reset

    async def step(self, reply: str) -> Observation:
        """Answers a reply."""
        self._turn += 1
        return await self._ask(pb.FromPolicy(reply=pb.Reply(turn=self._turn, text=reply)), self._call.step_timeout_s)

    async def _ask(self, message: pb.FromPolicy, limit_s: float) -> Observation:
        name, limit_s = self._call.name, limit_s + MARGIN_S
        try:
            async with asyncio.timeout(limit_s):
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended: the answer is why
                    await self._stream.write(message)
                answer = await self._answer
        except TimeoutError:
            self._stream.cancel()
            raise EnvironmentFailed(
                f"environment {name}: the service at {self._address} said nothing for {limit_s:g} s"
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
            raise EnvironmentFailed(f"environment {name}: the service at {self._address} failed: {why}") from error
        if answer is grpc.aio.EOF or not isinstance(answer, pb.FromWorld):
            raise EnvironmentFailed(f"environment {name}: the service at {self._address} ended the stream")
        if answer.HasField("failed"):
            raise EnvironmentFailed(answer.failed.detail, permanent=answer.failed.permanent)
        self._answer = asyncio.create_task(self._read())
        return _observation(answer.observed, name)

    def end(self) -> None:
        """Ends the stream, and so the environment."""
        self._answer.cancel()
        self._answer.add_done_callback(
            lambda answer: answer.cancelled() or answer.exception()
        )  # an error that nobody waits for
        self._stream.cancel()

    async def _read(self) -> object:
        return await self._stream.read()


def _observation(observed: pb.Observed, name: str) -> Observation:
    messages = tuple(_message(message, name) for message in observed.messages)
    reward = observed.reward if observed.HasField("reward") else None
    accuracy = observed.accuracy if observed.HasField("accuracy") else None
    return Observation(messages, observed.done, reward, accuracy, observed.detail)


def _message(message: pb.ChatMessage, name: str) -> Message:
    match message.role:
        case "user" | "tool" as role:
            return Message(role, message.content)
    raise EnvironmentFailed(f"environment {name}: the service sent a message of role {message.role!r}")
