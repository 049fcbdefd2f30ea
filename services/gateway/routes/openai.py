"""OpenAI-compatible API of the policies: chat completions, completions, models.

request ─► schemas (400) ─► InferenceClient picks a server (404, 429, 503) ─► replies ─► one JSON answer, or server-sent chunks
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import JSONResponse

from services.common.jobs.record import JobRow
from services.common.pb import inference_pb2 as pb
from services.common.service.lifecycle import unless
from services.gateway.dependencies import BEARER, ContextDep
from services.gateway.openai.client import CALL_LIMIT_S, Replies
from services.gateway.openai.errors import OpenAIError, openai_documented
from services.gateway.openai.schemas import (
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    Model,
    ModelList,
    PolicyVersions,
    Reply,
    TextChoice,
    TextCompletion,
    Usage,
)
from services.gateway.schemas import EXAMPLE_JOB_ID, OpenObject

router = APIRouter(prefix="/v1", tags=["openai"], dependencies=[BEARER])

LIMITS_S = {"/v1/chat/completions": CALL_LIMIT_S + 30.0, "/v1/completions": CALL_LIMIT_S + 30.0}
"""Longer than for other requests: the server may have to load a checkpoint first."""
VERSION_HEADER = "X-Millrace-Policy-Version"
CLIENT_CLOSED = 499
"""Status for the log and the metrics: the client has disconnected."""

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, chunks as server-sent events, the last of them `data: [DONE]`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "headers": {
            VERSION_HEADER: {
                "description": "The policy version that sampled it (streamed: the one that begins), or `17-18`.",
                "schema": {"type": "string"},
            }
        },
    },
    **openai_documented(400, 404, 408, 413, 429, 500, 504),
}


@dataclass(slots=True)
class _Answer:
    """One answer under construction."""

    model: str
    chat: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"

    def whole(self, text: str, end: pb.Finished) -> ChatCompletion | TextCompletion:
        """The complete answer."""
        versions = PolicyVersions(min=end.min_policy_version, max=end.max_policy_version)
        common: dict[str, Any] = {
            "id": self.id, "created": self.created, "model": self.model, "policy_version": versions, "usage": usage(end),
            "system_fingerprint": self.fingerprint(end.max_policy_version),
        }  # fmt: skip
        if self.chat:
            choice = ChatChoice(message=Reply(content=text), finish_reason=end.finish_reason)
            return ChatCompletion(choices=[choice], **common)
        return TextCompletion(choices=[TextChoice(text=text, finish_reason=end.finish_reason)], **common)

    def chunk(
        self, text: str | None, version: int, *, finish_reason: str | None = None, more: OpenObject | None = None
    ) -> ServerSentEvent:
        """A piece of the answer; `text` is None in a chunk without content."""
        if self.chat:
            piece: dict[str, Any] = {"delta": {} if text is None else {"role": "assistant", "content": text}}
        else:
            piece = {"text": text or ""}
        return self.event([{"index": 0, **piece, "logprobs": None, "finish_reason": finish_reason}], version, more)

    def event(self, choices: list[dict[str, Any]], version: int, more: OpenObject | None = None) -> ServerSentEvent:
        """A chunk of any kind."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        common = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        body = {**common, "system_fingerprint": self.fingerprint(version), "choices": choices, **(more or {})}
        return ServerSentEvent(data=json.dumps(body, ensure_ascii=False))

    def fingerprint(self, version: int) -> str:
        """The job and the policy version that sampled it."""
        return f"{self.model}@{version}"


@router.post(
    "/chat/completions",
    operation_id="create_chat_completion",
    summary="Chat with a job's policy",
    response_model=ChatCompletion,
    responses=_RESPONSES,
)
async def chat_completions(context: ContextDep, http: Request, body: ChatRequest) -> Response:
    """Answers with the newest policy of a running job, or with an ended job's exported checkpoint while a rollout server is free."""
    request = _request(body)
    roles = {"developer": "system"}
    for message in body.messages:
        request.chat.messages.add(role=roles.get(message.role, message.role), content=message.text)
    return await _respond(http, _Answer(body.model, chat=True), context.inference.generate(request), body)


