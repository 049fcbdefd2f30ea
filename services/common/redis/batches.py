"""Batches of scripts: those that come while a reply is under way go to Redis together, in one write.

callers ── script ──► waiting ──► one batch at a time ──► each caller its own reply

A lone script is sent at once; under load the batches grow, and with them what one system call and one wake-up carry.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Arguments = tuple[Any, ...]

MAX_COMMANDS = 128
"""Most scripts of one batch."""
MAX_BYTES = 4 * 1024**2
"""Most bytes of their arguments: the replies of a batch come when all of it has been sent."""


class ScriptBatches:
    """Batches of one client."""

    def __init__(self, send: Callable[[Sequence[Arguments]], Awaitable[list[Any]]]) -> None:
        """`send`: sends commands, and returns a reply or an error for each."""
        self._send = send
        self._waiting: deque[tuple[Arguments, asyncio.Future[Any]]] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def run(self, command: Arguments) -> Any:  # noqa: ANN401  the script's own reply, or its error
        """The reply to a command, or the error that Redis answered. Raises what `send` raises."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, reply))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_waiting(), name="script batches")
        return await reply

    async def _send_waiting(self) -> None:
        while self._waiting:
            batch = self._take()
            if not batch:
                continue
            try:
                replies = await self._send([command for command, _ in batch])
            except BaseException as error:
                _settle_all(batch, error)
                if not isinstance(error, Exception):
                    _settle_all(list(self._waiting), error)
                    self._waiting.clear()
                    raise
                continue
            for (_, waiting), reply in zip(batch, replies, strict=True):
                if not waiting.done():
                    waiting.set_result(reply)

    def _take(self) -> list[tuple[Arguments, asyncio.Future[Any]]]:
        """The next batch, without those whose caller was cancelled; at least one, where there is one."""
        batch: list[tuple[Arguments, asyncio.Future[Any]]] = []
        left = MAX_BYTES
        while self._waiting and len(batch) < MAX_COMMANDS:
            command, reply = self._waiting[0]
            size = sum(len(argument) for argument in command if isinstance(argument, bytes | str))
            if batch and size > left:
                break
            self._waiting.popleft()
            if not reply.done():
                batch.append((command, reply))
                left -= size
        return batch


def _settle_all(batch: Sequence[tuple[Arguments, asyncio.Future[Any]]], error: BaseException) -> None:
    for _, reply in batch:
        if reply.done():
            continue
        if isinstance(error, Exception):
            reply.set_exception(error)
        else:
            reply.cancel()
