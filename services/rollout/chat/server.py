"""Server of chats over gRPC, for users: `proto/inference.proto`.

Generate ──► policies: which policy, loaded? ──► queue: a place ──► prompt ──► engine.chat ──► replies, stamped
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Any

import grpc
import grpc.aio

from services.common.config.inference import (
    GENERATE_LIMIT_S,
    MAX_TOKENS,
    PARAM_HEADER,
    PROMPT_LIMIT_BYTES,
    REASON_HEADER,
    RefusalReason,
)
from services.common.errors import MillraceError, PromptError
from services.common.pb import inference_pb2 as pb
from services.common.pb import inference_pb2_grpc as pb_grpc
from services.common.service import grpc_server
from services.common.service.logs import log_context
from services.common.streams.types import Message
from services.common.weights.snapshot import PolicyVersion
from services.rollout import metrics
from services.rollout.chat.policies import Policies
from services.rollout.chat.queue import ChatQueue
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import ChatPiece, ChatRefused, ChatSampling

log = logging.getLogger(__name__)

_STOP_GRACE_S = 2.0
"""Time for the last replies of chats that a drain has aborted."""

_STATUS = {
    RefusalReason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    RefusalReason.NOT_HERE: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.NOT_LOADED: grpc.StatusCode.UNAVAILABLE,
    RefusalReason.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalReason.ABORTED: grpc.StatusCode.ABORTED,
    RefusalReason.TOO_SLOW: grpc.StatusCode.DEADLINE_EXCEEDED,
    RefusalReason.TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalReason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
}


class InferenceService(pb_grpc.InferenceServicer):
    """The contract's one call."""

    def __init__(self, engine: Engine, policies: Policies, queue: ChatQueue) -> None:
        """Answers with the policy that `policies` has in `engine`, as many requests at once as `queue` has places."""
        self._engine, self._policies, self._queue = engine, policies, queue

    async def Generate(  # noqa: N802  the contract's name
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateReply]
    ) -> AsyncIterator[pb.GenerateReply]:
        """Streams one answer while it is sampled; a refusal ends the call with its status."""
        outcome = "left"
        try:
            with log_context(job_id=request.model):
                async with aclosing(self._replies(request)) as replies:
                    async for reply in replies:
                        if reply.HasField("finished"):
                            outcome = reply.finished.finish_reason
                        yield reply
        except ChatRefused as refusal:
            outcome = refusal.reason
            await _abort(context, refusal)
        except MillraceError:
            outcome = "failed"
            log.exception("a chat failed")
            await context.abort(grpc.StatusCode.INTERNAL, "the engine failed; the server's log has it")
        finally:
            metrics.CHAT_REQUESTS.labels(outcome=outcome).inc()

    async def _replies(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateReply, None]:
        loading = await self._policies.open(request.model)
        if loading is not None:
            yield pb.GenerateReply(loading=pb.Loading())
            await self._policies.loaded(request.model, loading)
        async with self._queue.place():
            try:
                async with asyncio.timeout(GENERATE_LIMIT_S), aclosing(self._answer(request)) as replies:
                    async for reply in replies:
                        yield reply
            except TimeoutError as error:
                raise ChatRefused(f"not done within {GENERATE_LIMIT_S:.0f} s", RefusalReason.TOO_SLOW) from error

    async def _answer(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateReply, None]:
        if await self._policies.open(request.model) is not None:  # changed while this waited for a place
            raise ChatRefused("training took this server in between: ask again", RefusalReason.NOT_HERE)
        epoch = self._policies.epoch
        prompt = await self._prompt(request)
        sampling = self._sampling(request, len(prompt))
        version = self._version(epoch)
        yield pb.GenerateReply(started=pb.Started(prompt_tokens=len(prompt), policy_version=version.n))
        self._version(epoch)  # no await from here to the queue: `clear` always finds the request
        started, first, last, tokens = time.monotonic(), None, None, 0
        async with aclosing(self._queue.through(self._engine.chat(prompt, sampling))) as pieces:
            async for piece in pieces:
                if first is None:
                    first = piece
                    metrics.CHAT_FIRST_TOKEN_SECONDS.observe(time.monotonic() - started)
                last = piece
                tokens += piece.tokens
                metrics.CHAT_TOKENS.inc(piece.tokens)
                delta = pb.Delta(text=piece.text, tokens=piece.tokens, policy_version=piece.policy_version)
                yield pb.GenerateReply(delta=delta)
        yield _finished(first, last, len(prompt), tokens)

    def _version(self, epoch: int) -> PolicyVersion:
        """The policy version, if the engine still has the same model."""
        version = self._engine.version
        if self._policies.epoch != epoch or version is None:
            raise ChatRefused("training took this server in between: ask again", RefusalReason.NOT_HERE)
        return version

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        param = _prompt_param(request)
        messages = [_message(message) for message in request.chat.messages]
        characters = sum(len(message.content) for message in messages) + len(request.text)
        if characters > self._engine.max_prompt_chars:
            reason = f"the prompt has {characters} characters, far more than the model's context holds"
            raise ChatRefused(reason, RefusalReason.TOO_LONG, param=param)
        try:
            return await self._engine.chat_prompt(messages if request.HasField("chat") else request.text)
        except PromptError as error:
            raise ChatRefused(str(error), RefusalReason.INVALID, param=param) from error

    def _sampling(self, request: pb.GenerateRequest, prompt_tokens: int) -> ChatSampling:
        room = self._engine.max_model_len - prompt_tokens
        max_tokens = request.max_tokens if request.HasField("max_tokens") else None
        if room < (max_tokens or 1):
            reason = f"this model's context is {self._engine.max_model_len} tokens; the prompt has {prompt_tokens}"
            reason += f" and max_tokens asks for {max_tokens}" if max_tokens else ""
            raise ChatRefused(reason, RefusalReason.TOO_LONG, param=_prompt_param(request))
        if max_tokens is not None and not 1 <= max_tokens <= MAX_TOKENS:
            raise ChatRefused(f"max_tokens must be 1 to {MAX_TOKENS}", RefusalReason.INVALID, param="max_tokens")
        if not 0 <= request.temperature <= 2:
            raise ChatRefused("temperature must be 0 to 2", RefusalReason.INVALID, param="temperature")
        if not 0 < request.top_p <= 1:
            raise ChatRefused("top_p must be above 0 and at most 1", RefusalReason.INVALID, param="top_p")
        if not all(request.stop):
            raise ChatRefused("stop must not be an empty string", RefusalReason.INVALID, param="stop")
        max_tokens = min(MAX_TOKENS, room) if max_tokens is None else max_tokens
        return ChatSampling(max_tokens, request.temperature, request.top_p, tuple(request.stop))


