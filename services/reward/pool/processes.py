"""Processes of the pool: messages to one worker, and the outcomes of its checks."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence

import msgpack

from services.common.errors import VerifierError
from services.common.sandbox.limits import NICENESS
from services.common.sandbox.messages import unpacker
from services.common.sandbox.processes import Forked
from services.common.service.process_tree import child_pids
from services.reward.pool.messages import MAX_REPLY_BYTES, Broken, Check, Loaded, Outcome, OverLimit, read_reply

LOAD_TIMEOUT_S = 60.0
"""Import of one installed verifier, on its first check in a worker."""

SLOW_CHECK_S = 0.5
"""A check that takes longer runs at a lower priority: sixteen of them must not delay this process's own deadlines."""

MAX_LEFTOVER_PROCESSES = 8
"""Processes that checks may leave behind in their worker: a verifier may keep a helper or two."""

GRACE_S = 0.1
"""After the limit, one last read for a reply that arrived while this process was busy."""


class WorkerDiedError(VerifierError):
    """The worker's process ended, or sent a message that no worker sends."""


class Worker:
    """One worker process and the socket to it."""

    def __init__(self, forked: Forked) -> None:
        self.forked = forked
        self.judged = 0
        """Checks made so far."""
        self.slow = False
        """Whether a check took so long that the process runs at a lower priority. It cannot rise again: replace the worker."""
        self._incoming = unpacker(MAX_REPLY_BYTES)
        self._lowest: dict[str, float] = {}
        """Lowest reward of each loaded verifier."""

    def send(self, packed: Sequence[bytes]) -> None:
        """Sends packed checks without waiting until they are read: the first of them may block the worker for ever."""
        self.forked.writer.writelines(packed)

    async def outcome(self, check: Check) -> Outcome:
        """The outcome of the next check of the batch. After TimeoutError and WorkerDiedError, kill what is left of the worker."""
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

    def timeout_outcome(self, check: Check) -> Outcome:
        """The outcome of a check whose time is over: beyond its own limit, unless its process is the cause."""
        if self.forked.stopped:
            return Broken("its process was stopped by a signal")
        if check.verifier not in self._lowest:
            return Broken(f"the verifier was not loaded within {LOAD_TIMEOUT_S:g} s")
        return OverLimit(f"no verdict within {check.timeout_s:g} s")

    @property
    def crowded(self) -> bool:
        """Whether checks left so many processes behind that the worker must be replaced; they end with it."""
        return len(child_pids(self.forked.pid)) > MAX_LEFTOVER_PROCESSES

    def lowest_reward(self, verifier: str) -> float:
        """The lowest reward of a loaded verifier."""
        return self._lowest[verifier]

    async def _reply_to(self, check: Check) -> Outcome | Loaded:
        with self._broken_messages():
            for message in self._incoming:  # of a batch, most replies come together
                return read_reply(message)
        slow_s = min(SLOW_CHECK_S, check.timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(slow_s):
                return await self._next()
        self.slow = True
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PGRP, self.forked.pid, niceness)
        return await self._receive(check.timeout_s - slow_s)

    async def _receive(self, timeout_s: float) -> Outcome | Loaded:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._next()
        except TimeoutError:
            async with asyncio.timeout(GRACE_S):
                return await self._next()

    async def _next(self) -> Outcome | Loaded:
        with self._broken_messages():
            return read_reply(await self.forked.receive(self._incoming))

    @staticmethod
    @contextlib.contextmanager
    def _broken_messages() -> Iterator[None]:
        try:
            yield
        except EOFError:
            raise WorkerDiedError("its process died") from None
        except (OSError, ValueError, msgpack.exceptions.UnpackException, VerifierError) as error:
            raise WorkerDiedError(f"its process broke off: {error}") from error
