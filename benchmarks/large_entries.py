"""What a group of long responses costs on its way from rollout to journal, beside a bare Redis hop of the same bytes in the same run.

    python benchmarks/large_entries.py [--responses 16] [--tokens 32768] [--repeats 5]

A server of its own, with its append-only file. Each side is a process that runs the service's own parts, one group after the other:

    rollout   encode ─► hop ──►  reward   read ─► decode ─► verifiers ─► encode ─► hop ──►  learner   read ─► decode ─► journal ─► read back

The learner compares what it reads back from the journal with what was sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from redis.asyncio import Redis

from services.cli.stack.children import start_child
from services.cli.stack.redis import EmbeddedRedis
from services.common.config.settings import load_settings
from services.common.redis.connection import connect
from services.common.redis.keys import Stage
from services.common.spec.job import JobSpec
from services.common.streams import codec
from services.common.streams.consumer import Consumer, Entry
from services.common.streams.limits import entry_limit
from services.common.streams.stream import add
from services.common.streams.types import (
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    VersionSpan,
)
from services.learner.groups.batch import Batch
from services.learner.groups.buffer import GroupBuffer, Judged
from services.learner.groups.ledger import Ledger
from services.learner.groups.validate import Limits
from services.learner.storage.journal import BatchRecord, Journal
from services.reward.dispatch import Dispatch
from services.reward.pool.pool import Pool
from services.reward.session import without_text

MIB = 1 << 20
JOB = "large"
VOCABULARY = 49_152
WORDS = (
    "so",
    " the",
    " sum",
    " of",
    " both",
    " is",
    " then",
    " 48",
    " +",
    " 24",
    " =",
    " 72",
    ".\n",
    " Natalia",
    " clips",
    " altogether",
)


@dataclass
class Side:
    """What one process measures."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Wall-clock time of each step, by group."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the last group's entry and of its journal record."""
    peak: int = 0
    """Bytes of memory beyond those before the first group."""

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Measures the body."""
        began = time.perf_counter()
        yield
        self.seconds[step].append(time.perf_counter() - began)


@dataclass(frozen=True)
class Plan:
    """What all sides know."""

    url: str
    home: Path
    responses: int
    tokens: int
    groups: int

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return JobSpec.model_validate(
            {
                "model": {"path": "tiny"},
                "data": {"train": {"source": "reasoning_gym:chain_sum"}},
                "rollout": {"group_size": self.responses, "rollout_max_tokens": self.tokens},
                "algorithm": {"filter_groups_train_batch_size": 1, "filter_groups_enable": False},
            }
        )

    @property
    def limit_bytes(self) -> int:
        """Of an entry."""
        return entry_limit(self.spec.rollout, self.spec.eval)

    def task(self, number: int) -> Task:
        """One task."""
        return Task(
            job_id=JOB, lineage=1, group_id=number, attempt=1, purpose=Purpose.TRAIN, prompt=(Message("user", "How many clips?"),),
            data_source="openai/gsm8k", ground_truth="72", extra_info={"index": number}, group_size=self.responses,
            temperature=1.0, max_tokens=self.tokens, min_policy_version=0, timeout_s=600.0,
        )  # fmt: skip

    def group(self, number: int) -> RolloutGroup:
        """The same group whoever makes it: random tokens and log-probs, which no compression makes smaller, and 4 characters a token."""
        rng = np.random.default_rng(number)
        rollouts = []
        for _ in range(self.responses):
            tokens = rng.integers(0, VOCABULARY, self.tokens).astype("<i4").tobytes()
            logprobs = -rng.exponential(1.0, self.tokens).astype("<f4")
            text = "".join(WORDS[index] for index in rng.integers(0, len(WORDS), self.tokens)) + "\n#### 72"
            spans = (VersionSpan(0, 0),)
            rollouts.append(Rollout(tokens, logprobs.tobytes(), text, FinishReason.LENGTH, spans))
        return RolloutGroup(self.task(number), "rollout-1", np.arange(12, dtype="<i4").tobytes(), tuple(rollouts), 60.0)

    def consumer(self, redis: Redis, blocking: Redis, stage: Stage) -> Consumer:
        """The service's reader of a stream."""
        return Consumer(redis, blocking, JOB, stage, group="bench", name="bench", limit_bytes=self.limit_bytes)


def check(holds: bool, what: str) -> None:
    """Ends the measurement unless the group is `what`."""
    if not holds:
        raise SystemExit(f"a group was not {what}")


