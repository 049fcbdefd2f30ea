"""A group of sixteen responses of 32,768 tokens goes its whole way: rollouts, verdicts, scored, buffer, journal, and back, unchanged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from services.common.jobs.fates import Fate
from services.common.jobs.record import ActiveJob
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.connection import connect
from services.common.redis.keys import Stage
from services.common.service.lifecycle import Drain
from services.common.spec.job import JobSpec
from services.common.streams import codec, dead_letters
from services.common.streams.consumer import Consumer, Entry
from services.common.streams.limits import MIN_ENTRY_BYTES, entry_limit
from services.common.streams.stream import add, depths
from services.common.streams.types import (
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    Task,
    VersionSpan,
)
from services.learner.groups.batch import Batch
from services.learner.groups.buffer import GroupBuffer, Judged
from services.learner.groups.ledger import Ledger
from services.learner.groups.validate import Limits
from services.learner.loops.collect import decode_entry
from services.learner.storage.journal import BatchRecord, Journal
from services.reward.pool.pool import Pool
from services.reward.service import RewardService

pytestmark = pytest.mark.asyncio(loop_scope="module")

JOB = "large"
GROUP_SIZE, TOKENS, VOCABULARY = 16, 32_768, 49_152
SPEC = JobSpec.model_validate(
    {
        "model": {"path": "tiny"},
        "data": {"train": {"source": "reasoning_gym:chain_sum"}},
        "rollout": {"group_size": GROUP_SIZE, "rollout_max_tokens": TOKENS},
        "algorithm": {"filter_groups_train_batch_size": 1},
    }
)
LIMIT = entry_limit(SPEC.rollout, SPEC.eval)


@pytest_asyncio.fixture(loop_scope="module")
async def clients(redis_url: str) -> AsyncIterator[tuple[Redis, Redis]]:
    redis, blocking = connect(redis_url), connect(redis_url, block_s=2.0)
    await redis.flushall()
    yield redis, blocking
    await redis.aclose()
    await blocking.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def judging(clients: tuple[Redis, Redis]) -> AsyncIterator[None]:
    """The reward service, beside the job."""
    redis, blocking = clients
    spec = SPEC.model_dump(mode="json")
    spec["rollout"]["of a later release"] = 1
    await JobStore(redis).activate(ActiveJob(JOB, 1, "127.0.0.1:1", 0, "/models/tiny", spec))
    drain = Drain()
    async with Pool(1) as pool:
        running = asyncio.create_task(RewardService(redis, blocking, pool, name="reward-1", drain=drain).follow_jobs())
        yield
        drain.request()
        await running


def sampled(group_id: int) -> RolloutGroup:
    rng = np.random.default_rng(group_id)
    task = Task(
        job_id=JOB, lineage=1, group_id=group_id, attempt=1, purpose=Purpose.TRAIN, prompt=(Message("user", "How many?"),),
        data_source="openai/gsm8k", ground_truth="72", extra_info={}, group_size=GROUP_SIZE, temperature=1.0, max_tokens=TOKENS,
        min_policy_version=0, timeout_s=60.0,
    )  # fmt: skip
    rollouts = []
    for number in range(GROUP_SIZE):
        tokens = rng.integers(0, VOCABULARY, TOKENS).astype("<i4").tobytes()
        logprobs = -rng.exponential(1.0, TOKENS).astype("<f4")
        text = "and " * TOKENS + f"#### {72 if number % 2 else 0}"
        rollouts.append(Rollout(tokens, logprobs.tobytes(), text, FinishReason.LENGTH, (VersionSpan(0, 0),)))
    return RolloutGroup(task, "rollout-1", np.arange(9, dtype="<i4").tobytes(), tuple(rollouts), 60.0)


async def read(reader: Consumer) -> Entry:
    deadline = time.monotonic() + 30.0
    while not (entries := await reader.read(64, 0.5)):
        assert time.monotonic() < deadline
    return entries[0]


@pytest.mark.usefixtures("judging")
async def test_a_large_group_comes_back_from_the_journal_as_it_was_sampled(
    clients: tuple[Redis, Redis], tmp_path: Path
) -> None:
    redis, blocking = clients
    group = sampled(0)
    payload = codec.encode(group, LIMIT)
    assert len(payload) > MIN_ENTRY_BYTES
    await add(redis, JOB, Stage.ROLLOUTS, group.task.member, payload)

    reader = Consumer(redis, blocking, JOB, Stage.SCORED, group="learner", name="learner", limit_bytes=LIMIT)
    entry = await read(reader)
    judged = Judged(decode_entry(JOB, entry, LIMIT), entry.payload, entry)
    assert [verdict.reward for verdict in judged.scored.verdicts] == [0.0, 1.0] * (GROUP_SIZE // 2)
    buffer = GroupBuffer(SPEC, Limits(VOCABULARY, positions=2 * TOKENS), Ledger())
    buffer.ledger.issue(0)
    assert buffer.arrived(judged) is None, "it is ready"
    assert buffer.select(0) == [judged]
    buffer.begin_training([judged])
    settled, entries = buffer.take_for_record()
    journal = Journal(tmp_path / "journal")
    journal.append(BatchRecord(1, 1, (entry.payload,), settled, buffer.ledger.issued))
    assert await reader.ack(*entries) == 1

    (record,) = Journal(tmp_path / "journal").records()
    assert [item.fate for item in record.settled] == [Fate.TRAINED]
    batch = Batch.of_payloads(record.groups, SPEC)
    kept = tuple(replace(rollout, text="") for rollout in group.rollouts)
    assert batch.groups[0].scored.group == replace(group, rollouts=kept)
    for sequence, rollout in zip(batch.sequences, kept, strict=True):
        assert np.array_equal(sequence.tokens, np.concatenate([group.prompt_tokens, rollout.tokens]))
        assert np.array_equal(sequence.inference_logprobs, rollout.logprobs)
    assert set((await depths(redis, JOB)).values()) == {0}
    (sample,) = await redis.lrange(keys.samples(JOB), 0, -1)
    assert len(sample) < 128 * 1024, "people read a part of the text"


@pytest.mark.usefixtures("judging")
async def test_an_entry_beyond_the_limit_of_its_job_is_a_dead_letter(clients: tuple[Redis, Redis]) -> None:
    redis, _ = clients
    await redis.xadd(keys.stream(JOB, Stage.ROLLOUTS), {"member": "train:1:1:1", "d": bytes(LIMIT + 1)})
    hostile: Any = b"\xdd\x00\x80\x00\x00" + b"\x80" * 8 * 1024**2
    await redis.xadd(keys.stream(JOB, Stage.ROLLOUTS), {"member": "train:1:2:1", "d": hostile})
    deadline = time.monotonic() + 30.0
    while (await dead_letters.count(redis, JOB))[Stage.ROLLOUTS] < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    letters = {letter.member: letter for letter in await dead_letters.read(redis, JOB, Stage.ROLLOUTS)}
    assert letters["train:1:1:1"].reason == f"entry of {LIMIT + 1} bytes exceeds the limit of {LIMIT}"
    assert not letters["train:1:1:1"].whole
    assert letters["train:1:2:1"].reason == "the entry has more than 4194304 values"
    assert letters["train:1:2:1"].whole, "it is within the limit"
