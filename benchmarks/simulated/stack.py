"""Stack of one simulation: its processes, and the windows in which they are measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil
from redis.asyncio import Redis

from benchmarks.simulated.usage import Usage, family, usages
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.keys import Stage
from services.common.streams import codec
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.stream import add
from services.common.streams.types import FinishReason, Message, Purpose, Rollout, RolloutGroup, Task, VersionSpan
from services.learner.weights.publisher import PROCESS_MODULE
from tests.chaos.job import job_spec

ROOT = Path(__file__).resolve().parents[2]
GROUP_SIZE = 8
GROUPS_PER_STEP = 1024
SAMPLE_S = 0.05
PER_PROCESS = 128
_START_S = 240.0
_SETTLE_S, _IDLE_S = 2.0, 5.0
_ALONE = 4096
_POLL_S = 0.02


State = tuple[dict[str, Usage], dict[str, int]]
"""Usage of each family, and calls of each Redis command."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is simulated."""

    servers: int
    tokens: int
    """Of a response."""
    apart: bool
    """Servers cannot take the learner's files."""

    def task(self, job_id: str, number: int) -> Task:
        """A task that the head has not issued."""
        return Task(
            job_id=job_id, lineage=1, group_id=10**6 + number, attempt=1, purpose=Purpose.TRAIN,
            prompt=(Message("user", f"row {number}"),), data_source="openai/gsm8k", ground_truth="1", extra_info={},
            group_size=GROUP_SIZE, temperature=1.0, max_tokens=self.tokens, min_policy_version=0, timeout_s=600.0,
        )  # fmt: skip

    @property
    def entry_bytes(self) -> int:
        """Size of a group on the rollouts stream."""
        rollout = Rollout(
            bytes(4 * self.tokens),
            bytes(4 * self.tokens),
            "1" * self.tokens + " #### 1",
            FinishReason.STOP,
            (VersionSpan(0, 0),),
        )
        group = RolloutGroup(self.task("scale", 0), "rollout-1", bytes(4 * 6), (rollout,) * GROUP_SIZE, 0.05)
        return len(codec.encode(group, MIN_ENTRY_BYTES))

    @property
    def spec(self) -> dict[str, Any]:
        """The job."""
        return job_spec(
            steps=10**6,
            interval_steps=10**6,
            rollout={"group_size": GROUP_SIZE, "rollout_max_tokens": self.tokens, "max_concurrent_groups": 64},
            algorithm={"filter_groups_train_batch_size": GROUPS_PER_STEP},
        )


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two moments."""

    seconds: float
    groups: int
    cpu_s: dict[str, float]
    """Processor seconds of each family."""
    rss: dict[str, int]
    """Bytes of each family at the end."""
    commands: dict[str, int]
    """Calls of each Redis command."""
    connections: int = 0
    hops: list[float] = field(default_factory=list)
    """Seconds of each call that sent a group on, in the servers."""
    current: list[float] = field(default_factory=list)
    """For each version: seconds from its file to the last server that has it in use."""
    halfway: list[float] = field(default_factory=list)
    """The same for the median server."""


class Stack:
    """The processes; started by `with`."""

    def __init__(self, home: Path, url: str, shape: Shape) -> None:
        """Starts nothing yet."""
        self._home, self._url, self._shape = home, url, shape
        self._processes: list[subprocess.Popen[str]] = []
        self._servers: list[subprocess.Popen[str]] = []
        self._written: dict[int, float] = {}
        self._activated: dict[int, list[float]] = {}
        self._job_id = ""
        # On another file system than the learner's files they cannot be linked.
        self._stages = tempfile.TemporaryDirectory(prefix="scale-", dir=None if shape.apart else "/dev/shm")  # noqa: S108

    def __enter__(self) -> Self:
        """Starts all of them."""
        self._began = time.monotonic()
        self._reward = self._start("services.reward", MILLRACE_WORKER="reward-0")
        self._head = self._start("benchmarks.simulated.head", str(self._home), self._url, json.dumps(self._shape.spec))
        self._job_id = _line(self._head)
        threading.Thread(target=self._read_versions, daemon=True).start()
        processes = (
            -(-self._shape.servers // PER_PROCESS)
            if self._shape.servers > 2 * PER_PROCESS
            else min(2, self._shape.servers)
        )
        for number in range(processes):
            first, end = (self._shape.servers * each // processes for each in (number, number + 1))
            words = [self._home, self._url, self._stages.name, first, end - first, SAMPLE_S, self._shape.tokens]
            self._servers.append(self._start("benchmarks.simulated.servers", *map(str, words)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kills all of them, the servers first: they would miss the others."""
        for process in reversed(self._processes):
            for relative in family(process.pid) if process.poll() is None else []:
                relative.send_signal(signal.SIGKILL)
            process.wait()
        self._stages.cleanup()

    def _start(self, module: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "REDIS_"))}
        own = {"MILLRACE_HOME": str(self._home), "REDIS_URL": self._url, "MILLRACE_LOG_LEVEL": "WARNING"}
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, env=inherited | own | variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def _read_versions(self) -> None:
        for line in _pipe(self._head.stdout):
            n, at = line.split()
            self._written[int(n)] = float(at)

    def _take(self) -> list[float]:
        """What the servers have measured since the last call: seconds of their hops; their activations are kept."""
        hops: list[float] = []
        for server in self._servers:
            _pipe(server.stdin).write("\n")
            _pipe(server.stdin).flush()
            found = json.loads(_line(server))
            hops += found["hops"]
            for n, times in found["activated"].items():
                self._activated.setdefault(int(n), []).extend(times)
        return hops

    def _usages(self, redis_pid: int) -> dict[str, Usage]:
        roots = {
            "head": [self._head.pid], "reward": [self._reward.pid], "Redis": [redis_pid],
            "servers": [server.pid for server in self._servers],
        }  # fmt: skip
        return usages(roots, {"weights": PROCESS_MODULE})

    async def started(self, redis: Redis) -> float:
        """Waits until every server has weights, and the first steps are done; seconds until the former."""
        while sum(map(len, self._activated.values())) < self._shape.servers:
            await asyncio.sleep(0.25)
            self._take()
            self._require_alive()
        attached_s = time.monotonic() - self._began
        await self._step_after(redis, await self._step(redis) + 1)
        return attached_s

    async def window(self, redis: Redis, seconds: float) -> Window:
        """From one step's end to another's, for at least so many seconds."""
        first = await self._step_after(redis, await self._step(redis))
        self._take()
        before, began = await self._state(redis), time.monotonic()
        last = first
        while time.monotonic() - began < seconds:
            last = await self._step_after(redis, last)
        elapsed, after = time.monotonic() - began, await self._state(redis)
        clients: Any = await redis.info("clients")
        hops = self._take()
        whole = [n for n, times in self._activated.items() if first <= n < last and len(times) == self._shape.servers]
        window = _between(before, after, elapsed, (last - first) * GROUPS_PER_STEP)
        return replace(
            window, connections=clients["connected_clients"], hops=hops,
            current=[max(self._activated[n]) - self._written[n] for n in whole],
            halfway=[sorted(self._activated[n])[self._shape.servers // 2] - self._written[n] for n in whole],
        )  # fmt: skip

    async def idle(self, redis: Redis) -> Window:
        """With the job paused, and nothing to do."""
        await JobStore(redis).pause(self._job_id)
        while await redis.hget(keys.record(self._job_id), "state") != b"paused":
            await asyncio.sleep(_POLL_S)
            self._require_alive()
        while any([await redis.xlen(keys.stream(self._job_id, stage)) for stage in (Stage.TASKS, Stage.ROLLOUTS)]):
            await asyncio.sleep(_POLL_S)
            self._require_alive()
        await asyncio.sleep(_SETTLE_S)
        before, began = await self._state(redis), time.monotonic()
        await asyncio.sleep(_IDLE_S)
        return _between(before, await self._state(redis), time.monotonic() - began, 0)

    async def servers_alone(self, redis: Redis) -> float:
        """Groups/s of the servers and Redis, while head and reward service stand still."""
        for process in [*family(self._reward.pid), psutil.Process(self._head.pid)]:
            process.send_signal(signal.SIGSTOP)
        goal = await redis.xlen(keys.stream(self._job_id, Stage.ROLLOUTS)) + _ALONE
        began = time.monotonic()
        for number in range(_ALONE):
            task = self._shape.task(self._job_id, number)
            await add(redis, self._job_id, Stage.TASKS, task.member, codec.encode(task, MIN_ENTRY_BYTES))
        while await redis.xlen(keys.stream(self._job_id, Stage.ROLLOUTS)) < goal:
            await asyncio.sleep(_POLL_S)
            self._require_alive()
        return _ALONE / (time.monotonic() - began)

    async def _state(self, redis: Redis) -> State:
        server: Any = await redis.info("server")
        commands: Any = await redis.info("commandstats")
        calls = {name.removeprefix("cmdstat_"): int(found["calls"]) for name, found in commands.items()}
        return self._usages(server["process_id"]), calls

    async def _step(self, redis: Redis) -> int:
        return int(await redis.hget(keys.record(self._job_id), "step") or 0)

    async def _step_after(self, redis: Redis, step: int) -> int:
        """The first later step, once it is done."""
        while (now := await self._step(redis)) <= step:
            await asyncio.sleep(_POLL_S)
            self._require_alive()
        return now

    def _require_alive(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise SystemExit("a process of the simulation has ended")
        if time.monotonic() - self._began > _START_S:
            raise SystemExit(f"not done after {_START_S:.0f} s")


def _between(before: State, after: State, seconds: float, groups: int) -> Window:
    calls = {name: count - before[1].get(name, 0) for name, count in after[1].items()}
    cpu_s = {name: usage - before[0][name] for name, usage in after[0].items()}
    return Window(seconds, groups, cpu_s, {name: usage.rss_bytes for name, usage in after[0].items()}, calls)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # noqa: S101  opened by `_start`
    return pipe


def _line(process: subprocess.Popen[str]) -> str:
    """The next line of a process's output; ends the measurement where it has ended."""
    line = _pipe(process.stdout).readline()
    if not line:
        raise SystemExit("a process of the simulation has ended")
    return line.strip()