async def next_entry(reader: Consumer) -> Entry:
    """The stream's next entry, which is there."""
    (entry,) = await reader.read(1, 2.0)
    return entry


async def rollout_side(plan: Plan, side: Side, redis: Redis, blocking: Redis) -> None:
    """Takes tasks, and sends the groups."""
    reader = plan.consumer(redis, blocking, Stage.TASKS)
    for number in range(plan.groups):
        task = plan.task(number)
        await add(redis, JOB, Stage.TASKS, task.member, codec.encode(task, plan.limit_bytes))
        entry, group = await next_entry(reader), plan.group(number)
        with side.timed("encode"):
            payload = codec.encode(group, plan.limit_bytes)
        with side.timed("hop"):
            check(await reader.hop(entry, Stage.ROLLOUTS, payload), "sent on")
        side.sizes["rollouts"] = len(payload)


async def reward_side(plan: Plan, side: Side, redis: Redis, blocking: Redis) -> None:
    """Judges the groups in the real pool."""
    reader = plan.consumer(redis, blocking, Stage.ROLLOUTS)
    async with Dispatch(plan.spec.reward, Pool(1), load_settings()) as dispatch:
        for _ in range(plan.groups):
            with side.timed("read"):
                entry = await next_entry(reader)
            with side.timed("decode"):
                group = codec.decode(RolloutGroup, entry.payload, plan.limit_bytes)
            with side.timed("verifiers"):
                scored = await dispatch.judge(group)
            check({verdict.reward for verdict in scored.verdicts} == {1.0}, "judged right")
            with side.timed("encode"):
                payload = codec.encode(without_text(scored), plan.limit_bytes)
            with side.timed("hop"):
                check(await reader.hop(entry, Stage.SCORED, payload), "sent on")
            side.sizes["scored"] = len(payload)


async def learner_side(plan: Plan, side: Side, redis: Redis, blocking: Redis) -> None:
    """Buffers, journals and reads back; each group is a step's batch, in a journal of its own."""
    limits = Limits(vocab_size=VOCABULARY, positions=2 * plan.tokens)
    reader = plan.consumer(redis, blocking, Stage.SCORED)
    buffer = GroupBuffer(plan.spec, limits, Ledger())
    for number in range(plan.groups):
        buffer.ledger.issue(number)
        with side.timed("read"):
            entry = await next_entry(reader)
        with side.timed("decode"):
            scored = codec.decode(ScoredGroup, entry.payload, plan.limit_bytes)
        with side.timed("buffer"):
            buffer.arrived(Judged(scored, entry.payload, entry))
            chosen = buffer.select(0) or []
        check(len(chosen) == 1, "accepted")
        buffer.begin_training(chosen)
        settled, entries = buffer.take_for_record()
        with side.timed("journal"):
            record = BatchRecord(number + 1, 1, (entry.payload,), settled, buffer.ledger.issued)
            side.sizes["journal"] = Journal(plan.home / f"journal-{number}").append(record)
        await reader.ack(*entries)
        with side.timed("read back"):
            (back,) = Journal(plan.home / f"journal-{number}").records()
            batch = Batch.of_payloads(back.groups, plan.spec)
        kept = tuple(replace(rollout, text="") for rollout in plan.group(number).rollouts)
        check(batch.groups[0].scored.group.rollouts == kept, "read back as it was sampled")


async def bare_side(plan: Plan, side: Side, redis: Redis, blocking: Redis) -> None:
    """The same bytes through Redis alone: XADD, XREADGROUP, XACK and XDEL, without scripts, codec or services."""
    await redis.xgroup_create("bare", "bench", id="0", mkstream=True)
    for name, size in json.loads((plan.home / "sizes.json").read_text()).items():
        payload = np.random.default_rng(0).bytes(size)
        for _ in range(plan.groups):
            with side.timed(f"add {name}"):
                entry_id: Any = await redis.xadd("bare", {"d": payload})
            with side.timed(f"read {name}"):
                await blocking.xreadgroup("bench", "bench", {"bare": ">"}, count=1, block=2000)
            await redis.xack("bare", "bench", entry_id)
            await redis.xdel("bare", entry_id)


SIDES: dict[str, Callable[[Plan, Side, Redis, Redis], Awaitable[None]]] = {
    "rollout": rollout_side,
    "reward": reward_side,
    "learner": learner_side,
    "bare": bare_side,
}


