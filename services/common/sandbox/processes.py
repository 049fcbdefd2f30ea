"""Processes of a sandbox, the parent's side: starts the forkserver, requests children from it, and kills it when it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import psutil

from services.common.errors import SandboxError
from services.common.sandbox.forkserver import FORK, KILL, NOT_ENDED, REPLY, REQUEST
from services.common.service.process_tree import is_running, kill_group, process_of
from services.common.service.watchdog import Vitals

log = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 120.0
"""For the imports of all that children need, on a busy machine."""

COMMAND_TIMEOUT_S = 20.0
EXIT_TIME_S = 1.0
"""Longest time from a process's closing of its socket to the moment at which it can be reaped."""
POLL_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 5.0

_CHUNK = 1 << 18
_EXIT_POLL_S = 0.01
_REAP_S = 0.25
"""Longest wait for the reaping of a killed child, which has its turn after other commands."""

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN")
"""Tokens of hubs; only the child that fetches gets them."""
_SERVICE_SETTINGS = ("MILLRACE_", "REDIS_URL", "OTEL_", *HUB_TOKENS)
"""Prefixes of the service's own environment variables, secrets among them; children do not get them."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class Forked:
    """A child, and the socket to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process: then its silence is not its own fault."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    async def receive(self, incoming: msgpack.Unpacker) -> Any:  # noqa: ANN401  MessagePack values
        """The child's next message. A cancelled call loses no data: it stays in the decoder `incoming`.

        Raises:
            EOFError: the child has closed its socket.
            OSError, ValueError, UnpackException: the connection broke, or this is no message.
        """
        while True:
            for message in incoming:
                return message
            data = await self.reader.read(_CHUNK)
            if not data:
                raise EOFError("the child closed its socket")
            incoming.feed(data)


def computed_too_long(status: int | None) -> bool:
    """Whether the wait status shows that the kernel ended the child at its limit of processor time: several threads reach it early."""
    return status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU


class Forkserver:
    """The process that forks children. One command at a time; started by the first `fork`, and again when it has died."""

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
            work: a child's work with its socket, as `package.module:function`.
            prepare: functions (`package.module:function`) that import what children need; called once, before the first fork.
            service: the name under which the processes log.
            log_level: of their logs.
            environment: for the processes, on top of this process's (less the service's own settings, secrets among them).
        """
        self._arguments = [log_level, service, work, *prepare]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SERVICE_SETTINGS)}
        self._environment = {**inherited, **_ONE_THREAD, **(environment or {})}
        self._vitals = Vitals()
        self._lock = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process and waits until it is prepared. Raises SandboxError when that fails (its log contains the reason)."""
        async with self._lock:
            if self._process is None:
                await self._start()

    async def fork(self) -> Forked:
        """A new child; a cancelled call leaves none behind. Raises SandboxError when no child can be started."""
        forking = self._in_background(self._fork())
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            self._in_background(self._discard(forking))
            raise

    async def kill(self, child: Forked, exit_s: float = EXIT_TIME_S) -> int | None:
        """Kills a child and everything it started: at once, even while the forkserver, which must reap it, serves other commands.

        `exit_s`: longest wait for the end of one that has closed its socket. Returns its wait status (as of `os.waitpid`) if it had ended
        by itself before; None when it had not, or the status is unknown.
        """
        return await asyncio.shield(self._in_background(self._kill(child, exit_s)))

    def kill_if_stopped(self) -> None:
        """Kills the process when a signal has stopped it; the next command starts another one. Call it every POLL_INTERVAL_S."""
        if self._process is None or self._process.poll() is not None:
            return
        self._vitals.sample(process_of(self._process.pid))
        if self._vitals.stopped_too_long(POLL_INTERVAL_S):
            log.error("the forkserver (process %d) is stopped: killed, another one takes over", self._process.pid)
            self._process.kill()

    async def stop(self) -> None:
        """Ends the process and all children."""
        async with self._lock:
            await self._stop()

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that survives its caller's cancellation: an unread reply would be taken for the next command's."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _fork(self) -> Forked:
        ours, theirs = socket.socketpair()
        try:
            async with self._lock:
                try:
                    pid, _ = await self._command(FORK, 0, theirs)
                except OSError:  # it does not run, or has died, its children with it
                    await self._stop()
                    await self._start()
                    pid, _ = await self._command(FORK, 0, theirs)
        except OSError as error:
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
            await self._kill(await forking, EXIT_TIME_S)

    async def _kill(self, child: Forked, exit_s: float) -> int | None:
        closed = child.reader.at_eof() or child.reader.exception() is not None  # the exception: it ended during a write
        child.writer.transport.abort()  # discards unsent data; an idle child ends by itself
        if self._process is None or self._process.poll() is not None:
            return None  # another process may have its pid by now
        if closed and await _ended(child.pid, exit_s):
            return await self._reap(child.pid)
        kill_group(child.pid)
        reaping = self._in_background(self._reap(child.pid))
        await asyncio.wait({reaping}, timeout=_REAP_S)
        return None

    async def _reap(self, pid: int) -> int | None:
        async with self._lock:
            try:
                _, status = await self._command(KILL, pid)
            except OSError:
                await self._stop()  # the kernel ends the children of a dead forkserver
                return None
        return None if status == NOT_ENDED else status

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
            self._process = subprocess.Popen(  # noqa: ASYNC220  a fork and an exec; it does not wait
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
        except OSError as error:
            await self._stop()
            raise SandboxError(f"the forkserver does not start: {error}") from error

    async def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # makes it kill its children and end
            self._control = None
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # makes the kernel end its children
            await asyncio.to_thread(process.wait)


async def _ended(pid: int, longest_s: float) -> bool:
    """Whether a process that has closed its socket can be reaped in time: an end closes a process's files first."""
    until = time.monotonic() + longest_s
    while running := any(is_running(process) for process in process_of(pid)):
        if time.monotonic() >= until:
            break
        await asyncio.sleep(_EXIT_POLL_S)  # no event tells
    return not running
