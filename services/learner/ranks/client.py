"""How the head drives the ranks: each call becomes a command, and returns when rank 0 has done it.

The head runs in a thread of rank 0 and only does I/O; rank 0's main thread takes the commands, shares them with the other ranks, and
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
from services.learner.megatron.background import files_of
from services.learner.megatron.trainer import StepStats
from services.learner.ranks.commands import (
    Command,
    Finish,
    Finite,
    Idle,
    Load,
    LoadWeights,
    Publish,
    Save,
    Saved,
    Train,
)
from services.learner.ranks.snapshot import Weights


@dataclass(frozen=True, slots=True)
class Call:
    """A command on its way to rank 0's main thread, and where its result goes."""

    command: Command
    result: concurrent.futures.Future[Any]


class Ranks:
    """The ranks, as the head sees them. They take one call after the other, in the order in which they were made."""

    def __init__(self) -> None:
        """No call yet."""
        self._calls: queue.Queue[Call] = queue.Queue(maxsize=1)
        self._fault: BaseException | None = None
        self._turn = asyncio.Lock()

    async def train(self, step: int, sequences: list[Sequence]) -> StepStats:
        """One optimizer step."""
        stats: StepStats = await self._call(Train(step, sequences))
        return stats

    async def finite(self) -> bool:
        """Whether every parameter is, on every rank."""
        found: bool = await self._call(Finite())
        return found

    async def weights(self) -> Weights:
        """The weights under their Hugging Face names, gathered on rank 0."""
        weights: Weights = await self._call(Publish())
        return weights

    async def save(self, path: Path, *, export: bool) -> None:
        """Begins to write a checkpoint's files into the directory; returns when the state is copied."""
        await self._call(Save(str(path), export))

    async def saved(self) -> list[WrittenFile] | None:
        """The files of the last `save`, durable; None while they are being written.

        Raises:
            OSError: a rank could not write its part; with the number that the system gave, if it did.
        """
        reports: list[dict[str, Any]] | None = await self._call(Saved())
        return None if reports is None else files_of(reports)

    async def load(self, path: Path, *, optimizer: bool = True, rng: bool = True) -> None:
        """Reads a checkpoint's files from the directory."""
        await self._call(Load(str(path), optimizer, rng))

    async def load_weights(self, path: Path, *, hugging_face: bool) -> None:
        """Reads weights only, from a checkpoint's directory or a Hugging Face one."""
        await self._call(LoadWeights(str(path), hugging_face))

    async def finish(self) -> None:
        """Lets the ranks leave their loop."""
        await self._call(Finish())

    def next(self, timeout_s: float) -> Call | None:
        """For rank 0's main thread: the next call, or None after `timeout_s`.

        Raises:
            Exception: what ended the head, if it has ended.
        """
        try:
            return self._calls.get(timeout=timeout_s)
        except queue.Empty:
            if self._fault is not None:
                raise self._fault from None
            return None

    def fail(self, error: BaseException) -> None:
        """The head has died: the next wait of the main thread raises this."""
        self._fault = error

    async def _call(self, command: Command) -> Any:  # noqa: ANN401  each caller knows its result
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()
        async with self._turn:
            self._calls.put_nowait(Call(command, result))
            return await asyncio.wrap_future(result)


IDLE = Idle()
