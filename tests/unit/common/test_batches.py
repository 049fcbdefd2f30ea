"""Calls that come while one is under way go together; each caller has its own result, and nobody has another's fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.common.batches import MAX_CALLS, Batches

Made = Batches[int, int]


class Server:
    """Answers each call with itself, once it is open."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []
        self.open = asyncio.Event()
        self.fault: Exception | None = None

    async def __call__(self, calls: Sequence[int]) -> list[int]:
        self.sent.append(list(calls))
        await self.open.wait()
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return list(calls)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def made(server: Server) -> Made:
    """Batches of numbers, whose sum is 1,000 at most."""
    return Batches(server, size_of=int, most=1000)


async def start(made: Made, values: Sequence[int]) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(made.run(value)) for value in values]
    await asyncio.sleep(0.01)
    return tasks


async def test_what_comes_while_a_call_is_under_way_goes_together_in_order(server: Server, made: Made) -> None:
    first, rest = await start(made, [0]), await start(made, range(1, 6))
    assert server.sent == [[0]], "a lone call waits for nobody"
    server.open.set()
    assert await asyncio.gather(*first, *rest) == list(range(6))
    assert server.sent == [[0], [1, 2, 3, 4, 5]]


async def test_a_failed_batch_fails_its_callers_and_no_later_ones(server: Server, made: Made) -> None:
    lost, later = await start(made, [1]), await start(made, [2])
    server.fault = ConnectionError("away")
    server.open.set()
    with pytest.raises(ConnectionError, match="away"):
        await lost[0]
    assert await later[0] == 2


async def test_a_caller_that_is_cancelled_is_not_sent_for_and_holds_up_nobody(server: Server, made: Made) -> None:
    under_way, waiting = await start(made, [0]), await start(made, [1, 2])
    waiting[0].cancel()
    under_way[0].cancel()
    server.open.set()
    assert await waiting[1] == 2
    assert server.sent == [[0], [2]]


@pytest.mark.parametrize(
    ("values", "sizes"), [([1] * 300, [128, 128, 44]), ([400] * 5, [2, 2, 1]), ([2000, 1, 2000], [1, 1, 1])]
)
async def test_a_batch_has_so_many_calls_at_most_and_their_sizes_a_bound(
    server: Server, made: Made, values: list[int], sizes: list[int]
) -> None:
    first, rest = await start(made, [0]), await start(made, values)
    server.open.set()
    assert await asyncio.gather(*first, *rest) == [0, *values]
    assert [len(sent) for sent in server.sent[1:]] == sizes
    assert max(sizes) <= MAX_CALLS


async def test_a_sender_that_is_cancelled_cancels_its_callers(made: Made) -> None:
    tasks = [*await start(made, [0]), *await start(made, [1])]
    sender = made._sender
    assert sender is not None
    sender.cancel()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5.0)
    assert [type(each) for each in done] == [asyncio.CancelledError] * 2
