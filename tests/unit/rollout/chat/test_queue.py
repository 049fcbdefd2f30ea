from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from services.common.config.inference import RefusalReason
from services.common.errors import MillraceError
from services.rollout.chat.queue import ChatQueue
from services.rollout.engine.types import ChatPiece, ChatRefused
from services.rollout.engine.update import EngineError


class Source:
    """Pieces as an engine would give them, and whether it was closed."""

    def __init__(self, count: int, *, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.given = 0
        self.closed = False

    async def pieces(self) -> AsyncGenerator[ChatPiece, None]:
        try:
            while self.given < self.count:
                await asyncio.sleep(0)
                self.given += 1
                yield ChatPiece("x", 1, 7, None)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def take_place(queue: ChatQueue, done: asyncio.Event) -> None:
    async with queue.place():
        await done.wait()


async def test_no_more_than_its_places_are_taken_and_waiting_is_bounded_in_time() -> None:
    queue, done = ChatQueue(2, queue_s=0.05), asyncio.Event()
    holders = [asyncio.create_task(take_place(queue, done)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ChatRefused, match=r"for 0\.05 s") as refused:
        async with queue.place():
            pytest.fail("a third place")
    assert refused.value.reason is RefusalReason.BUSY
    done.set()
    await asyncio.gather(*holders)
    async with queue.place():
        pass


async def test_who_waits_gets_the_place_that_becomes_free() -> None:
    queue, done = ChatQueue(1, queue_s=5), asyncio.Event()
    holder = asyncio.create_task(take_place(queue, done))
    await asyncio.sleep(0)
    waiter = asyncio.create_task(take_place(queue, done))
    await asyncio.sleep(0.01)
    assert not waiter.done()
    done.set()
    await asyncio.wait_for(asyncio.gather(holder, waiter), 1)


async def test_the_queue_is_bounded_in_length() -> None:
    queue, done = ChatQueue(1, queue_s=5, max_waiting=1), asyncio.Event()
    holding = [asyncio.create_task(take_place(queue, done)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(ChatRefused, match="wait already"):
        async with queue.place():
            pytest.fail("past the queue")
    done.set()
    await asyncio.gather(*holding)


async def test_answers_begin_at_the_pace_that_training_is_owed() -> None:
    queue = ChatQueue(4, queue_s=5)
    queue.pace_s = 0.05
    begun: list[float] = []
    started = time.monotonic()

    async def begin() -> None:
        async with queue.place():
            begun.append(time.monotonic())

    await asyncio.gather(*(begin() for _ in range(5)))
    # An answer may begin late, and the next one then begins at its own time: each is compared with the pace from the start on.
    assert all(at - started >= k * queue.pace_s for k, at in enumerate(sorted(begun)))
    queue.pace_s = 0.0
    await asyncio.gather(*(begin() for _ in range(30)))
    assert begun[-1] - begun[5] < 0.5, "without training there is no pace"


async def test_a_pace_beyond_the_queues_time_is_said_to_be_busy() -> None:
    queue = ChatQueue(4, queue_s=0.05)
    queue.pace_s = 1.0
    async with queue.place():
        pass
    with pytest.raises(ChatRefused) as refused:
        async with queue.place():
            pytest.fail("a second answer within the pace")
    assert refused.value.reason is RefusalReason.BUSY


async def test_a_cancelled_wait_leaves_the_places_as_they_were() -> None:
    queue, done = ChatQueue(1, queue_s=5), asyncio.Event()
    holder = asyncio.create_task(take_place(queue, done))
    await asyncio.sleep(0)
    waiter = asyncio.create_task(take_place(queue, done))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    done.set()
    await holder
    async with asyncio.timeout(1), queue.place():
        pass


async def test_a_slow_reader_does_not_hold_the_engine_back() -> None:
    queue, source = ChatQueue(1), Source(50)
    pieces = queue.through(source.pieces())
    await anext(pieces)
    for _ in range(200):
        await asyncio.sleep(0)
    assert source.given == 50
    assert len([piece async for piece in pieces]) == 49
    assert queue.chats == 0


async def test_closing_the_reader_aborts_the_request() -> None:
    queue, source = ChatQueue(1), Source(10**9)
    pieces = queue.through(source.pieces())
    await anext(pieces)
    await pieces.aclose()
    assert source.closed
    assert queue.chats == 0


async def test_clearing_the_queue_aborts_everything_before_it_returns() -> None:
    queue, sources = ChatQueue(2), [Source(10**9), Source(10**9)]
    streams = [queue.through(source.pieces()) for source in sources]
    for stream in streams:
        await anext(stream)
    await queue.clear("training takes over")
    assert all(source.closed for source in sources)
    assert queue.chats == 0
    for stream in streams:
        with pytest.raises(ChatRefused, match="training takes over") as refused:
            [piece async for piece in stream]
        assert refused.value.reason is RefusalReason.ABORTED


async def test_an_error_that_nobody_foresaw_ends_the_answer() -> None:
    stream = ChatQueue(1).through(Source(1, error=ValueError("odd")).pieces())
    assert await anext(stream)
    with pytest.raises(MillraceError, match="odd"):
        await anext(stream)


async def test_what_the_engine_raises_reaches_the_reader() -> None:
    queue = ChatQueue(1)
    stream = queue.through(Source(2, error=EngineError("it died")).pieces())
    assert await anext(stream)
    assert await anext(stream)
    with pytest.raises(EngineError, match="it died"):
        await anext(stream)
