"""The lower-priority lane: few places, a short queue, a measured pace beside training, and it can be cleared at once.

engine ──► pump ──► box ──► whoever reads the answer
           at the engine's pace: stamps are true however slow the reader is
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from services.common.config.inference import Problem
from services.common.errors import MillraceError
from services.rollout import metrics
from services.rollout.engine.types import ChatPiece, ChatRefused

QUEUE_S = 10.0
"""Longest wait for a place."""
MAX_WAITING = 32
PACE_S = 0.25
"""Beside training, answers begin no closer together than this: each costs the processes around the engine some milliseconds."""

Box = asyncio.Queue[ChatPiece | MillraceError | None]


class ChatLane:
    """The chat requests of one server."""

    def __init__(self, places: int, *, queue_s: float = QUEUE_S, max_waiting: int = MAX_WAITING) -> None:
        """`places`: answers sampled at once."""
        self._places = asyncio.Semaphore(places)
        self._queue_s, self._max_waiting = queue_s, max_waiting
        self._waiting = 0
        self._next_at = 0.0
        self.pace_s = 0.0
        """Seconds from the beginning of one answer to that of the next, at least."""
        self._pumps: dict[asyncio.Task[None], Box] = {}

    @property
    def chats(self) -> int:
        """Answers being sampled."""
        return len(self._pumps)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One place; others wait for it, first come first served.

        Raises:
            ChatRefused: none became free within `queue_s` seconds, or too many wait already.
        """
        if self._places.locked() and self._waiting >= self._max_waiting:
            raise ChatRefused(f"{self._waiting} requests wait already; try again in a moment", Problem.BUSY)
        self._waiting += 1
        until = time.monotonic() + self._queue_s
        try:
            async with asyncio.timeout(self._queue_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise self._busy() from error
        finally:
            self._waiting -= 1
        try:
            await self._turn(until)
            yield
        finally:
            self._places.release()

    async def _turn(self, until: float) -> None:
        """Waits until the pace allows the next answer."""
        now = time.monotonic()
        begin = max(now, self._next_at)
        if begin > until:
            raise self._busy()
        self._next_at = begin + self.pace_s
        await asyncio.sleep(begin - now)

    def _busy(self) -> ChatRefused:
        return ChatRefused(f"every place of this server stayed taken for {self._queue_s:g} s; try again", Problem.BUSY)

    async def through(self, pieces: AsyncGenerator[ChatPiece, None]) -> AsyncGenerator[ChatPiece, None]:
        """The pieces, read from the engine as they come, whatever the pace of the reader. Closing it aborts the request.

        Raises:
            ChatRefused: the lane was cleared.
            MillraceError: the engine died, or did not take the request.
        """
        box: Box = asyncio.Queue()
        pump = asyncio.create_task(_pump(pieces, box), name="chat")
        self._pumps[pump] = box
        metrics.CHAT_IN_FLIGHT.set(len(self._pumps))
        try:
            while (item := await box.get()) is not None:
                if isinstance(item, MillraceError):
                    raise item
                yield item
        finally:
            self._pumps.pop(pump, None)
            metrics.CHAT_IN_FLIGHT.set(len(self._pumps))
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def clear(self, reason: str) -> None:
        """Aborts every answer being sampled; when this returns, the engine has none of them."""
        pumps, self._pumps = self._pumps, {}
        for pump, box in pumps.items():
            pump.cancel()
            box.put_nowait(ChatRefused(reason, Problem.ABORTED))
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(pieces: AsyncGenerator[ChatPiece, None], box: Box) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                box.put_nowait(piece)
    except MillraceError as error:
        box.put_nowait(error)
    except Exception as error:  # noqa: BLE001  whoever reads the box must not wait for ever, whatever it is
        wrapped = MillraceError(f"the engine refused the request: {error}")
        wrapped.__cause__ = error
        box.put_nowait(wrapped)
    else:
        box.put_nowait(None)
