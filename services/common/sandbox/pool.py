"""Pool of child processes in which our code works on a job's contents; a child that passes its limits is killed.

    service ── call, spawn ──► Sandbox ── fork ──► child: makes one object     (a tokenizer, a data source, a check)
            ◄── value, error ─┘   ▲                  │ request ─► value | error
                                  └── limit passed ──┴─► killed, with everything that it started

An error that a child raises is raised again here; an exit of its process is an error with the reason in words.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

import msgpack

from services.common.errors import ChildDied, ChildLost, ChildTimeout
from services.common.sandbox.limits import CPU_MARGIN_S, Limits
from services.common.sandbox.messages import answers, pack, read_reply, unpacker
from services.common.sandbox.processes import EXIT_TIME_S, Forked, Forkserver, computed_too_long

_EXIT_MARGIN_S = 0.1
"""For the end of a process that began at the end of its request's time."""


class Sandbox:
    """Factory of children. `async with Sandbox(…) as sandbox: value = await sandbox.call("package.module:function", …)`."""

    def __init__(
        self,
        *,
        prepare: Sequence[str] = (),
        service: str = "sandbox",
        log_level: str = "INFO",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """The arguments as in `Forkserver`."""
        self._forkserver = Forkserver(
            "services.common.sandbox.server:serve",
            prepare=prepare,
            service=service,
            log_level=log_level,
            environment=environment,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int | None:
        """The forkserver's process id while it runs."""
        return self._forkserver.pid

    async def start(self) -> None:
        """Starts the forkserver, so that the first child need not wait for its imports. Raises SandboxError when that fails."""
        await self._forkserver.start()

    async def stop(self) -> None:
        """Ends the forkserver and all children."""
        await self._forkserver.stop()

    async def call(self, target: str, *arguments: object, limits: Limits) -> Any:  # noqa: ANN401  MessagePack values
        """The value of one call, in a child of its own that is gone when this returns.

        A child that was ended from outside (a signal, the forkserver's death) is replaced once. `target` is a name in
        this code, `package.module:function`, never one that a job gives; `limits.wall_s` counts from the child's start.

        Raises:
            ChildTimeout: it took too long.
            ChildDied: it needed more memory than allowed, or its process ended.
            SandboxError: it raised an error other than a MillraceError, or no child can be started.
            MillraceError: the error that it raised.
        """
        try:
            return await self._call_once(target, arguments, limits)
        except ChildLost:
            return await self._call_once(target, arguments, limits)

    async def spawn(self, target: str, *arguments: object, limits: Limits) -> Child:
        """A child that keeps the object that `target` returns and serves its methods; the caller closes it. Raises as `call`."""
        child = Child(self._forkserver, await self._forkserver.fork(), limits)
        try:
            await child.make(target, arguments)
        except BaseException:
            await child.close()
            raise
        return child

    async def _call_once(self, target: str, arguments: Sequence[object], limits: Limits) -> Any:  # noqa: ANN401
        child = Child(self._forkserver, await self._forkserver.fork(), limits)
        try:
            return await child.make(target, arguments)
        finally:
            await child.close()


class Child:
    """One child process. Made by `Sandbox.spawn`."""

    def __init__(self, forkserver: Forkserver, forked: Forked, limits: Limits) -> None:
        self._forkserver, self._forked, self._limits = forkserver, forked, limits
        self._incoming = unpacker(limits.reply_bytes)
        self._turn = asyncio.Lock()
        self._sent = 0
        """Messages to the child."""
        self.alive = True
        """Whether it takes requests; False once it has ended or was closed."""

    @property
    def pid(self) -> int:
        """Its process id, which another process may have once it has ended."""
        return self._forked.pid

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self._forked.stopped

    async def make(self, target: str, arguments: Sequence[object]) -> Any:  # noqa: ANN401
        """For the sandbox: the value that `target` returns; None when that is an object, which the child keeps."""
        limits = self._limits
        bounds = [limits.memory_mib, limits.low_priority, limits.file_bytes, limits.wall_s * limits.threads]
        message = [target, list(arguments), *bounds]
        return await self._exchange(message, limits.wall_s)

    async def request(self, method: str, *arguments: object, wall_s: float | None = None) -> Any:  # noqa: ANN401
        """The value of a method of the child's object. One request at a time: others wait for their turn.

        `wall_s` limits this request, seconds (default: as the child). Raises as `Sandbox.call`; after ChildTimeout,
        ChildDied and ChildLost the child is gone.
        """
        limit_s = self._limits.wall_s if wall_s is None else wall_s
        async with self._turn:
            if not self.alive:
                raise ChildLost("has lost its process")
            return await self._exchange([method, list(arguments), limit_s * self._limits.threads], limit_s)

    async def close(self) -> None:
        """Ends the process and everything it started."""
        if self.alive:
            self.alive = False
            await self._forkserver.kill(self._forked)

    async def _exchange(self, message: list[Any], wall_s: float) -> Any:  # noqa: ANN401
        packed, number = pack(message), self._sent
        self._sent += 1
        until = time.monotonic() + wall_s
        try:
            async with asyncio.timeout(wall_s):
                self._forked.writer.write(packed)
                reply = await self._forked.receive(self._incoming)
        except TimeoutError:
            stopped = self._forked.stopped
            await self.close()
            if stopped:
                raise ChildLost("lost its process: a signal stopped it") from None
            raise ChildTimeout(f"took longer than {wall_s:g} s") from None
        except (OSError, EOFError):
            await self._raise_exit_reason(until - time.monotonic())
        except (ValueError, msgpack.exceptions.UnpackException) as error:  # an oversized reply is one of these, too
            await self.close()
            most = self._limits.reply_bytes
            raise ChildDied(f"answered more than {most} bytes, or nothing that can be read") from error
        except asyncio.CancelledError:
            await self.close()  # nobody will read the reply
            raise
        if not answers(reply, number):
            await self.close()  # what it says next would be taken for the answer to another request
            raise ChildDied("answered with something that is no reply")
        return read_reply(reply)

    async def _raise_exit_reason(self, left_s: float) -> NoReturn:
        """`left_s`: of the request's time. A child that only closes its socket is not waited for beyond that."""
        self.alive = False
        status = await self._forkserver.kill(self._forked, min(EXIT_TIME_S, max(0.0, left_s) + _EXIT_MARGIN_S))
        if status is None or not os.WIFSIGNALED(status):
            raise ChildDied("ended its process")
        if computed_too_long(status):
            cpu_s = self._limits.wall_s * self._limits.threads + CPU_MARGIN_S
            raise ChildTimeout(f"computed for more than {cpu_s:g} s")
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            raise ChildLost("lost its process: it was killed")
        name, limit = signal.Signals(number).name, self._limits.memory_mib
        raise ChildDied(f"ended its process by {name}, perhaps for want of memory (it may have {limit} MiB)")
