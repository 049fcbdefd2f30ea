"""The pool's side of the nursery and of its workers: start, talk, kill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgpack
import psutil

from services.common.errors import VerifierError
from services.common.vitals import Vitals, process_of
from services.reward.check import MAX_REPLY_BYTES, Broken, Check, Loaded, Outcome, OverLimit, read_reply, unpacker
from services.reward.nursery import FORK, KILL, REPLY, REQUEST, kill_group

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Imports of all verifiers, on a busy machine."""

COMMAND_TIMEOUT_S = 20.0
LOOK_S = 1.0
STOP_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 60.0
"""Import of one installed verifier, on its first check in a worker."""

PROMPT_S = 0.5
"""A check that takes longer makes way for everything else: sixteen of them must not keep this process from its deadlines."""
NICER = 10

GRACE_S = 0.1
"""After the limit one last look for a verdict that had arrived while this process was busy."""

_OURS_ALONE = ("MILLRACE_", "REDIS_URL")
"""Settings of the service, secrets among them, that verifiers have no business with."""


class WorkerDiedError(VerifierError):
    """The worker's process ended, or said something that no worker says."""


class Worker:
    """One worker process and the socket to it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Made by `Nursery.fork`."""
        self.pid = pid
        self.judged = 0
        """Checks made so far."""
        self.slow = False
        """Whether a check took so long that the process has made way for others. It stays so: to be replaced."""
        self._reader = reader
        self._writer = writer
        self._incoming = unpacker(MAX_REPLY_BYTES)
        self._lowest: dict[str, float] = {}
        """The lowest reward of each verifier that it has loaded."""

    def send(self, packed: Sequence[bytes]) -> None:
        """Hands over packed checks, and does not wait until it has read them: the first of them may keep it from that for ever."""
        self._writer.writelines(packed)

    async def outcome(self, check: Check) -> Outcome:
        """What became of the next check of the batch.

        Raises:
            TimeoutError: the check's limit passed; kill the worker.
            WorkerDiedError: it is gone; kill what is left of it.
        """
        if check.verifier not in self._lowest:
            reply = await self._receive(LOAD_TIMEOUT_S)
            if isinstance(reply, Broken):
                return reply
            if not isinstance(reply, Loaded):
                raise WorkerDiedError("its process answered before it had loaded the verifier")
            self._lowest[check.verifier] = reply.lowest_reward
        reply = await self._reply_to(check)
        if isinstance(reply, Loaded):
            raise WorkerDiedError("its process answered out of turn")
        self.judged += 1
        return reply

    def overdue(self, check: Check) -> Outcome:
        """What a check has come to whose time is over: beyond its own limit, unless its process is to blame."""
        if self.stopped:
            return Broken("its process was stopped by a signal")
        if check.verifier not in self._lowest:
            return Broken(f"the verifier was not loaded within {LOAD_TIMEOUT_S:g} s")
        return OverLimit(f"no verdict within {check.timeout_s:g} s")

    def lowest_reward(self, verifier: str) -> float:
        """The lowest reward of a verifier that it has loaded."""
        return self._lowest[verifier]

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process, so that its silence is not the check's doing."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def close(self) -> None:
        """Closes the socket, whatever it still holds; a worker that is not busy ends by itself."""
        self._writer.transport.abort()

    async def _reply_to(self, check: Check) -> Outcome | Loaded:
        prompt_s = min(PROMPT_S, check.timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(prompt_s):
                return await self._next()
        self._make_way()
        return await self._receive(check.timeout_s - prompt_s)

    def _make_way(self) -> None:
        self.slow = True
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICER)
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PGRP, self.pid, niceness)

    async def _receive(self, timeout_s: float) -> Outcome | Loaded:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._next()
        except TimeoutError:
            async with asyncio.timeout(GRACE_S):
                return await self._next()

    async def _next(self) -> Outcome | Loaded:
        """The next message. Cancelling it loses nothing: what was read stays in the decoder."""
        while True:
            try:
                for message in self._incoming:
                    return read_reply(message)
                data = await self._reader.read(1 << 16)
                self._incoming.feed(data)
            except (OSError, ValueError, msgpack.exceptions.UnpackException, VerifierError) as error:
                raise WorkerDiedError(f"its process broke off: {error}") from error
            if not data:
                raise WorkerDiedError("its process died")


class Nursery:
    """The process that forks workers. One command at a time; started again when it has died."""

    def __init__(self, environment: Mapping[str, str] | None = None, *, log_level: str = "INFO") -> None:
        """Starts nothing yet.

        Args:
            environment: for the processes, on top of this process's (less the service's own settings).
            log_level: of the processes' logs.
        """
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_OURS_ALONE)},
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **(environment or {}),
        }
        self._log_level = log_level
        self._vitals = Vitals()
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process and waits until its verifiers are imported.

        Raises:
            VerifierError: it did not start (its log says why).
        """
        async with self._lock:
            if self._process is None:
                await self._start()

    async def fork(self) -> Worker:
        """A fresh worker.

        Raises:
            VerifierError: there is none to be had.
        """
        ours, theirs = socket.socketpair()
        try:
            async with self._lock:
                try:
                    pid = await self._command(FORK, 0, theirs)
                except (OSError, TimeoutError):  # it has died, its workers with it
                    await self._stop()
                    await self._start()
                    pid = await self._command(FORK, 0, theirs)
        except (OSError, TimeoutError) as error:
            ours.close()
            raise VerifierError(f"the verifier nursery forks no worker: {error}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return Worker(pid, reader, writer)

    async def kill(self, worker: Worker) -> None:
        """Ends a worker and everything it started: at once, though the nursery, which must reap it, may be busy with others."""
        worker.close()
        if self._process is not None and self._process.poll() is None:  # else others may have its number
            kill_group(worker.pid)
        async with self._lock:
            try:
                await self._command(KILL, worker.pid)
            except (OSError, TimeoutError):
                await self._stop()  # the kernel ends the workers of a dead nursery

    def look(self) -> None:
        """Kills the process when it hangs: a signal has stopped it. The next command starts another one; call it every LOOK_S."""
        if self._process is None or self._process.poll() is not None:
            return
        self._vitals.look(process_of(self._process.pid))
        if self._vitals.stopped_too_long(LOOK_S):
            log.error("the verifier nursery (process %d) is stopped: killed, another one takes over", self._process.pid)
            self._process.kill()

    async def stop(self) -> None:
        """Ends the process and all workers."""
        async with self._lock:
            await self._stop()

    async def _command(self, command: bytes, pid: int, passed: socket.socket | None = None) -> int:
        if self._control is None:
            raise ConnectionResetError("the nursery is not running")
        descriptors = [passed.fileno()] if passed is not None else []
        socket.send_fds(self._control, [REQUEST.pack(command, pid)], descriptors)
        return await self._reply(self._control, COMMAND_TIMEOUT_S)

    @staticmethod
    async def _reply(control: socket.socket, timeout_s: float) -> int:
        async with asyncio.timeout(timeout_s):
            data = await asyncio.get_running_loop().sock_recv(control, REPLY.size)
        if len(data) != REPLY.size:
            raise ConnectionResetError("the nursery died")
        return int(REPLY.unpack(data)[0])

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220  a fork and an exec; nothing is waited for
                [sys.executable, "-m", "services.reward.nursery", str(theirs.fileno()), self._log_level],
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
            raise VerifierError(f"the verifier nursery does not start: {error}") from error

    async def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # at which it kills its workers and ends
            self._control = None
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # at which the kernel ends its workers
            await asyncio.to_thread(process.wait)
