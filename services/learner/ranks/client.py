"""Client of the ranks, for the head: each call becomes a command, and returns when rank 0 has executed it.

The head runs in a thread of rank 0 and only does I/O; rank 0's main thread takes the commands, broadcasts them to the other ranks, and
computes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.checkpoints.manifest import WrittenFile
from services.learner.groups.sequence import Sequence
from services.learner.ranks.commands import (
    Command,
    Export,
    Finish,
    Finite,
    Load,
    LoadWeights,
    Save,
    Saved,
    Train,
    Write,
)
from services.learner.training.background import files_of
from services.learner.training.stats import StepStats
from services.learner.training.tensor_file import Weights


@dataclass(frozen=True, slots=True)
class Call:
    """A command for rank 0's main thread, and the future of its result."""

    command: Command
    result: concurrent.futures.Future[Any]


class Ranks:
    """All ranks of the job. They execute one call after the other, in order."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Call] = queue.Queue(maxsize=1)
        self._fault: BaseException | None = None
        self._lock = asyncio.Lock()

    async def train(self, step: int, sequences: list[Sequence]) -> StepStats:
        """One optimizer step."""
        stats: StepStats = await self._call(Train(step, sequences))
        return stats

    async def finite(self) -> bool:
        """Whether every parameter is finite, on every rank."""
        return bool(await self._call(Finite()))

    async def weights(self) -> Weights:
        """The weights under their Hugging Face names, gathered on rank 0."""
        weights: Weights = await self._call(Export())
        return weights

    async def write_weights(self, path: Path, lineage: int, n: int) -> None:
        """Rank 0 writes the weights as the safetensors file of a policy version. Raises WeightSyncError when there is no room."""
        await self._call(Write(str(path), lineage, n))

    async def save(self, path: Path, *, export: bool) -> None:
        """Begins to write a checkpoint's files into the directory; returns when the state is copied."""
        await self._call(Save(str(path), export))

    async def saved(self) -> list[WrittenFile] | None:
        """The files of the last `save`, durable; None while they are being written. Raises as `files_of`."""
        reports: list[dict[str, Any]] | None = await self._call(Saved())
        return None if reports is None else files_of(reports)

    async def load(self, path: Path, *, optimizer: bool = True, rng: bool = True) -> None:
        """Reads a checkpoint's files from the directory."""
        await self._call(Load(str(path), optimizer, rng))

    async def load_weights(self, path: Path, *, hugging_face: bool) -> None:
        """Reads weights only, from a checkpoint's directory or a Hugging Face one."""
        await self._call(LoadWeights(str(path), hugging_face))

    async def finish(self) -> None:
        """Ends the ranks' loops."""
        await self._call(Finish())

    def next(self, timeout_s: float) -> Call | None:
        """For rank 0's main thread: the next call, or None after `timeout_s`; raises the head's error if that has died."""
        try:
            return self._calls.get(timeout=timeout_s)
        except queue.Empty:
            if self._fault is not None:
                raise self._fault from None
            return None

    def fail(self, error: BaseException) -> None:
        """Records that the head has died: the next wait of the main thread raises this error."""
        self._fault = error

    async def _call(self, command: Command) -> Any:  # noqa: ANN401  each caller knows its result
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()
        async with self._lock:
            self._calls.put_nowait(Call(command, result))
            return await asyncio.wrap_future(result)
