"""Chats on real vLLM over real gRPC. The weights say with every token which version they are."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from redis.asyncio import Redis
from safetensors.torch import save_file

from services.common.checkpoints.manifest import WrittenFile, digest_of_file
from services.common.config.inference import PARAM_HEADER, REASON_HEADER, RefusalReason
from services.common.config.settings import Platform, Settings
from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.pb import inference_pb2 as pb
from services.common.pb import inference_pb2_grpc as pb_grpc
from services.common.redis.connection import connect
from services.common.spec.job import JobSpec
from services.common.weights.channel import token_metadata
from services.learner.storage.checkpoints import CheckpointStore
from services.rollout import metrics
from services.rollout.chat.exports import ExportLoader
from services.rollout.chat.policies import Policies
from services.rollout.chat.queue import ChatQueue
from services.rollout.chat.server import InferenceService, serving
from services.rollout.engine.engine import Engine
from services.rollout.sampling.sampler import Sampler
from tests.integration.rollout.conftest import StageWeights, Tensors, that_say
from tests.integration.rollout.engine.test_engine import FIRST, a_task, check_stamps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.parametrize("redis_url", ["embedded"], indirect=True),
]

JOB = "job-1"
TOKEN = "the-internal-token-of-these-tests"  # noqa: S105
PLACES = 2


class World:
    """One rollout server's engine and its inference server, without the loops of training."""

    def __init__(self, engine: Engine, redis: Redis, settings: Settings) -> None:
        self.engine, self.store = engine, (store := JobStore(redis))
        self.queue = ChatQueue(PLACES, queue_s=0.5)
        self.policies = Policies(engine, self.queue, store, ExportLoader(engine, settings, redis, "chat-test").load)
        self.n = -1
        self.address = ""

    async def publish(self, stage_weights: StageWeights, weights: Tensors) -> int:
        self.n += 1
        await self.engine.activate(stage_weights(1, self.n, that_say(FIRST + self.n, weights)))
        return self.n

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[pb_grpc.InferenceStub]:
        async with grpc.aio.insecure_channel(self.address) as channel:
            yield pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

    async def ask(self, **values: Any) -> list[pb.GenerateReply]:
        async with self.stub() as stub:
            return [reply async for reply in stub.Generate(request(**values), metadata=token_metadata(TOKEN))]

    async def refused(self, **values: Any) -> tuple[grpc.StatusCode, str, str | None, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.ask(**values)
        told = {str(key): str(value) for key, value in caught.value.trailing_metadata() or ()}
        return caught.value.code(), told[REASON_HEADER], told.get(PARAM_HEADER), caught.value.details() or ""


def request(model: str = JOB, content: str = "2 + 3 =", **values: Any) -> pb.GenerateRequest:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=content)])
    told: dict[str, Any] = {"model": model, "chat": chat, "temperature": 1.0, "top_p": 1.0}
    return pb.GenerateRequest(**(told | values))


def said(version: int) -> str:
    return chr(32 + FIRST + version - 5)


def text(replies: list[pb.GenerateReply]) -> str:
    return "".join(reply.delta.text for reply in replies)


async def eventually(reached: Callable[[], bool], what: str) -> None:
    for _ in range(200):
        if reached():
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"not within 10 s: {what}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    model_dir: Path, spec: JobSpec, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    redis = connect(redis_url)
    engine = Engine(Platform.CPU)
    await engine.start(model_dir, spec)
    made = World(engine, redis, Settings(home=tmp_path_factory.mktemp("home"), model_roots=[model_dir.parent]))
    await made.policies.claim(JOB)
    async with serving(InferenceService(engine, made.policies, made.queue), "127.0.0.1", 0, TOKEN) as port:
        made.address = f"127.0.0.1:{port}"
        yield made
    await engine.aclose()
    await redis.aclose()


async def test_nothing_is_said_before_there_is_a_version(world: World) -> None:
    code, reason, _, _ = await world.refused()
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, RefusalReason.NOT_HERE)


async def test_every_piece_carries_its_version_however_slow_the_reader_is(
    world: World, weights: Tensors, stage_weights: StageWeights
) -> None:
    first = await world.publish(stage_weights, weights)
    replies: list[pb.GenerateReply] = []

    async def read_slowly() -> None:
        async with world.stub() as stub:
            async for reply in stub.Generate(request(max_tokens=200), metadata=token_metadata(TOKEN)):
                replies.append(reply)
                await asyncio.sleep(0.02 if reply.HasField("delta") else 0)

    reading = asyncio.create_task(read_slowly())
    for _ in range(3):
        await asyncio.sleep(0.15)
        await world.publish(stage_weights, weights)
    await reading
    assert replies[0].started.policy_version == first
    for reply in replies:
        assert set(reply.delta.text) <= {said(reply.delta.policy_version)}
    end = replies[-1].finished
    assert len(text(replies)) == end.completion_tokens == 200
    assert end.finish_reason == "length"
    assert end.prompt_tokens == replies[0].started.prompt_tokens == 9
    assert end.min_policy_version == first < end.max_policy_version <= world.n
    assert len({reply.delta.policy_version for reply in replies if reply.delta.text}) > 1


