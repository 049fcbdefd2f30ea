"""Scripts that come while a reply is under way travel together; each caller has its own reply, and nobody waits for another's fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.common.redis import batches
from services.common.redis.batches import Arguments, ScriptBatches

A_MIB = b"x" * 1024**2


class Server:
    """Answers a command with its last argument, once it is let; an argument that is an error is the answer of that one."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []
        self.open = asyncio.Event()
        self.fault: Exception | None = None

    async def __call__(self, commands: Sequence[Arguments]) -> list[Any]:
        self.sent.append([command[-1] for command in commands])
        await self.open.wait()
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return [command[-1] for command in commands]


@pytest.fixture
def server() -> Server:
    return Server()


async def calls(made: ScriptBatches, values: Sequence[Any]) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(made.run(("EVALSHA", value))) for value in values]
    await asyncio.sleep(0.01)
    return tasks


async def test_what_comes_while_a_reply_is_under_way_goes_together_in_order(server: Server) -> None:
    made = ScriptBatches(server)
    first, rest = await calls(made, [0]), await calls(made, range(1, 6))
    assert server.sent == [[0]], "a lone script waits for nobody"
    server.open.set()
    assert await asyncio.gather(*first, *rest) == list(range(6))
    assert server.sent == [[0], [1, 2, 3, 4, 5]]


async def test_an_error_of_one_script_is_the_reply_of_its_caller_alone(server: Server) -> None:
    made, error = ScriptBatches(server), ValueError("NOSCRIPT")
    server.open.set()
    assert await asyncio.gather(*await calls(made, [1, error, 3])) == [1, error, 3]


async def test_a_failed_batch_fails_its_callers_and_no_later_ones(server: Server) -> None:
    made = ScriptBatches(server)
    lost, later = await calls(made, [1]), await calls(made, [2])
    server.fault = ConnectionError("away")
    server.open.set()
    with pytest.raises(ConnectionError, match="away"):
        await lost[0]
    assert await later[0] == 2


async def test_a_caller_that_is_cancelled_is_not_sent_for_and_holds_up_nobody(server: Server) -> None:
    made = ScriptBatches(server)
    under_way, waiting = await calls(made, [0]), await calls(made, [1, 2])
    waiting[0].cancel()
    under_way[0].cancel()
    server.open.set()
    assert await waiting[1] == 2
    assert server.sent == [[0], [2]]


@pytest.mark.parametrize(
    ("values", "sizes"), [([1] * 300, [128, 128, 44]), ([A_MIB] * 8, [3, 3, 2]), ([A_MIB * 5] * 2, [1, 1])]
)
async def test_a_batch_has_so_many_commands_and_bytes_at_most(
    server: Server, values: list[Any], sizes: list[int]
) -> None:
    made = ScriptBatches(server)
    first, rest = await calls(made, [0]), await calls(made, values)
    server.open.set()
    await asyncio.gather(*first, *rest)
    assert [len(sent) for sent in server.sent[1:]] == sizes
    assert sizes[0] <= batches.MAX_COMMANDS


async def test_a_sender_that_is_cancelled_cancels_its_callers(server: Server) -> None:
    made = ScriptBatches(server)
    tasks = [*await calls(made, [0]), *await calls(made, [1])]
    sender = made._sender
    assert sender is not None
    sender.cancel()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5.0)
    assert [type(each) for each in done] == [asyncio.CancelledError] * 2
