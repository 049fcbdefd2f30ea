"""Workers as the pool has them: what is said to one, and what becomes of its checks."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence

import msgpack

from services.common.errors import VerifierError
from services.common.sandbox.limits import NICENESS
from services.common.sandbox.processes import Forked
from services.common.service.process_tree import child_pids
from services.reward.pool.messages import (
    MAX_REPLY_BYTES,
    Broken,
    Check,
    Loaded,
    Outcome,
    OverLimit,
    read_reply,
    unpacker,
)

LOAD_TIMEOUT_S = 60.0
"""Import of one installed verifier, on its first check in a worker."""

PROMPT_S = 0.5
"""A check that takes longer makes way for everything else: sixteen of them must not keep this process from its deadlines."""

MAX_LEFT = 8
"""Processes that checks may leave behind in their worker: a verifier may well keep a helper or two."""

GRACE_S = 0.1
"""After the limit one last look for a verdict that had arrived while this process was busy."""


class WorkerDiedError(VerifierError):
    """The worker's process ended, or said something that no worker says."""


class Worker:
    """One worker process and the socket to it."""

    def __init__(self, forked: Forked) -> None:
        """On a process that `Forkserver.fork` gave."""
        self.forked = forked
        self.judged = 0
        """Checks made so far."""
        self.slow = False
        """Whether a check took so long that the process has made way for others. It stays so: to be replaced."""
        self._incoming = unpacker(MAX_REPLY_BYTES)
        self._lowest: dict[str, float] = {}
        """The lowest reward of each verifier that it has loaded."""

    def send(self, packed: Sequence[bytes]) -> None:
        """Hands over packed checks, and does not wait until it has read them: the first of them may keep it from that for ever."""
        self.forked.writer.writelines(packed)

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
        if self.forked.stopped:
            return Broken("its process was stopped by a signal")
        if check.verifier not in self._lowest:
            return Broken(f"the verifier was not loaded within {LOAD_TIMEOUT_S:g} s")
        return OverLimit(f"no verdict within {check.timeout_s:g} s")

    @property
    def crowded(self) -> bool:
        """Whether checks have left so many processes behind that it is to be replaced; they end with it."""
        return len(child_pids(self.forked.pid)) > MAX_LEFT

    def lowest_reward(self, verifier: str) -> float:
        """The lowest reward of a verifier that it has loaded."""
        return self._lowest[verifier]

    async def _reply_to(self, check: Check) -> Outcome | Loaded:
        prompt_s = min(PROMPT_S, check.timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(prompt_s):
                return await self._next()
        self._make_way()
        return await self._receive(check.timeout_s - prompt_s)

    def _make_way(self) -> None:
        self.slow = True
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PGRP, self.forked.pid, niceness)

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
                data = await self.forked.reader.read(1 << 16)
                self._incoming.feed(data)
            except (OSError, ValueError, msgpack.exceptions.UnpackException, VerifierError) as error:
                raise WorkerDiedError(f"its process broke off: {error}") from error
            if not data:
                raise WorkerDiedError("its process died")