@router.post(
    "/completions",
    operation_id="create_completion",
    summary="Let a job's policy continue a text",
    response_model=TextCompletion,
    responses=_RESPONSES,
)
async def completions(context: ContextDep, http: Request, body: CompletionRequest) -> Response:
    """Continues the prompt as it stands, without the chat template."""
    request = _request(body)
    request.text = body.text
    return await _respond(http, _Answer(body.model, chat=False), context.inference.generate(request), body)


@router.get("/models", operation_id="list_models", summary="Policies to talk to", responses=openai_documented())
async def list_models(context: ContextDep) -> ModelList:
    """Running jobs, and ended jobs that left an exported checkpoint."""
    return ModelList(data=[_model(record) for record in await context.inference.models()])


@router.get(
    "/models/{model}", operation_id="get_model", summary="One policy to talk to", responses=openai_documented(404)
)
async def get_model(
    context: ContextDep, model: Annotated[str, Path(description="The job's id.", examples=[EXAMPLE_JOB_ID])]
) -> Model:
    """One of the list."""
    return _model(await context.inference.model(model))


def usage(end: pb.Finished) -> Usage:
    """Token counts of an answer."""
    return Usage(
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
        total_tokens=end.prompt_tokens + end.completion_tokens,
    )


def _request(body: ChatRequest | CompletionRequest) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=body.model,
        max_tokens=body.limit,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=body.stops,
    )


async def _respond(http: Request, answer: _Answer, replies: Replies, body: ChatRequest | CompletionRequest) -> Response:
    if not body.stream:
        return await unless(_disconnected(http), _whole(answer, replies), "chat") or Response(status_code=CLIENT_CLOSED)
    first = await unless(_disconnected(http), anext(replies), "first token")
    if first is None:
        return Response(status_code=CLIENT_CLOSED)
    started = {VERSION_HEADER: str(first.started.policy_version)} if first.HasField("started") else {}
    events = _chunks(answer, replies, with_usage=body.wants_usage)
    return EventSourceResponse(events, headers=started, ping=15, send_timeout=30)


async def _whole(answer: _Answer, replies: Replies) -> Response:
    text = ""
    async with aclosing(replies):
        async for reply in replies:
            text += reply.delta.text
            if reply.HasField("finished"):
                low, high = reply.finished.min_policy_version, reply.finished.max_policy_version
                headers = {VERSION_HEADER: str(high) if low == high else f"{low}-{high}"}
                return JSONResponse(answer.whole(text, reply.finished).model_dump(), headers=headers)
    raise OpenAIError(500, "the rollout server ended without an answer", "internal")


async def _chunks(answer: _Answer, replies: Replies, *, with_usage: bool) -> AsyncIterator[ServerSentEvent]:
    """The answer as it is sampled, then `[DONE]`; an error in the middle is the last event."""
    nothing: OpenObject = {"usage": None} if with_usage else {}
    try:
        async with aclosing(replies):
            async for reply in replies:
                if reply.delta.text:
                    yield answer.chunk(reply.delta.text, reply.delta.policy_version, more=nothing)
                if reply.HasField("finished"):
                    for event in _ending(answer, reply.finished, with_usage=with_usage):
                        yield event
    except OpenAIError as error:
        yield ServerSentEvent(data=json.dumps(error.body))
        return
    yield ServerSentEvent(data="[DONE]")


def _ending(answer: _Answer, end: pb.Finished, *, with_usage: bool) -> list[ServerSentEvent]:
    """The last events: the finish reason and the span of versions, then token counts where requested."""
    versions = {"min": end.min_policy_version, "max": end.max_policy_version}
    nothing: OpenObject = {"usage": None} if with_usage else {}
    last = end.max_policy_version
    events = [answer.chunk(None, last, finish_reason=end.finish_reason, more={"policy_version": versions, **nothing})]
    if with_usage:
        events.append(answer.event([], last, {"usage": usage(end).model_dump(), "policy_version": versions}))
    return events


def _model(record: JobRow) -> Model:
    return Model(id=record.id, created=int(record.created_at), state=record.state, policy_version=record.policy_version)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
