"""The OpenAI-compatible paths over real HTTP and gRPC; only the policy is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
import redis.asyncio
import uvicorn
from fastapi import FastAPI
from openai.types.chat import ChatCompletionUserMessageParam

from services.common.config.inference import PARAM_HEADER, REASON_HEADER, RefusalReason
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.pb import inference_pb2 as pb
from services.common.pb import inference_pb2_grpc as pb_grpc
from services.common.service.heartbeat import WorkerKind, WorkerStatus, write_heartbeat
from services.common.spec.job import JobSpec

Script = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateReply]]
HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello"}]


class ScriptedServer(pb_grpc.InferenceServicer):
    """A rollout server whose answers a test writes."""

    def __init__(self) -> None:
        self.script: Script = answer
        self.asked: list[pb.GenerateRequest] = []
        self.cancelled = asyncio.Event()
        self.address = ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:  # noqa: N802
        self.asked.append(request)
        try:
            async for reply in self.script(request, context):
                yield reply
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def delta(text: str, version: int) -> pb.GenerateReply:
    return pb.GenerateReply(delta=pb.Delta(text=text, tokens=1, policy_version=version))


def started(version: int) -> pb.GenerateReply:
    return pb.GenerateReply(started=pb.Started(prompt_tokens=5, policy_version=version))


async def answer(_request: pb.GenerateRequest, _context: Any) -> AsyncIterator[pb.GenerateReply]:
    yield started(17)
    for number, piece in enumerate(["Hé", "llo", "!"]):
        yield delta(piece, 17 + number // 2)
    finished = pb.Finished(
        finish_reason="stop", prompt_tokens=5, completion_tokens=3, min_policy_version=17, max_policy_version=18
    )
    yield pb.GenerateReply(finished=finished)


async def load_and_answer(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
    yield pb.GenerateReply(loading=pb.Loading())
    await asyncio.sleep(0.2)
    async for reply in answer(request, context):
        yield reply


async def never_ends(_request: pb.GenerateRequest, _context: Any) -> AsyncIterator[pb.GenerateReply]:
    yield started(17)
    yield delta("…", 17)
    await asyncio.sleep(60)


def refusing(code: grpc.StatusCode, reason: RefusalReason, *, param: str = "", after: int = 0) -> Script:
    async def refuse(_request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
        if after:
            yield started(17)
            yield delta("half an ans", 17)
        metadata = [(REASON_HEADER, str(reason)), *([(PARAM_HEADER, param)] if param else [])]
        await context.abort(code, "said by the server", trailing_metadata=tuple(metadata))
        yield started(0)

    return refuse


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with serving() as made:
        yield made


class serving:  # noqa: N801  used as a context manager
    def __init__(self) -> None:
        self._server = grpc.aio.server()

    async def __aenter__(self) -> ScriptedServer:
        made = ScriptedServer()
        pb_grpc.add_InferenceServicer_to_server(made, self._server)  # type: ignore[no-untyped-call]
        made.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return made

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)


@pytest.fixture
async def job(store: JobStore, document: dict[str, Any]) -> JobRecord:
    record = await store.create(JobSpec.model_validate(document))
    await store.transition(record.id, JobState.RUNNING, allowed=[JobState.QUEUED], policy_version=17)
    return await store.get(record.id)


Announce = Callable[..., Awaitable[None]]


@pytest.fixture
def announce(redis: redis.asyncio.Redis, server: ScriptedServer) -> Announce:
    async def write(name: str = "rollout-0", state: str = "sampling", **values: Any) -> None:
        told: dict[str, Any] = {"policy_version": 17, "inference_address": server.address} | values
        await write_heartbeat(redis, WorkerStatus(name, WorkerKind.ROLLOUT, state, **told))

    return write


@pytest.fixture
async def attached(job: JobRecord, announce: Announce) -> None:
    await announce(job_id=job.id)


@pytest.fixture
async def ask(app: FastAPI, token: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The openai client on a real socket: in-process transports hand a stream over in one piece."""
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none", lifespan="off"))
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=token, max_retries=0, timeout=30
    ) as client:
        yield client
    running.should_exit = True
    await task


@pytest.mark.usefixtures("attached")
async def test_an_answer_carries_its_policy_versions(
    ask: openai.AsyncOpenAI, server: ScriptedServer, job: JobRecord
) -> None:
    raw = await ask.chat.completions.with_raw_response.create(
        model=job.id,
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_completion_tokens=9, temperature=0.5, top_p=0.9, stop="END", user="somebody", presence_penalty=0,
    )  # fmt: skip
    completion = raw.parse()
    assert completion.choices[0].message.content == "Héllo!"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.model_extra == {"policy_version": {"min": 17, "max": 18}}
    assert completion.system_fingerprint == f"{job.id}@18"
    assert raw.headers["x-millrace-policy-version"] == "17-18"
    assert completion.usage is not None
    assert completion.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8,
    }  # fmt: skip
    (request,) = server.asked
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]
    assert (request.model, request.max_tokens, request.temperature, request.top_p) == (job.id, 9, 0.5, 0.9)
    assert list(request.stop) == ["END"]