async def test_an_answer_ends_before_its_stop_string(
    world: World, weights: Tensors, stage_weights: StageWeights
) -> None:
    n = await world.publish(stage_weights, weights)
    replies = await world.ask(max_tokens=50, stop=[said(n) * 3])
    assert (text(replies), replies[-1].finished.finish_reason) == ("", "stop")
    assert replies[-1].finished.completion_tokens == 3
    replies = await world.ask(max_tokens=4, stop=["?"])
    assert (text(replies), replies[-1].finished.finish_reason) == (said(n) * 4, "length")


async def test_a_raw_text_is_continued_without_the_template(world: World) -> None:
    (started, *_) = await world.ask(text="12345", max_tokens=2)
    assert started.started.prompt_tokens == 5
    (templated, *_) = await world.ask(content="12345", max_tokens=2)
    assert templated.started.prompt_tokens == 7


async def test_without_max_tokens_an_answer_fills_the_context(world: World) -> None:
    replies = await world.ask(text="12345")
    assert replies[-1].finished.completion_tokens == world.engine.max_model_len - 5


@pytest.mark.parametrize(
    ("values", "reason", "param", "message"),
    [
        ({"content": "1" * 300, "max_tokens": 4}, RefusalReason.TOO_LONG, "messages", "context is 256 tokens; the prompt has 302"),
        ({"text": "1" * 250, "max_tokens": 10}, RefusalReason.TOO_LONG, "prompt", "max_tokens asks for 10"),
        ({"text": "1" * 100_000}, RefusalReason.TOO_LONG, "prompt", "100000 characters"),
        ({"max_tokens": 0}, RefusalReason.INVALID, "max_tokens", "must be 1 to"),
        ({"temperature": float("nan")}, RefusalReason.INVALID, "temperature", "must be 0 to 2"),
        ({"top_p": 0.0}, RefusalReason.INVALID, "top_p", "must be above 0"),
        ({"stop": [""]}, RefusalReason.INVALID, "stop", "empty"),
        ({"text": ""}, RefusalReason.INVALID, "prompt", "has no tokens"),
        (
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="system", content="be brief")])},
            RefusalReason.INVALID, "messages", "no system messages",
        ),
        (
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="tool", content="x")])}, RefusalReason.INVALID, "messages", "role must be",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_sampled_is_refused_by_name(
    world: World, values: dict[str, Any], reason: RefusalReason, param: str, message: str
) -> None:
    if "text" in values:
        values = {"chat": None} | values
    code, told, blamed, details = await world.refused(**values)
    assert (code, told, blamed) == (grpc.StatusCode.INVALID_ARGUMENT, reason, param)
    assert message in details
    assert world.engine.chats == 0


async def test_the_queue_bounds_what_is_sampled_and_says_so(
    world: World, weights: Tensors, stage_weights: StageWeights
) -> None:
    await world.publish(stage_weights, weights)
    assert world.engine._llm.vllm_config.scheduler_config.policy == "priority"
    async with world.stub() as stub:
        calls = [aiter(stub.Generate(request(max_tokens=240), metadata=token_metadata(TOKEN))) for _ in range(PLACES)]
        for call in calls:
            assert (await anext(call)).HasField("started")
        await world.engine._llm.pause_generation(mode="keep", clear_cache=False)
        code, reason, _, _ = await world.refused()
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, RefusalReason.BUSY)
        await world.engine._llm.resume_generation()
        for call in calls:
            assert [reply async for reply in call][-1].finished.completion_tokens == 240
    assert text(await world.ask(max_tokens=1))


async def test_training_and_chats_are_counted_apart_and_sampled_together(
    world: World, weights: Tensors, stage_weights: StageWeights
) -> None:
    await world.publish(stage_weights, weights)
    trained, chatted = counted(metrics.TOKENS), counted(metrics.CHAT_TOKENS)
    sampler = Sampler(world.engine, "r0")
    groups = [asyncio.create_task(sampler.sample(a_task(group_id=i, max_tokens=200))) for i in range(8)]
    asking = asyncio.create_task(world.ask(max_tokens=50))
    await eventually(lambda: world.engine.chats == 1, "it is sampled")
    n = await world.publish(stage_weights, weights)
    replies = await asking
    for group in await asyncio.gather(*groups):
        assert group.failure is None
        assert group.max_policy_version == n
    assert replies[-1].finished.completion_tokens == 50
    assert counted(metrics.TOKENS) - trained == 8 * 4 * 200
    assert counted(metrics.CHAT_TOKENS) - chatted == 50
    assert world.engine.requests == world.engine.chats == 0


def counted(counter: Any) -> float:
    return float(counter._value.get())


