"""Queue of chat requests: few places, a short wait, a limited pace beside training; all requests can be aborted at once.

engine ──► pump ──► outbox ──► reader of the answer
           at the engine's pace: the stamps are right however slow the reader is
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from services.common.config.inference import RefusalReason
from services.common.errors import MillraceError
from services.rollout import metrics
from services.rollout.engine.types import ChatPiece, ChatRefused

QUEUE_S = 10.0
"""Longest wait for a place."""
MAX_WAITING = 32
PACE_S = 0.25
"""Least time between the starts of two answers beside training: each costs the processes around the engine some milliseconds."""

_Outbox = asyncio.Queue[ChatPiece | MillraceError | None]


class ChatQueue:
    """The chat requests of one server."""

    def __init__(self, places: int, *, queue_s: float = QUEUE_S, max_waiting: int = MAX_WAITING) -> None:
        """`places`: answers sampled at once."""
        self._places = asyncio.Semaphore(places)
        self._queue_s, self._max_waiting, self._waiting = queue_s, max_waiting, 0
        self._next_at = 0.0
        self.pace_s = 0.0
        """Least seconds between the starts of two answers."""
        self._pumps: dict[asyncio.Task[None], _Outbox] = {}

    @property
    def chats(self) -> int:
        """Answers being sampled."""
        return len(self._pumps)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a place, first come first served, and holds it.

        Raises:
            ChatRefused: no place became free within `queue_s` seconds, or too many requests wait already.
        """
        if self._places.locked() and self._waiting >= self._max_waiting:
            raise ChatRefused(f"{self._waiting} requests wait already; try again in a moment", RefusalReason.BUSY)
        busy = f"every place of this server stayed taken for {self._queue_s:g} s; try again"
        self._waiting += 1
        until = time.monotonic() + self._queue_s
        try:
            async with asyncio.timeout(self._queue_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise ChatRefused(busy, RefusalReason.BUSY) from error
        finally:
            self._waiting -= 1
        try:
            now = time.monotonic()
            start = max(now, self._next_at)
            if start > until:
                raise ChatRefused(busy, RefusalReason.BUSY)
            self._next_at = start + self.pace_s
            await asyncio.sleep(start - now)
            yield
        finally:
            self._places.release()

    async def through(self, pieces: AsyncGenerator[ChatPiece, None]) -> AsyncGenerator[ChatPiece, None]:
        """Yields the pieces, which are read from the engine at its own pace. Closing the generator aborts the request.

        Raises:
            ChatRefused: the queue was cleared.
            MillraceError: the engine died, or refused the request.
        """
        outbox: _Outbox = asyncio.Queue()
        pump = asyncio.create_task(_pump(pieces, outbox), name="chat")
        self._pumps[pump] = outbox
        metrics.CHAT_IN_FLIGHT.set(len(self._pumps))
        try:
            while (item := await outbox.get()) is not None:
                if isinstance(item, MillraceError):
                    raise item
                yield item
        finally:
            self._pumps.pop(pump, None)
            metrics.CHAT_IN_FLIGHT.set(len(self._pumps))
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def clear(self, reason: str) -> None:
        """Aborts every answer being sampled; when this returns, the engine has no chat request any more."""
        pumps, self._pumps = self._pumps, {}
        for pump, outbox in pumps.items():
            pump.cancel()
            outbox.put_nowait(ChatRefused(reason, RefusalReason.ABORTED))
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(pieces: AsyncGenerator[ChatPiece, None], outbox: _Outbox) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                outbox.put_nowait(piece)
    except MillraceError as error:
        outbox.put_nowait(error)
    except Exception as error:  # noqa: BLE001  whatever it is, the reader must not wait for ever
        wrapped = MillraceError(f"the engine refused the request: {error}")
        wrapped.__cause__ = error
        outbox.put_nowait(wrapped)
    else:
        outbox.put_nowait(None)
