"""Turns on shared devices: the learner begins when every server that watches samples nothing, and what ends a turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from services.common.weight_sync.server import WeightServer
from services.common.weights.snapshot import PolicyVersion, Snapshot
from services.rollout.weights.client import Announced, WeightReceiver

Receive = Callable[..., WeightReceiver]


def tiny(n: int) -> Snapshot:
    return Snapshot.build(1, n, {"w": ("float32", (2,), np.full(8, n, np.uint8))})


async def test_a_turn_begins_when_every_watching_server_has_yielded_and_ends_with_the_next_version(
    publisher: WeightServer, receive: Receive
) -> None:
    publisher.publish(tiny(1))
    receivers = [receive(publisher.address, name) for name in ("r0", "r1")]
    heard = [receiver.watch() for receiver in receivers]
    async with asyncio.timeout(20):
        for news in heard:
            assert await anext(news) == Announced(PolicyVersion(1, 1))
        turn = asyncio.create_task(asyncio.to_thread(publisher.begin_turn, 10.0))
        for news, receiver in zip(heard, receivers, strict=True):
            assert await anext(news) == Announced(PolicyVersion(1, 1), learner_computes=True)
            assert not turn.done(), "it begins before a server has said that it samples nothing"
            await asyncio.to_thread(receiver.report_yielded, PolicyVersion(1, 1))
        assert await turn == []
        publisher.publish(tiny(2))
        for news in heard:
            assert await anext(news) == Announced(PolicyVersion(1, 2))


async def test_a_server_that_samples_on_is_named_at_the_limit(publisher: WeightServer, receive: Receive) -> None:
    publisher.publish(tiny(1))
    heard = receive(publisher.address, "slow").watch()
    async with asyncio.timeout(20):
        await anext(heard)
        began = time.monotonic()
        assert await asyncio.to_thread(publisher.begin_turn, 0.3) == ["slow"]
        assert 0.3 <= time.monotonic() - began < 2.0


async def test_a_server_that_leaves_is_not_waited_for(publisher: WeightServer, receive: Receive) -> None:
    publisher.publish(tiny(1))
    receiver = receive(publisher.address, "dying")
    heard = receiver.watch()
    async with asyncio.timeout(20):
        await anext(heard)
        turn = asyncio.create_task(asyncio.to_thread(publisher.begin_turn, 15.0))
        await anext(heard)
        receiver.close()
        assert await turn == []


async def test_a_server_that_comes_in_a_turn_hears_of_it_at_once(publisher: WeightServer, receive: Receive) -> None:
    publisher.publish(tiny(1))
    assert await asyncio.to_thread(publisher.begin_turn, 1.0) == []
    async with asyncio.timeout(10):
        assert await anext(receive(publisher.address).watch()) == Announced(PolicyVersion(1, 1), learner_computes=True)


async def test_a_turn_ends_with_the_learner(publisher: WeightServer, receive: Receive) -> None:
    publisher.publish(tiny(1))
    heard = receive(publisher.address).watch()
    async with asyncio.timeout(20):
        await anext(heard)
        begun = asyncio.create_task(asyncio.to_thread(publisher.begin_turn, 5.0))
        assert (await anext(heard)).learner_computes
        await asyncio.to_thread(publisher.stop, 0.2)
        assert await anext(heard) == Announced(PolicyVersion(1, 1), learner_computes=False)
        await begun
