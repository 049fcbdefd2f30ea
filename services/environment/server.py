"""Server of episodes over gRPC: `proto/environment.proto`.

Begin ──► a place and a child ──► Observed ──► Reply ──► step ──► Observed ──► …          whatever fails: Failed, and the end
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from services.common.environments.types import Reason
from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.service import grpc_server
from services.environment.base import Observation
from services.environment.players import Call, Episode, EpisodeFailed, Players

log = logging.getLogger(__name__)

MESSAGE_BYTES = 8 << 20
"""Longest message: a row's `extra_info` has 2 MiB at most, and protobuf makes texts no longer."""
_STOP_GRACE_S = 1.0

_Requests = AsyncIterator[pb.FromPolicy]


class EnvironmentService(pb_grpc.EnvironmentServicer):
    """The contract's one call."""

    def __init__(self, players: Players, *, memory_mib: int) -> None:
        """`memory_mib`: what the child of an episode may have."""
        self._players, self._memory_mib = players, memory_mib

    async def Play(  # noqa: N802  the contract's name
        self, request_iterator: _Requests, context: grpc.aio.ServicerContext[pb.FromPolicy, pb.FromWorld]
    ) -> AsyncIterator[pb.FromWorld]:
        """Plays one episode."""
        del context
        requests = aiter(request_iterator)
        name = "?"
        try:
            begin = (await anext(requests)).begin
            name = begin.environment or name
            async with self._players.episode(self._call(begin)) as episode:
                observation = await episode.reset()
                yield _observed(observation)
                while not observation.done and (reply := await _reply(requests, begin, episode)) is not None:
                    observation = await episode.step(reply)
                    yield _observed(observation)
        except EpisodeFailed as failure:
            log.warning("%s", failure)
            yield pb.FromWorld(
                failed=pb.Failed(reason=failure.reason, detail=str(failure), permanent=failure.permanent)
            )
        except StopAsyncIteration:
            log.info("a stream ended before it began")

    def _call(self, begin: pb.Begin) -> Call:
        """The call in the first message. Raises EpisodeFailed when it is none."""
        limits = begin.limits
        try:
            config, task = (_object(text) for text in (begin.config, begin.task))
        except ValueError as error:
            raise EpisodeFailed(
                begin.environment or "?", Reason.CONFIG, f"was not asked for properly: {error}"
            ) from error
        return Call(
            begin.environment, config, begin.seed, task, queue_s=limits.queue_s, step_timeout_s=limits.step_timeout_s,
            memory_mib=self._memory_mib, most_chars=limits.max_observation_chars,
        )  # fmt: skip


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text or "{}")
    if not isinstance(value, dict):
        raise ValueError(f"config and task are JSON objects, not {text[:40]}")  # noqa: TRY004  as JSON's own errors
    return value


async def _reply(requests: _Requests, begin: pb.Begin, episode: Episode) -> str | None:
    """The policy's next reply; None at the end of the stream. Raises EpisodeFailed when it does not come in time, or in turn."""
    episode.turn += 1
    try:
        async with asyncio.timeout(begin.limits.reply_timeout_s):
            message = await anext(requests, None)
    except TimeoutError:
        waited = f"waited {begin.limits.reply_timeout_s:g} s for a reply"
        raise EpisodeFailed(begin.environment, Reason.ERROR, waited) from None
    if message is None:
        return None
    if not message.HasField("reply") or message.reply.turn != episode.turn:
        raise EpisodeFailed(begin.environment, Reason.ERROR, f"was not given the reply of turn {episode.turn}")
    return message.reply.text


def _observed(observation: Observation) -> pb.FromWorld:
    messages = [pb.ChatMessage(role=message.role, content=message.content) for message in observation.messages]
    return pb.FromWorld(
        observed=pb.Observed(
            messages=messages, done=observation.done, reward=observation.reward, accuracy=observation.accuracy,
            detail=observation.detail,
        )
    )  # fmt: skip


def serving(service: EnvironmentService, host: str, port: int, token: str | None) -> AbstractAsyncContextManager[int]:
    """Serves on a port, which it yields; 0 takes a free one. Raises ConfigError when it cannot listen there."""
    add = partial(pb_grpc.add_EnvironmentServicer_to_server, service)
    purpose = "environments (MILLRACE_ENVIRONMENT_PORT)"
    return grpc_server.serving(
        add, host, port, token, purpose=purpose, request_bytes=MESSAGE_BYTES, grace_s=_STOP_GRACE_S
    )