async def test_a_client_that_goes_frees_its_place_at_once(world: World) -> None:
    async with world.stub() as stub:
        call = stub.Generate(request(max_tokens=240), metadata=token_metadata(TOKEN))
        await call.read()
        await eventually(lambda: world.engine.chats == 1, "it is sampled")
        call.cancel()
        await eventually(lambda: world.engine.chats == 0, "it is aborted")
    assert world.queue.chats == 0


async def test_without_the_token_every_call_is_refused(world: World) -> None:
    for metadata in ((), token_metadata("wrong")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with world.stub() as stub:
                [reply async for reply in stub.Generate(request(), metadata=metadata)]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_job_that_is_let_go_ends_its_chats_and_only_them(
    world: World, weights: Tensors, stage_weights: StageWeights
) -> None:
    await world.publish(stage_weights, weights)
    asking = asyncio.create_task(world.refused(max_tokens=240))
    await eventually(lambda: world.engine.chats == 1, "it is sampled")
    group = asyncio.create_task(Sampler(world.engine, "r0").sample(a_task(max_tokens=100)))
    await world.policies.clear("the job left")
    code, reason, _, details = await asking
    assert (code, reason, details) == (grpc.StatusCode.ABORTED, RefusalReason.ABORTED, "the job left")
    assert (await world.refused())[1] == RefusalReason.NOT_HERE
    check_stamps(await group)
    world.policies.release()


async def export(
    world: World, root: Path, model_dir: Path, spec: JobSpec, weights: Tensors, step: int
) -> tuple[str, Path]:
    """An ended job whose newest checkpoint, written as the learner writes it, says its step with every token."""
    record = await world.store.create(spec)
    store = CheckpointStore(root / record.id, keep=1)
    draft = store.begin(step) / "hf"
    shutil.copytree(model_dir, draft)
    tensors = that_say(FIRST + step, weights)
    del tensors["lm_head.weight"]  # tied: exports leave it out
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    files = [file for file in draft.iterdir() if file.is_file()]
    written = [WrittenFile(f"hf/{file.name}", file.stat().st_size, digest_of_file(file)) for file in files]
    path = store.commit(step, {"lineage": 1}, written) / "hf"
    await world.store.transition(record.id, JobState.SUCCEEDED, allowed=[JobState.QUEUED], export=str(path))
    return record.id, path


async def test_an_ended_jobs_export_is_loaded_once_and_training_takes_the_engine_back(
    world: World, tmp_path: Path, model_dir: Path, spec: JobSpec, weights: Tensors
) -> None:
    job_id, _ = await export(world, tmp_path, model_dir, spec, weights, step=30)
    engine_processes = [process.pid for process in world.engine.processes]
    for replies in await asyncio.gather(*(world.ask(model=job_id, max_tokens=8) for _ in range(2))):
        assert replies[0].HasField("loading")
        assert replies[-1].finished.max_policy_version == 30
        assert text(replies) == said(30) * 8
    assert (world.policies.hosted, world.policies.hosting) == (job_id, "serving")
    again = await world.ask(model=job_id, max_tokens=1)
    assert again[0].HasField("started"), "it was loaded before"
    assert [process.pid for process in world.engine.processes] == engine_processes, "the job's engine took it in place"

    asking = asyncio.create_task(world.refused(model=job_id, max_tokens=240))
    await eventually(lambda: world.engine.chats == 1, "it is sampled")
    await world.policies.claim(JOB)
    assert (world.engine.chats, world.engine.version) == (0, None)
    assert (await asking)[1] == RefusalReason.ABORTED
    assert (await world.refused(model=job_id))[1] == RefusalReason.NOT_HERE
    world.policies.release()


async def test_without_the_jobs_own_model_the_export_starts_an_engine(
    world: World, tmp_path: Path, model_dir: Path, spec: JobSpec, weights: Tensors
) -> None:
    elsewhere = spec.model_copy(update={"model": spec.model.model_copy(update={"path": "moved-away"})})
    job_id, path = await export(world, tmp_path, model_dir, elsewhere, weights, step=35)
    engine_processes = [process.pid for process in world.engine.processes]
    replies = await world.ask(model=job_id, max_tokens=8)
    assert text(replies) == said(35) * 8
    assert replies[-1].finished.max_policy_version == 35
    assert [process.pid for process in world.engine.processes] != engine_processes
    assert path.is_dir()


async def test_a_damaged_export_is_never_sampled(
    world: World, tmp_path: Path, model_dir: Path, spec: JobSpec, weights: Tensors
) -> None:
    job_id, path = await export(world, tmp_path, model_dir, spec, weights, step=40)
    file = path / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-9] ^= 1
    file.write_bytes(damaged)
    code, reason, _, details = await world.refused(model=job_id)
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, RefusalReason.NOT_LOADED)
    assert "model.safetensors: its checksum differs" in details
    file.unlink()
    assert "cannot be read" in (await world.refused(model=job_id))[3]
    queued = await world.store.create(spec)
    assert (await world.refused(model=queued.id))[1] == RefusalReason.NOT_FOUND
