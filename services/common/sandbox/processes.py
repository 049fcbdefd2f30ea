"""Processes of the sandbox as their parent has them: the forkserver is started, asked for children, and killed when it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from services.common.errors import SandboxError
from services.common.sandbox.forkserver import FORK, KILL, NOT_ENDED, REPLY, REQUEST
from services.common.service.process_tree import kill_group, process_of
from services.common.service.watchdog import Vitals

log = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 120.0
"""Imports of all that children need, on a busy machine."""

COMMAND_TIMEOUT_S = 20.0
ENDING_S = 0.05
"""From the moment at which a process that ends has closed its socket to the one at which it can be reaped."""
LOOK_S = 1.0
STOP_TIMEOUT_S = 5.0

_OURS_ALONE = ("MILLRACE_", "REDIS_URL")
"""Settings of the service, secrets among them, that children have no business with."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A child, and the socket to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process, so that its silence is not its own doing."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def close(self) -> None:
        """Closes the socket, whatever it still holds; a child that is not busy ends by itself."""
        self.writer.transport.abort()


def computed_too_long(status: int | None) -> bool:
    """Whether a child, by its wait status, was ended by the kernel for the processor time of a request: in several threads, say."""
    return status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU


class Forkserver:
    """The process that forks children. One command at a time; started again when it has died."""

    def __init__(
        self,
        work: str,
        *,
        prepare: Sequence[str] = (),
        service: str,
        log_level: str = "INFO",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            work: what a child does with its socket, as `package.module:function`.
            prepare: functions that are called once, before any child is forked.
            service: the name under which the processes log.
            log_level: of their logs.
            environment: for the processes, on top of this process's (less the service's own settings).
        """
        self._arguments = [log_level, service, work, *prepare]
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_OURS_ALONE)},
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
        }
        self._vitals = Vitals()
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process and waits until it is prepared.

        Raises:
            SandboxError: it did not start (its log says why).
        """
        async with self._lock:
            if self._process is None:
                await self._start()

    async def fork(self) -> Forked:
        """A fresh child; starts the process first where it does not run. A call that is cancelled leaves no child behind.

        Raises:
            SandboxError: there is none to be had.
        """
        forking = self._begin(self._fork())
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            self._begin(self._discard(forking))
            raise

    async def kill(self, child: Forked) -> int | None:
        """Ends a child and everything it started: at once, though the forkserver, which must reap it, may be busy with others.

        Returns how it had ended by itself before, as `os.waitpid` has it; None when it had not, or nobody knows.
        """
        return await asyncio.shield(self._begin(self._kill(child)))

    def look(self) -> None:
        """Kills the process when it hangs: a signal has stopped it. The next command starts another one; call it every LOOK_S."""
        if self._process is None or self._process.poll() is not None:
            return
        self._vitals.look(process_of(self._process.pid))
        if self._vitals.stopped_too_long(LOOK_S):
            log.error("the forkserver (process %d) is stopped: killed, another one takes over", self._process.pid)
            self._process.kill()

    async def stop(self) -> None:
        """Ends the process and all children."""
        async with self._lock:
            await self._stop()

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that goes on to its end when its caller is cancelled: a reply that nobody reads would be taken for the next command's."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _fork(self) -> Forked:
        ours, theirs = socket.socketpair()
        try:
            async with self._lock:
                try:
                    pid, _ = await self._command(FORK, 0, theirs)
                except (OSError, TimeoutError):  # it does not run, or has died, its children with it
                    await self._stop()
                    await self._start()
                    pid, _ = await self._command(FORK, 0, theirs)
        except (OSError, TimeoutError) as error:
            ours.close()
            raise SandboxError(f"no child process can be forked: {error}") from error
        except SandboxError:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return Forked(pid, reader, writer)

    async def _discard(self, forking: asyncio.Task[Forked]) -> None:
        with contextlib.suppress(SandboxError):
            await self._kill(await forking)

    async def _kill(self, child: Forked) -> int | None:
        by_itself = child.reader.at_eof() or child.reader.exception() is not None  # gone while it was written to
        child.close()
        if self._process is None or self._process.poll() is not None:
            return None  # others may have its number by now
        if by_itself:
            await asyncio.sleep(ENDING_S)
        else:
            kill_group(child.pid)
        async with self._lock:
            try:
                _, status = await self._command(KILL, child.pid)
            except (OSError, TimeoutError):
                await self._stop()  # the kernel ends the children of a dead forkserver
                return None
        return status if by_itself and status != NOT_ENDED else None

    async def _command(self, command: bytes, pid: int, passed: socket.socket | None = None) -> tuple[int, int]:
        if self._control is None:
            raise ConnectionResetError("the forkserver is not running")
        descriptors = [passed.fileno()] if passed is not None else []
        socket.send_fds(self._control, [REQUEST.pack(command, pid)], descriptors)
        return await self._reply(self._control, COMMAND_TIMEOUT_S)

    @staticmethod
    async def _reply(control: socket.socket, timeout_s: float) -> tuple[int, int]:
        async with asyncio.timeout(timeout_s):
            data = await asyncio.get_running_loop().sock_recv(control, REPLY.size)
        if len(data) != REPLY.size:
            raise ConnectionResetError("the forkserver died")
        pid, status = REPLY.unpack(data)
        return int(pid), int(status)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220  a fork and an exec; nothing is waited for
                [sys.executable, "-m", "services.common.sandbox.forkserver", str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the service, which then drains
            )
        ours.setblocking(False)
        self._control = ours
        try:
            await self._reply(ours, START_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            await self._stop()
            raise SandboxError(f"the forkserver does not start: {error}") from error

    async def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # at which it kills its children and ends
            self._control = None
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # at which the kernel ends its children
            await asyncio.to_thread(process.wait)
