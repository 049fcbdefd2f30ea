"""Ranks whose weights are a digest of everything they trained, in order: equal weights mean equal histories. Their head is the real one."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from redis.asyncio import Redis

from services.common.checkpoints.manifest import WrittenFile, digest_of_file
from services.common.config.settings import Settings
from services.common.jobs.folder import SPEC_FILE
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.spec.job import JobSpec, dump_spec
from services.learner.controller import Head
from services.learner.groups.sequence import Sequence
from services.learner.ranks.client import Ranks
from services.learner.training.stats import StepStats
from services.learner.training.tensor_file import write_version

FILE = "rank-00000.bin"
ROWS = {"source": "rows.jsonl"}


class ScriptedRanks:
    """Stands where `Ranks` does.

    `not_finite` names the steps that are skipped; without `finite` a tensor is broken from the start; a step after `last_step` ends only
    once the head is told to drain.
    """

    def __init__(
        self,
        *,
        not_finite: Collection[int] = (),
        write_s: float = 0.0,
        finite: bool = True,
        last_step: float = math.inf,
    ) -> None:
        self.state = b"\0" * 16
        self.trained: list[int] = []
        self.loaded: list[tuple[str, bool, bool]] = []
        self.saves: list[int] = []
        self.error: BaseException | None = None
        self._not_finite = not_finite
        self._finite = finite
        self._write_s = write_s
        self._last_step = last_step
        self.draining = False
        self._writing: asyncio.Task[WrittenFile] | None = None

    async def train(self, step: int, sequences: list[Sequence]) -> StepStats:
        while step > self._last_step and not self.draining:
            await asyncio.sleep(0.01)
        self.trained.append(step)
        skipped = "loss nan and gradient norm nan are not both finite" if step in self._not_finite else ""
        if not skipped:
            self.state = chain(self.state, sequences)
        return StepStats(
            step=step, loss=math.nan if skipped else 0.1, grad_norm=1.0, lr=1e-6, tokens=10, sequences=len(sequences),
            micro_batches=1, padding=0.0, skipped=skipped,
        )  # fmt: skip

    async def finite(self) -> bool:
        return self._finite

    async def weights(self) -> dict[str, torch.Tensor]:
        weights = torch.tensor(list(self.state), dtype=torch.float32)
        return {"w": weights} if self._finite else {"w": weights, "broken": torch.tensor([1.0, math.nan])}

    async def write_weights(self, path: Path, lineage: int, n: int) -> None:
        await asyncio.to_thread(write_version, path, lineage, n, await self.weights())

    async def save(self, path: Path, *, export: bool) -> None:
        assert not export
        self.saves.append(len(self.trained))
        self._writing = asyncio.create_task(asyncio.to_thread(self._write, path / FILE, self.state))

    def _write(self, path: Path, state: bytes) -> WrittenFile:
        time.sleep(self._write_s)
        path.write_bytes(state * 4096)
        return WrittenFile(path.name, path.stat().st_size, digest_of_file(path))

    async def saved(self) -> list[WrittenFile] | None:
        assert self._writing is not None
        return [await self._writing] if self._writing.done() else None

    async def load(self, path: Path, *, optimizer: bool = True, rng: bool = True) -> None:
        self.loaded.append((path.name, optimizer, rng))
        self.state = (path / FILE).read_bytes()[:16]

    async def load_weights(self, path: Path, *, hugging_face: bool) -> None:
        self.loaded.append((path.name, False, False))
        self.state = b"\1" * 16 if hugging_face else (path / FILE).read_bytes()[:16]

    async def finish(self) -> None:
        return

    def fail(self, error: BaseException) -> None:
        self.error = error


def chain(state: bytes, sequences: list[Sequence]) -> bytes:
    """The weights after a batch."""
    return xxhash.xxh3_128_digest(state + b"".join(s.tokens.tobytes() + s.advantage.tobytes() for s in sequences))


def write_rows(data: Path) -> None:
    """A dataset that opens at once: a procedural source imports its generators in each new child, for seconds."""
    data.mkdir(parents=True)
    tasks = [
        {
            "prompt": [{"role": "user", "content": f"{row} + 1"}],
            "data_source": "openai/gsm8k",
            "ground_truth": str(row + 1),
        }
        for row in range(500)
    ]
    (data / ROWS["source"]).write_text("".join(json.dumps(task) + "\n" for task in tasks))


class ScriptedLearner:
    """A job's head in this process, with scripted ranks: as if an agent had claimed the job and started them."""

    def __init__(self, home: Path, redis_url: str, redis: Redis) -> None:
        write_rows(home / "data")
        self.store = JobStore(redis)
        self._redis = redis
        self.settings = Settings(home=home, redis_url=redis_url, worker="learner", drain_timeout_s=10.0)
        self.ranks = ScriptedRanks()
        self._head: Head | None = None

    async def submit(self, spec: JobSpec) -> str:
        """The job's id; its learner has claimed it."""
        record = await self.store.create(spec)
        claimed = await self.store.claim("learner")
        assert claimed is not None
        folder = self.folder(record.id)
        folder.mkdir(parents=True)
        (folder / SPEC_FILE).write_text(dump_spec(spec))
        return record.id

    def folder(self, job_id: str) -> Path:
        return self.settings.job_dir(job_id)

    async def start(self, job_id: str, **ranks: Any) -> None:
        """Begins, or begins again, with new ranks."""
        self.ranks = ScriptedRanks(**ranks)
        spec = (await self.store.get(job_id)).spec
        self._head = Head(job_id, spec, self.settings.models_dir / "tiny", self.settings, cast("Ranks", self.ranks))
        self._head.start()

    async def stop(self) -> None:
        """As a rank does on SIGTERM; what is not journalled by then is lost, as in a crash."""
        head, self._head = self._head, None
        if head is not None:
            head.drain()
            self.ranks.draining = True
            await asyncio.to_thread(head.join, 30.0)
            head.release()  # as the end of its process would

    async def evals(self, job_id: str) -> list[dict[str, Any]]:
        """The job's evaluations, oldest first."""
        return [json.loads(raw) for raw in await self._redis.lrange(keys.evals(job_id), 0, -1)]

    async def until(self, job_id: str, condition: Any, timeout_s: float = 120.0) -> JobRecord:
        """The record as soon as it is as wanted."""
        record = await self.store.get(job_id)
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(record):
                    assert self.ranks.error is None, self.ranks.error
                    await asyncio.sleep(0.02)
                    record = await self.store.get(job_id)
        except TimeoutError:
            raise AssertionError(record) from None
        return record

    async def ended(self, job_id: str, state: JobState = JobState.SUCCEEDED) -> JobRecord:
        """The record at the job's end, which must be this one."""
        record = await self.until(job_id, lambda record: record.state.ended)
        assert record.state is state, record.cause
        await self.stop()
        return record
