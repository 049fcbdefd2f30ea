"""A cutting proxy: what a bad network does to a client and a server that speak in requests and replies.

Clients reach it over TCP; the server behind it listens on TCP or on a Unix socket.

client ──► request: cut? ──► delay ──► server
client ◄── delay ◄── reply: cut? ◄──── server          frozen: nothing moves, and nobody is told (a half-open connection)

`CutProxy` lives in an event loop; `ProxyThread` gives it a loop of its own, for tests that are not asynchronous.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import unquote, urlsplit

T = TypeVar("T")

BLOCK_BYTES = 64 * 1024

Server = tuple[str, int] | Path
"""Host and port, or the path of a Unix socket."""
Where = Callable[[], Server]
"""Gives the server's address, asked anew for every connection: it may have moved."""

Picks = Callable[[bytes], bool]
"""Whether a fault may strike this request (its first bytes, as the client sent them)."""


def server_of(url: str) -> Server:
    """What a Redis URL names.

    Example: server_of("redis://me@127.0.0.1:6380/0") is ("127.0.0.1", 6380); server_of("unix:///home/redis.sock") is a path.
    """
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "unix" else (str(parts.hostname), parts.port or 6379)


async def dial(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the server.

    Raises:
        OSError: nobody is there.
    """
    if isinstance(server, Path):
        return await asyncio.open_unix_connection(server)
    return await asyncio.open_connection(*server)


def any_request(_request: bytes) -> bool:
    """Every request may be struck."""
    return True


@dataclass(slots=True)
class Faults:
    """What the proxy does to the traffic; may be changed at any time, and holds from the next block on."""

    cut_reply: float = 0.0
    """Share of requests whose reply is lost: the server has done what was asked, and the connection breaks."""
    cut_request: float = 0.0
    """Share of requests that never reach the server: the connection breaks."""
    picks: Picks = any_request
    """Which requests the two shares are of."""
    latency_s: float = 0.0
    """Added to every request, and to every reply."""
    frozen: bool = False
    """Half-open: connections stand, new ones are accepted, and nothing moves in either direction."""


@dataclass(slots=True)
class Counts:
    """What has happened."""

    connections: int = 0
    requests: int = 0
    """Blocks that clients sent; a small request is one block."""
    replies_cut: int = 0
    requests_cut: int = 0


@dataclass(slots=True, eq=False)
class _Pipe:
    """One client's connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    cut_next_reply: bool = False


class CutProxy:
    """Listens on a free loopback port and forwards to a server, with faults.

    Example:
        async with CutProxy(lambda: ("127.0.0.1", 6379), seed=1) as proxy:
            client = connect(f"redis://127.0.0.1:{proxy.port}/0")
            proxy.faults.cut_reply = 0.3
    """

    def __init__(self, server: Where, *, seed: int = 0, port: int = 0) -> None:
        """Does not listen yet; `port` 0 takes a free one."""
        self._where = server
        self._random = random.Random(seed)
        self._listener: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.port = port
        self.faults = Faults()
        self.counts = Counts()

    async def start(self) -> None:
        """Listens from now on."""
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops listening and breaks every connection."""
        if self._listener is not None:
            self._listener.close()
        self.break_all()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def break_all(self) -> None:
        """Breaks every connection there is; new ones are welcome."""
        for pipe in list(self._pipes):
            _break(pipe)

    async def __aenter__(self) -> Self:
        """Listens."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops."""
        await self.stop()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts.connections += 1
        try:
            server_reader, server_writer = await dial(self._where())
        except OSError:
            writer.transport.abort()
            return
        pipe = _Pipe(writer, server_writer)
        self._pipes.add(pipe)
        ways = (self._forward(reader, pipe, self._on_request), self._forward(server_reader, pipe, self._on_reply))
        running = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pipes.discard(pipe)
            _break(pipe)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, pipe: _Pipe, handle: Callable[[_Pipe, bytes], bool]) -> None:
        """Moves blocks one way until either end breaks. Blocks keep their order and their distance in time, however late they are."""
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        target = pipe.server if handle == self._on_request else pipe.client

        async def deliver() -> None:
            while True:
                due, block = await late.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._thaw()
                target.write(block)
                await target.drain()

        delivering = asyncio.create_task(deliver())
        try:
            with contextlib.suppress(OSError):
                while block := await reader.read(BLOCK_BYTES):
                    await self._thaw()
                    if not handle(pipe, block):
                        return
                    late.put_nowait((loop.time() + self.faults.latency_s, block))
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    async def _thaw(self) -> None:
        while self.faults.frozen:
            await asyncio.sleep(0.02)

    def _on_request(self, pipe: _Pipe, block: bytes) -> bool:
        """Decides over a request; False breaks the connection before the server has it."""
        self.counts.requests += 1
        if self.faults.picks(block):
            if self._random.random() < self.faults.cut_request:
                self.counts.requests_cut += 1
                return False
            pipe.cut_next_reply = self._random.random() < self.faults.cut_reply
        return True

    def _on_reply(self, pipe: _Pipe, _block: bytes) -> bool:
        """Decides over a reply; False breaks the connection before the client has it."""
        if pipe.cut_next_reply:
            self.counts.replies_cut += 1
            return False
        return True


class ProxyThread:
    """A `CutProxy` in a thread with an event loop of its own. Faults are set as on the proxy itself."""

    def __init__(self, server: Where, *, seed: int = 0) -> None:
        """Listens when this returns."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.proxy = self._call(_made(server, seed))

    @property
    def url(self) -> str:
        """What a Redis client connects to."""
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    @property
    def faults(self) -> Faults:
        """What the proxy does to the traffic."""
        return self.proxy.faults

    @property
    def counts(self) -> Counts:
        """What has happened."""
        return self.proxy.counts

    def break_all(self) -> None:
        """Breaks every connection there is."""
        self._loop.call_soon_threadsafe(self.proxy.break_all)

    def stop(self) -> None:
        """Stops the proxy and its thread."""
        self._call(self.proxy.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)


async def _made(server: Where, seed: int) -> CutProxy:
    proxy = CutProxy(server, seed=seed)
    await proxy.start()
    return proxy


def _break(pipe: _Pipe) -> None:
    """Ends a connection at once on both sides; what was on its way is lost."""
    pipe.client.transport.abort()
    pipe.server.transport.abort()