@pytest.mark.usefixtures("attached")
async def test_a_stream_arrives_piece_by_piece(ask: openai.AsyncOpenAI, job: JobRecord) -> None:
    stream = await ask.chat.completions.create(
        model=job.id, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    assert stream.response.headers["x-millrace-policy-version"] == "17"
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["Hé", "llo", "!", None]
    assert [chunk.system_fingerprint for chunk in chunks[:3]] == [f"{job.id}@{n}" for n in (17, 17, 18)]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.usefixtures("attached")
async def test_a_text_is_continued_without_the_chat_template(
    ask: openai.AsyncOpenAI, server: ScriptedServer, job: JobRecord
) -> None:
    whole = await ask.completions.create(model=job.id, prompt=["2 + 3 ="], max_tokens=4)
    assert (whole.choices[0].text, whole.object) == ("Héllo!", "text_completion")
    stream = await ask.completions.create(model=job.id, prompt="2 + 3 =", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Héllo!"
    assert [request.text for request in server.asked] == ["2 + 3 =", "2 + 3 ="]
    assert not server.asked[1].HasField("max_tokens")


async def test_an_ended_job_is_asked_of_a_server_that_training_does_not_have(
    ask: openai.AsyncOpenAI, server: ScriptedServer, store: JobStore, job: JobRecord, announce: Announce
) -> None:
    server.script = load_and_answer
    await store.transition(job.id, JobState.SUCCEEDED, allowed=[JobState.RUNNING], export="/anywhere/hf")
    await announce("rollout-0", job_id="other-00000000")
    with pytest.raises(openai.InternalServerError) as nobody:
        await ask.chat.completions.create(model=job.id, messages=HELLO)
    assert (nobody.value.status_code, nobody.value.code) == (503, "model_not_ready")
    assert "no rollout server is free" in nobody.value.message
    assert int(nobody.value.response.headers["retry-after"]) > 0
    assert server.asked == []
    await announce("rollout-1", state="idle", job_id=None, policy_version=None)
    completion = await ask.chat.completions.create(model=job.id, messages=HELLO)
    assert completion.choices[0].message.content == "Héllo!"
    stream = await ask.chat.completions.create(model=job.id, messages=HELLO, stream=True)
    assert "x-millrace-policy-version" not in stream.response.headers
    assert len([chunk async for chunk in stream]) == 4


async def test_a_server_that_cannot_answer_is_passed_over(
    ask: openai.AsyncOpenAI, server: ScriptedServer, job: JobRecord, announce: Announce
) -> None:
    server.script = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, RefusalReason.BUSY)
    await announce("rollout-0", job_id=job.id, detail={"chats_in_flight": 0})
    async with serving() as other:
        await announce("rollout-1", job_id=job.id, inference_address=other.address, detail={"chats_in_flight": 2})
        completion = await ask.chat.completions.create(model=job.id, messages=HELLO)
    assert completion.choices[0].message.content == "Héllo!"
    assert len(server.asked) == len(other.asked) == 1, "the least busy first"


@pytest.mark.usefixtures("attached")
@pytest.mark.parametrize(
    ("status", "reason", "param", "expected"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, RefusalReason.BUSY, "", (429, "rate_limit_exceeded", None)),
        (
            grpc.StatusCode.INVALID_ARGUMENT, RefusalReason.TOO_LONG, "messages", (400, "context_length_exceeded", "messages"),
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, RefusalReason.INVALID, "stop", (400, "invalid_value", "stop")),
        (grpc.StatusCode.NOT_FOUND, RefusalReason.NOT_FOUND, "", (404, "model_not_found", "model")),
        (grpc.StatusCode.UNAVAILABLE, RefusalReason.NOT_LOADED, "", (503, "model_not_ready", None)),
        (grpc.StatusCode.ABORTED, RefusalReason.ABORTED, "", (503, "aborted", None)),
        (grpc.StatusCode.DEADLINE_EXCEEDED, RefusalReason.TOO_SLOW, "", (504, "timeout", None)),
    ],
)  # fmt: skip
async def test_what_a_server_refuses_is_told_in_the_clients_words(
    ask: openai.AsyncOpenAI, server: ScriptedServer, job: JobRecord, status: grpc.StatusCode, reason: RefusalReason, param: str,
    expected: tuple[int, str, str | None],
) -> None:  # fmt: skip
    server.script = refusing(status, reason, param=param)
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as refused:
            await ask.chat.completions.create(model=job.id, messages=HELLO, stream=stream)
        assert (refused.value.status_code, refused.value.code, refused.value.param) == expected
        assert "said by the server" in refused.value.message
        assert ("retry-after" in refused.value.response.headers) == (expected[0] in {429, 503})


