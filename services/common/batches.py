"""Batches of calls: those that come while one is under way go together.

callers ── call ──► waiting ──► one batch at a time ──► each caller its own result

A lone call goes at once; under load the batches grow, and with them what one system call and one wake-up carry.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

C = TypeVar("C")
R = TypeVar("R")

MAX_CALLS = 128
"""Most calls of one batch."""


class Batches(Generic[C, R]):
    """Batches of one kind of call."""

    def __init__(
        self, send: Callable[[Sequence[C]], Awaitable[Sequence[R]]], *, size_of: Callable[[C], int], most: int
    ) -> None:
        """`send`: makes the calls, and returns a result for each. `most`: sum of the sizes of a batch; a larger call goes alone."""
        self._send, self._size_of, self._most = send, size_of, most
        self._waiting: deque[tuple[C, asyncio.Future[R]]] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def run(self, call: C) -> R:
        """The result of a call. Raises what `send` raises."""
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, result))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_waiting(), name="batches")
        return await result

    async def close(self) -> None:
        """Cancels what is under way and what waits."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)

    async def _send_waiting(self) -> None:
        """Consumes the waiting calls; waits for each batch's results; unblocked by `send`; produces the callers' results."""
        while batch := self._take():
            try:
                results = await self._send([call for call, _ in batch])
            except Exception as error:  # noqa: BLE001  raised at each caller, whatever it is
                for _, waiting in batch:
                    if not waiting.done():
                        waiting.set_exception(error)
            except BaseException:
                for _, waiting in (*batch, *self._waiting):
                    waiting.cancel()
                raise
            else:
                for (_, waiting), result in zip(batch, results, strict=True):
                    if not waiting.done():
                        waiting.set_result(result)

    def _take(self) -> list[tuple[C, asyncio.Future[R]]]:
        """The next batch, without those whose caller was cancelled; empty when nothing waits."""
        batch: list[tuple[C, asyncio.Future[R]]] = []
        left = self._most
        while self._waiting and len(batch) < MAX_CALLS:
            call, result = self._waiting[0]
            if not result.done():
                left -= self._size_of(call)
                if batch and left < 0:
                    break
                batch.append((call, result))
            self._waiting.popleft()
        return batch