def serving(service: InferenceService, host: str, port: int, token: str | None) -> AbstractAsyncContextManager[int]:
    """Serves on a port, which it yields; 0 takes a free one. Raises ConfigError when it cannot listen there."""
    add = partial(pb_grpc.add_InferenceServicer_to_server, service)
    purpose = "inference (MILLRACE_INFERENCE_PORT)"
    return grpc_server.serving(
        add, host, port, token, purpose=purpose, request_bytes=PROMPT_LIMIT_BYTES, grace_s=_STOP_GRACE_S
    )


def _finished(first: ChatPiece | None, last: ChatPiece | None, prompt_tokens: int, tokens: int) -> pb.GenerateReply:
    if first is None or last is None or last.finish_reason is None:
        raise ChatRefused("the engine gave the request up", RefusalReason.ABORTED)
    finished = pb.Finished(
        finish_reason=last.finish_reason, prompt_tokens=prompt_tokens, completion_tokens=tokens,
        min_policy_version=first.policy_version, max_policy_version=last.policy_version,
    )  # fmt: skip
    return pb.GenerateReply(finished=finished)


def _prompt_param(request: pb.GenerateRequest) -> str:
    return "messages" if request.HasField("chat") else "prompt"


def _message(message: pb.ChatMessage) -> Message:
    match message.role:
        case "system" | "user" | "assistant" as role:
            return Message(role, message.content)
    reason = f"messages: role must be system, user or assistant, not {message.role!r}"
    raise ChatRefused(reason, RefusalReason.INVALID, param="messages")


async def _abort(context: grpc.aio.ServicerContext[Any, Any], refusal: ChatRefused) -> None:
    details = [(REASON_HEADER, str(refusal.reason))]
    details += [(PARAM_HEADER, refusal.param)] if refusal.param else []
    await context.abort(_STATUS[refusal.reason], str(refusal), trailing_metadata=tuple(details))