def run_side(name: str, plan: Plan) -> tuple[dict[str, list[float]], dict[str, int], int]:
    """Runs a side in this process, which is fresh: seconds, sizes, and the peak of memory."""

    async def run() -> Side:
        side, redis, blocking = Side(), connect(plan.url), connect(plan.url, block_s=2.0)
        before = psutil.Process().memory_info().rss
        try:
            await SIDES[name](plan, side, redis, blocking)
        finally:
            await redis.aclose()
            await blocking.aclose()
        side.peak = highest_rss() - before
        return side

    side = asyncio.run(run())
    return dict(side.seconds), side.sizes, side.peak


def highest_rss() -> int:
    """Most memory that this process has had resident, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def in_new_process(name: str, plan: Plan) -> Side:
    """The side's figures."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        seconds, sizes, peak = executor.submit(run_side, name, plan).result()
    return Side(defaultdict(list, seconds), sizes, peak)


@contextmanager
def own_redis(folder: Path) -> Iterator[EmbeddedRedis]:
    """The server of `millrace up`, on its socket."""
    server = EmbeddedRedis(folder)
    process = start_child(server.argv, log_path=folder / "redis.log")
    try:
        while not server.answers(process.pid):
            if process.poll() is not None:
                raise SystemExit((folder / "redis.log").read_text())
            time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.wait()


def measure(plan: Plan) -> dict[str, Side]:
    """All sides, one after the other; the bare one knows the sizes of the others' entries."""
    sides = {name: in_new_process(name, plan) for name in ("rollout", "reward", "learner")}
    sizes = {"rollouts": sides["rollout"].sizes["rollouts"], "scored": sides["reward"].sizes["scored"]}
    (plan.home / "sizes.json").write_text(json.dumps(sizes))
    return sides | {"bare": in_new_process("bare", plan)}


def report(plan: Plan, sides: dict[str, Side]) -> None:
    """Prints the figures: medians without the first group, whose processes are cold."""
    rollouts, scored = sides["rollout"].sizes["rollouts"], sides["reward"].sizes["scored"]
    journal, tokens = sides["learner"].sizes["journal"], plan.responses * plan.tokens
    print(f"entry limit of the job                {plan.limit_bytes / MIB:8.1f} MiB")
    for name, size in (("rollouts entry", rollouts), ("scored entry", scored), ("journal record", journal)):
        print(f"{name:36s}  {size / MIB:8.1f} MiB  {size / tokens:6.2f} bytes a token")
    medians = {
        side: {step: statistics.median(times[1:]) for step, times in found.seconds.items()}
        for side, found in sides.items()
    }
    bare = {name: medians["bare"][f"add {name}"] + medians["bare"][f"read {name}"] for name in ("rollouts", "scored")}
    print(f"\n{'side':9s} {'step':10s} {'ms':>8s} {'MiB/s':>8s}   × bare hop of these bytes")
    for side in ("rollout", "reward", "learner"):
        for step, seconds in medians[side].items():
            incoming = side == "reward" and step in {"read", "decode", "verifiers"}
            name = "rollouts" if side == "rollout" or incoming else "scored"
            size = {"rollouts": rollouts, "scored": scored}[name]
            print(
                f"{side:9s} {step:10s} {seconds * 1e3:8.1f} {size / MIB / seconds:8.0f}   {seconds / bare[name]:6.2f}"
            )
    whole = sum(sum(medians[side].values()) for side in ("rollout", "reward", "learner"))
    whole -= medians["learner"]["read back"]  # only after a crash
    both = sum(bare.values())
    print(f"\nbare hops (rollouts, scored)           {bare['rollouts'] * 1e3:6.1f}, {bare['scored'] * 1e3:.1f} ms")
    print(f"whole way of a group, into the journal {whole * 1e3:6.1f} ms   {whole / both:.1f} × the bare hops")
    print(f"tokens of this way in a second         {tokens / whole / 1e6:6.2f} million")
    for side, size in (("rollout", rollouts), ("reward", rollouts), ("learner", scored), ("bare", rollouts)):
        peak = sides[side].peak
        print(f"peak memory of {side:8s}                {peak / MIB:6.1f} MiB   {peak / size:.1f} × its entry")


def main() -> None:
    """Measures on a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=16, help="of a group")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a response")
    parser.add_argument("--repeats", type=int, default=5, help="groups; the medians are printed")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as home, own_redis(Path(home) / "redis") as server:
        plan = Plan(server.url, Path(home), arguments.responses, arguments.tokens, arguments.repeats + 1)
        report(plan, measure(plan))


if __name__ == "__main__":
    main()