@pytest.mark.usefixtures("attached")
@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, 500, "MILLRACE_INTERNAL_TOKEN"),
        (grpc.StatusCode.UNAVAILABLE, 503, "rollout-0 does not answer"),
        (grpc.StatusCode.INTERNAL, 500, "its log has it"),
    ],
)
async def test_a_server_that_fails_is_told_without_its_words(
    ask: openai.AsyncOpenAI, server: ScriptedServer, job: JobRecord, code: grpc.StatusCode, status: int, words: str
) -> None:
    async def fail(_request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
        await context.abort(code, "inner words")
        yield started(0)

    server.script = fail
    with pytest.raises(openai.InternalServerError, match=words) as failed:
        await ask.chat.completions.create(model=job.id, messages=HELLO)
    assert failed.value.status_code == status
    assert "inner words" not in failed.value.message


@pytest.mark.usefixtures("attached")
async def test_a_stream_that_breaks_off_ends_with_the_error(
    ask: openai.AsyncOpenAI, server: ScriptedServer, job: JobRecord
) -> None:
    server.script = refusing(grpc.StatusCode.ABORTED, RefusalReason.ABORTED, after=1)
    stream = await ask.chat.completions.create(model=job.id, messages=HELLO, stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].delta.content == "half an ans"
    with pytest.raises(openai.APIError) as broken:
        await anext(chunks)
    assert broken.value.code == "aborted"


@pytest.mark.usefixtures("attached")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_ends_the_call(
    ask: openai.AsyncOpenAI, server: ScriptedServer, job: JobRecord, stream: bool
) -> None:
    server.script = never_ends
    if stream:
        opened = await ask.chat.completions.create(model=job.id, messages=HELLO, stream=True)
        await anext(aiter(opened))
        await opened.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            await ask.with_options(timeout=0.5).chat.completions.create(model=job.id, messages=HELLO)
    async with asyncio.timeout(5):
        await server.cancelled.wait()


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "model"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_value", "messages[0].content"),
        ({"messages": HELLO, "temperature": 9}, "invalid_value", "temperature"),
        ({"messages": HELLO, "max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"messages": HELLO, "stop": ""}, "invalid_value", "stop"),
        ({"messages": HELLO, "n": 2}, "unsupported_parameter", "n"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"messages": HELLO, "logprobs": True}, "unsupported_parameter", "logprobs"),
        ({"messages": HELLO, "temprature": 1}, "unknown_parameter", "temprature"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_value", "messages[0].content"),
    ],
)
async def test_a_wrong_parameter_is_named(
    client: httpx.AsyncClient, job: JobRecord, body: dict[str, Any], code: str, param: str
) -> None:
    sent = json.dumps(body if param == "model" else {"model": job.id, **body})
    refused = await client.post("/v1/chat/completions", content=sent, headers={"Content-Type": "application/json"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, code)
    assert error["param"].startswith(param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.usefixtures("attached")
async def test_every_layers_refusal_has_the_clients_form(
    client: httpx.AsyncClient, stranger: httpx.AsyncClient, job: JobRecord
) -> None:
    path = "/v1/chat/completions"
    refusals = [
        await stranger.post(path, json={"model": job.id, "messages": HELLO}),
        await client.post(path, content=b"{not json", headers={"Content-Type": "application/json"}),
        await client.post(path, content=b"x" * (2 << 20)),
        await client.get(path),
        await client.get("/v1/embeddings"),
        await client.post(path, json={"model": "nobody", "messages": HELLO}),
        await client.get("/v1/models/nobody"),
    ]
    assert [refused.status_code for refused in refusals] == [401, 400, 413, 405, 404, 404, 404]
    for refused in refusals:
        error = refused.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert int(refused.headers["content-length"]) == len(refused.content)


async def test_only_jobs_with_a_policy_are_listed(
    client: httpx.AsyncClient, store: JobStore, job: JobRecord, document: dict[str, Any]
) -> None:
    spec = JobSpec.model_validate(document)
    queued, exported, bare = [await store.create(spec) for _ in range(3)]
    await store.transition(exported.id, JobState.SUCCEEDED, allowed=[JobState.QUEUED], export="/a/hf", policy_version=9)
    await store.transition(bare.id, JobState.FAILED, allowed=[JobState.QUEUED])
    listed = (await client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["state"], model["policy_version"]) for model in listed] == [
        (exported.id, "succeeded", 9),
        (job.id, "running", 17),
    ]
    waiting = await client.post("/v1/chat/completions", json={"model": queued.id, "messages": HELLO})
    assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "model_not_ready")
    gone = await client.post("/v1/chat/completions", json={"model": bare.id, "messages": HELLO})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
