"""The pool: code of ours that works on what a job brings, in child processes that are killed when they pass their limits.

    service ── call, spawn ──► Sandbox ── fork ──► child: makes one object     (a tokenizer, a data source, a check)
            ◄── value, error ─┘   ▲                  │ request ─► value | error
                                  └── limit passed ──┴─► killed, with everything that it started

What a child raises is raised again here; what it does to its own process is an error of its own, with the reason in words.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgpack

from services.common.errors import ChildDied, ChildLost, ChildTimeout
from services.common.sandbox.limits import CPU_MARGIN_S, Limits
from services.common.sandbox.messages import pack, read_reply, unpacker
from services.common.sandbox.processes import Forked, Forkserver, computed_too_long

_WORK = "services.common.sandbox.server:serve"
_CHUNK = 1 << 18


class Sandbox:
    """Makes children. `async with Sandbox(…) as sandbox: value = await sandbox.call("package.module:function", …)`."""

    def __init__(
        self,
        *,
        prepare: Sequence[str] = (),
        service: str = "sandbox",
        log_level: str = "INFO",
        environment: Mapping[str, str] | None = None,
        at_once: int | None = None,
    ) -> None:
        """Starts nothing yet; the first child starts the forkserver.

        Args:
            prepare: functions (`package.module:function`) that import what children need, called once before any is forked.
            service: the name under which the processes log.
            log_level: of their logs.
            environment: for the processes, on top of this one's (less the service's own settings, secrets among them).
            at_once: most children of `call` at a time; others wait. None: no bound.
        """
        self._forkserver = Forkserver(
            _WORK, prepare=prepare, service=service, log_level=log_level, environment=environment
        )
        self._places = asyncio.Semaphore(at_once) if at_once is not None else None

    async def __aenter__(self) -> Self:
        """Starts nothing yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends all children."""
        await self.stop()

    @property
    def pid(self) -> int | None:
        """The forkserver's process id while it runs."""
        return self._forkserver.pid

    async def start(self) -> None:
        """Starts the forkserver, so that the first child need not wait for its imports.

        Raises:
            SandboxError: it does not start.
        """
        await self._forkserver.start()

    async def stop(self) -> None:
        """Ends the forkserver and all children."""
        await self._forkserver.stop()

    async def call(self, target: str, *arguments: object, limits: Limits) -> Any:  # noqa: ANN401  MessagePack values
        """The value of one call, made in a child of its own, which is gone when this returns.

        A child that was ended from outside (a signal, the forkserver's death) is replaced once.

        Args:
            target: `package.module:function`, a name in this code, never one that a job gives.
            arguments: MessagePack values.
            limits: of the child; `wall_s` counts from when it has a place.

        Raises:
            ChildTimeout: it took too long.
            ChildDied: it needed more memory than it may have, or its process ended.
            SandboxError: it raised something that is no MillraceError, or no child is to be had.
            MillraceError: what it raised.
        """
        if self._places is None:
            return await self._call(target, arguments, limits)
        async with self._places:
            return await self._call(target, arguments, limits)

    async def spawn(self, target: str, *arguments: object, limits: Limits) -> Child:
        """A child that keeps what the target returns and answers requests to its methods. Whoever asked for it closes it.

        Raises:
            MillraceError: as `call`.
        """
        child = Child(self._forkserver, await self._forkserver.fork(), limits)
        try:
            await child.make(target, arguments)
        except BaseException:
            await child.close()
            raise
        return child

    async def _call(self, target: str, arguments: Sequence[object], limits: Limits) -> Any:  # noqa: ANN401
        try:
            return await self._call_once(target, arguments, limits)
        except ChildLost:
            return await self._call_once(target, arguments, limits)

    async def _call_once(self, target: str, arguments: Sequence[object], limits: Limits) -> Any:  # noqa: ANN401
        child = Child(self._forkserver, await self._forkserver.fork(), limits)
        try:
            return await child.make(target, arguments)
        finally:
            await child.close()


class Child:
    """One child process. Made by `Sandbox.spawn`."""

    def __init__(self, forkserver: Forkserver, forked: Forked, limits: Limits) -> None:
        """Has nothing made yet."""
        self._forkserver, self._forked, self._limits = forkserver, forked, limits
        self._incoming = unpacker(limits.reply_bytes)
        self._turn = asyncio.Lock()
        self.alive = True
        """Whether it can be asked; False once it has ended or was closed."""

    async def make(self, target: str, arguments: Sequence[object]) -> Any:  # noqa: ANN401
        """For the sandbox: what the target returns; None when that is an object, which the child keeps."""
        limits = self._limits
        message = [target, list(arguments), limits.memory_mib, limits.makes_way, limits.wall_s]
        return await self._exchange(message, limits.wall_s)

    async def request(self, method: str, *arguments: object, wall_s: float | None = None) -> Any:  # noqa: ANN401
        """The value of a method of what the child keeps. One request at a time: others wait for their turn.

        Args:
            method: its name.
            arguments: MessagePack values.
            wall_s: limit of this request, seconds (default: the child's).

        Raises:
            MillraceError: as `Sandbox.call`. After ChildTimeout, ChildDied and ChildLost the child is gone.
        """
        limit_s = self._limits.wall_s if wall_s is None else wall_s
        async with self._turn:
            if not self.alive:
                raise ChildLost("has lost its process")
            return await self._exchange([method, list(arguments), limit_s], limit_s)

    async def close(self) -> None:
        """Ends the process and everything it started."""
        if self.alive:
            self.alive = False
            await self._forkserver.kill(self._forked)

    async def _exchange(self, message: list[Any], wall_s: float) -> Any:  # noqa: ANN401
        packed = pack(message)
        try:
            async with asyncio.timeout(wall_s):
                self._forked.writer.write(packed)
                reply = await self._next()
        except TimeoutError:
            stopped = self._forked.stopped
            await self.close()
            if stopped:
                raise ChildLost("lost its process: a signal stopped it") from None
            raise ChildTimeout(f"took longer than {wall_s:g} s") from None
        except OSError:
            await self._mourn()
        except (ValueError, msgpack.exceptions.UnpackException) as error:  # a reply of any size is one of these, too
            await self.close()
            raise ChildDied(
                f"answered more than {self._limits.reply_bytes} bytes, or nothing that can be read"
            ) from error
        except asyncio.CancelledError:
            await self.close()  # nobody will read the answer
            raise
        return read_reply(reply)

    async def _next(self) -> Any:  # noqa: ANN401
        while True:
            for message in self._incoming:
                return message
            data = await self._forked.reader.read(_CHUNK)
            if not data:
                raise ConnectionResetError("the child closed its socket")
            self._incoming.feed(data)

    async def _mourn(self) -> None:
        """Raises why the process has ended."""
        self.alive = False
        status = await self._forkserver.kill(self._forked)
        if status is None or not os.WIFSIGNALED(status):
            raise ChildDied("ended its process")
        if computed_too_long(status):
            raise ChildTimeout(f"computed for more than {self._limits.wall_s + CPU_MARGIN_S:g} s")
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            raise ChildLost("lost its process: it was killed")
        limit = self._limits.memory_mib
        raise ChildDied(
            f"ended its process by {signal.Signals(number).name}, perhaps for want of memory (it may have {limit} MiB)"
        )
