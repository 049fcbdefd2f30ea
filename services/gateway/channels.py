"""Connections to rollout servers, kept from one chat to the next."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc.aio

from services.common.inference_channel import INFERENCE_CLIENT_OPTIONS

MAX_CHANNELS = 64
GRACE_S = 600.0
"""Answers on a channel that is put away end by themselves within this."""


class Channels:
    """One channel per address, the least used put away when there are many: servers come and go, each on a port of its own."""

    def __init__(self, max_channels: int = MAX_CHANNELS) -> None:
        """None yet."""
        self._max_channels = max_channels
        self._open: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`."""
        if address not in self._open:
            self._open[address] = grpc.aio.insecure_channel(address, options=INFERENCE_CLIENT_OPTIONS)
        self._open.move_to_end(address)
        while len(self._open) > self._max_channels:
            _, oldest = self._open.popitem(last=False)
            task = asyncio.create_task(oldest.close(GRACE_S), name="close channel")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._open[address]

    async def close(self) -> None:
        """Ends all connections at once."""
        channels, self._open = list(self._open.values()), OrderedDict()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing, return_exceptions=True)
