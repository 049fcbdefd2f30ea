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

from services.common.environments.types import EnvironmentFailed, Observation, Reason, World
from services.common.errors import PromptError
from services.common.models.prompts import CHARACTERS_PER_TOKEN
from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.streams.types import EnvironmentCall, Message, Task
from services.common.weights.channel import CLIENT_OPTIONS, token_metadata

MARGIN_S = 0.4
"""Beyond a limit of the service, for the way there and back. The episode is to be over half a second after the limit."""
QUEUE_S = 60.0
"""Longest wait for a place."""

_LOST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}
"""The end of a connection; INTERNAL ("Internal error from Core") where it comes while the stream begins."""

_Stream = grpc.aio.StreamStreamCall[pb.FromPolicy, pb.FromWorld]


class EnvironmentClient:
    """The environments of one service; `types.Worlds` describes the method."""

    def __init__(self, address: str, token: str | None) -> None:
        """Connects at the first episode."""
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._metadata = token_metadata(token)
        self._stub = pb_grpc.EnvironmentStub(self._channel)  # type: ignore[no-untyped-call]  # generated code
        self._ending: set[asyncio.Task[None]] = set()

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
        except BaseException:
            episode.break_off()
            raise
        ending = asyncio.create_task(episode.end())  # nobody waits for it
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


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
                f"environment {name}: the service at {self._address} said nothing for {limit_s:g} s",
                reason=Reason.SILENT,
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            failed = f"environment {name}: the service at {self._address} failed"
            raise _failure(failed, error) from error
        if answer is grpc.aio.EOF or not isinstance(answer, pb.FromWorld):
            ended = f"environment {name}: the service at {self._address} ended the stream"
            raise EnvironmentFailed(ended, reason=Reason.LOST)
        if answer.HasField("failed"):
            failed, reason = answer.failed.detail, answer.failed.reason
            known = Reason(reason) if reason in set(Reason) else Reason.ERROR
            raise EnvironmentFailed(failed, permanent=answer.failed.permanent, reason=known)
        self._answer = asyncio.create_task(self._read())
        return _observation(answer.observed, name)

    async def end(self) -> None:
        """Ends the stream in good order: the service may use the environment's process again."""
        with suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(MARGIN_S):
                await self._stream.done_writing()
                await self._answer
        self.break_off()

    def break_off(self) -> None:
        """Ends the stream at once, and so the environment's process."""
        self._answer.cancel()
        self._answer.add_done_callback(
            lambda answer: answer.cancelled() or answer.exception()
        )  # an error that nobody waits for
        self._stream.cancel()

    async def _read(self) -> object:
        return await self._stream.read()


def _failure(what: str, error: Exception) -> EnvironmentFailed:
    """The end of a stream by an error; a server that refuses a call is still there."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return EnvironmentFailed(f"{what}: {error}", reason=Reason.LOST)
    reason = Reason.LOST if error.code() in _LOST else Reason.ERROR
    return EnvironmentFailed(f"{what}: {error.code().name}: {error.details()}", reason=reason)


def _observation(observed: pb.Observed, name: str) -> Observation:
    messages = tuple(_message(message, name) for message in observed.messages)
    reward = observed.reward if observed.HasField("reward") else None
    accuracy = observed.accuracy if observed.HasField("accuracy") else None
    return Observation(messages, observed.done, reward, accuracy, observed.detail)


def _message(message: pb.ChatMessage, name: str) -> Message:
    match message.role:
        case "user" | "tool" as role:
            return Message(role, message.content)
    sent = f"environment {name}: the service sent a message of role {message.role!r}"
    raise EnvironmentFailed(sent, reason=Reason.BAD_OBSERVATION)
