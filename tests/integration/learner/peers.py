"""What a learner works with, in a test: the process itself, a tiny model, and the rollout and reward services' part of the conversation."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
from redis.asyncio import Redis

from services.common.jobs.record import JobRecord
from services.common.jobs.store import JobStore
from services.common.redis.connection import connect
from services.common.redis.keys import Stage
from services.common.streams.codec import decode, encode
from services.common.streams.consumer import Consumer
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import (
    EpisodeOutcome,
    FinishReason,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    Turn,
    Verdict,
    VerdictStatus,
    VersionSpan,
)
from services.learner.ranks.launch import RANK_MODULE

VOCABULARY = 128
ROOT = Path(__file__).parents[3]


class Learner:
    """`python -m services.learner`, that can be killed and started again."""

    def __init__(self, redis_url: str, home: Path, module: str = "services.learner", **environment: str) -> None:
        """Starts nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._module = module
        self.log = home / "learner.log"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")},
            "REDIS_URL": redis_url,
            "MILLRACE_HOME": str(home),
            "MILLRACE_WORKER": "learner-of-this-test",
            "PYTHONPATH": str(ROOT),
            **environment,
        }

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module], env=self._environment, stdout=log, stderr=log
            )

    def kill_ranks(self) -> None:
        """kill -9 of all at once; their launcher starts new ones."""
        assert self._process is not None
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.cmdline()[-1:] == [RANK_MODULE] and "services.learner.ranks.launch" not in child.cmdline():
                    child.kill()

    def kill(self) -> None:
        """Its ranks die with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass
class Peers:
    """Answers every task of a job as a rollout server and a reward service would, at `delay_s` a group; every fifth group is degenerate."""

    redis: Redis
    redis_url: str
    job_id: str
    delay_s: float = 0.02
    asked: list[str] = field(default_factory=list)
    """Members of the tasks that were taken, in order."""
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    last_version: int | None = None
    """Nothing is answered that asks for this version of the policy, or a newer one; None for no bound."""
    reply: Callable[[Task, int], ScoredGroup] | None = None
    """What comes back for a task, sampled by a version; None: `answer`."""

    async def run(self) -> None:
        blocking = connect(self.redis_url, block_s=1.0)
        store = JobStore(self.redis)
        consumer = Consumer(
            self.redis,
            blocking,
            self.job_id,
            Stage.TASKS,
            group="rollout",
            name="rollout-0",
            limit_bytes=MIN_ENTRY_BYTES,
        )
        try:
            while True:
                for entry in await consumer.read(1, 0.2):
                    task = decode(Task, entry.payload, MIN_ENTRY_BYTES)
                    self.asked.append(task.member)
                    await asyncio.sleep(self.delay_s)
                    await self.answering.wait()
                    while self.last_version is not None and task.min_policy_version >= self.last_version:
                        await asyncio.sleep(0.01)
                    while (active := (await store.active()).get(self.job_id)) is None:
                        await asyncio.sleep(0.05)  # a Redis that was emptied
                    version = active.policy_version
                    scored = (self.reply or answer)(task, max(version, task.min_policy_version))
                    await consumer.hop(entry, Stage.SCORED, encode(scored, MIN_ENTRY_BYTES))
        finally:
            await blocking.aclose()


@asynccontextmanager
async def peers_of(redis: Redis, redis_url: str, job_id: str, delay_s: float = 0.02) -> AsyncIterator[Peers]:
    """Peers that answer from now on; what went wrong with them is raised in the end."""
    peers = Peers(redis, redis_url, job_id, delay_s)
    peers.answering.set()
    task = asyncio.create_task(peers.run())
    try:
        yield peers
        if task.done():
            task.result()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def answer(task: Task, version: int) -> ScoredGroup:
    """A judged group of random tokens: one rollout is right, or all are."""
    rng = np.random.default_rng(task.group_id)
    rollouts = []
    for _ in range(task.group_size):
        tokens = rng.integers(5, VOCABULARY, 6).astype("<i4")
        logprobs = rng.normal(-4.9, 0.1, 6).astype("<f4")
        rollouts.append(
            Rollout(tokens.tobytes(), logprobs.tobytes(), "", FinishReason.STOP, (VersionSpan(0, version),))
        )
    group = RolloutGroup(task, "rollout-0", np.array([7, 8, 9], "<i4").tobytes(), tuple(rollouts), 0.01, None)
    right = [1.0] * task.group_size if task.group_id % 5 == 0 else [1.0] + [0.0] * (task.group_size - 1)
    return ScoredGroup(group, tuple(Verdict(VerdictStatus.SCORED, r, r, "exact") for r in right), 0.01)


def play(task: Task, version: int) -> ScoredGroup:
    """The same of episodes: one to three turns, most of which begin with what the environment said, with rewards of their own."""
    rng, scored = np.random.default_rng(task.group_id), answer(task, version)
    rollouts = []
    for number in range(task.group_size):
        turns = [
            Turn(
                int(rng.integers(0, 4)) if turn else 0, int(rng.integers(1, 4)), FinishReason.STOP, float(rng.normal())
            )
            for turn in range(1 + (task.group_id + number) % 3)
        ]
        length = sum(turn.observed + turn.sampled for turn in turns)
        made = Rollout(
            rng.integers(5, VOCABULARY, length).astype("<i4").tobytes(), bytes(4 * length), "", FinishReason.STOP,
            (VersionSpan(0, version),), tuple(turns), EpisodeOutcome(1.0, 1.0),
        )  # fmt: skip
        logprobs = np.where(made.sampled, rng.normal(-4.9, 0.1, length), 0.0).astype("<f4")
        rollouts.append(replace(made, inference_logprobs=logprobs.tobytes()))
    return replace(scored, group=replace(scored.group, rollouts=tuple(rollouts)))


async def until(
    store: JobStore, job_id: str, condition: Callable[[JobRecord], bool], learner: Learner, timeout_s: float = 120.0
) -> JobRecord:
    """The job's record as soon as it is as wanted; fails with the learner's log."""
    deadline = time.monotonic() + timeout_s
    while True:
        record = await store.find(job_id)
        if record is not None and condition(record):
            return record
        assert time.monotonic() < deadline, (record, learner.log.read_text()[-4000:])
        assert record is None or record.state != "failed", (record, learner.log.read_text()[-4000:])
        await asyncio.sleep(0.05)


async def settled(look: Callable[[], Awaitable[int]], quiet_s: float = 1.5, timeout_s: float = 30.0) -> int:
    """What is looked at, once it has been the same for a while."""
    deadline = time.monotonic() + timeout_s
    seen, since = await look(), time.monotonic()
    while time.monotonic() - since < quiet_s:
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.05)
        now = await look()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen
