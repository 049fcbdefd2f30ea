"""Publisher of the learner's weights: rank 0 writes a version into a stage in host memory, and a process of its own serves it from there.

rank 0 ── writes ──► file in the stage ──► weights' process: hash, announce, send ── gRPC ──► rollout servers
head   ── its path ──────────────────────►                 ── address, digests, reports ──► head

Rollout servers on this host take the file itself. A step under way in rank 0's interpreter slows no transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from services.common.errors import ConfigError, WeightSyncError
from services.common.weight_sync.staging import Stage
from services.common.weights.snapshot import PolicyVersion
from services.learner.weights.messages import (
    ANSWER,
    BeginTurn,
    Publish,
    Published,
    Refused,
    Reported,
    Serve,
    Serving,
    TurnBegun,
)

T = TypeVar("T")

PROCESS_MODULE = "services.learner.weights.process"
_START_TIMEOUT_S = 120.0
_PUBLISH_TIMEOUT_S = 600.0
"""Hashing takes well below a second per GB."""
_STOP_TIMEOUT_S = 5.0
_MAX_SERVERS = 1024
"""Rollout servers whose reports are kept: their names come from outside."""


class Publisher:
    """Serves one job's policy versions to any number of rollout servers, from `start` to `stop`. Used by one event loop."""

    def __init__(self, stage: Stage) -> None:
        """`stage`: the versions' files; it keeps as many as the weights' process."""
        self._stage = stage
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._serving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._published: asyncio.Future[str] | None = None
        self._turn: asyncio.Future[list[str]] | None = None
        self.fault: WeightSyncError | ConfigError | None = None
        """Why the process has ended."""
        self.address = ""
        """host:port of the gRPC server."""
        self.digest = ""
        """Digest of the version published last (hex); empty before the first."""
        self.reports: dict[str, Reported] = {}
        """The newest report of each rollout server, by its name."""

    async def start(self, serve: Serve) -> Self:
        """Starts the process. Raises ConfigError when the address cannot be served, WeightSyncError when it does not start."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", PROCESS_MODULE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._send(serve.model_dump_json())
        self._reader = asyncio.create_task(self._read(), name="weights")
        self.address = await self._answer(self._serving, _START_TIMEOUT_S, "start")
        return self

    async def publish(self, version: PolicyVersion, write: Callable[[Path], Awaitable[None]]) -> None:
        """Lets `write` make the version's safetensors file, and makes it the current version; returns when it is announced.

        Raises:
            WeightSyncError: the version is not newer than the current one, or the weights' process has ended.
        """
        self.check()
        part = self._stage.part(*version)
        try:
            await write(part)
            path = self._stage.admit(part)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self._published = asyncio.get_running_loop().create_future()
        self._send(Publish(version=version, path=str(path)).model_dump_json())
        self.digest = await self._answer(self._published, _PUBLISH_TIMEOUT_S, f"publish version {version}")

    async def begin_turn(self, limit_s: float) -> list[str]:
        """Begins the learner's turn on shared devices, which the next `publish` ends; returns who samples still after `limit_s` seconds.

        Raises:
            WeightSyncError: the weights' process has ended.
        """
        self.check()
        self._turn = asyncio.get_running_loop().create_future()
        self._send(BeginTurn(limit_s=limit_s).model_dump_json())
        return await self._answer(self._turn, limit_s + _STOP_TIMEOUT_S, "begin a turn")

    def check(self) -> None:
        """Raises the error of the weights' process when it has ended."""
        if self.fault is not None:
            raise self.fault

    async def stop(self) -> None:
        """Ends the process, and removes the files; once."""
        process, reader = self._process, self._reader
        self._process = self._reader = None
        if process is not None and process.stdin is not None and reader is not None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            if process.returncode is None:
                process.kill()
                await process.wait()
            await reader
        self._stage.close()

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(line.encode() + b"\n")

    async def _answer(self, answer: asyncio.Future[T], timeout_s: float, what: str) -> T:
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise WeightSyncError(f"the weights' process did not {what} within {timeout_s:.0f} s") from error

    async def _read(self) -> None:
        """Takes the process's lines until it ends."""
        fault: WeightSyncError | ConfigError = WeightSyncError("the weights' process ended")
        try:
            while self._process is not None and self._process.stdout is not None:
                line = await self._process.stdout.readline()
                if not line:
                    break
                answer = ANSWER.validate_json(line)
                if isinstance(answer, Refused):
                    fault = WeightSyncError(answer.error) if self._serving.done() else ConfigError(answer.error)
                else:
                    self._take(answer)
        finally:
            self.fault = fault
            waits: list[asyncio.Future[Any] | None] = [self._serving, self._published, self._turn]
            for waiting in waits:
                if waiting is not None and not waiting.done():
                    waiting.set_exception(fault)

    def _take(self, answer: Serving | Published | TurnBegun | Reported) -> None:
        match answer:
            case Serving(address=address):
                self._serving.set_result(address)
            case Published(digest=digest):
                if self._published is not None and not self._published.done():
                    self._published.set_result(digest)
            case TurnBegun(missing=missing):
                if self._turn is not None and not self._turn.done():
                    self._turn.set_result(missing)
            case Reported() as report:
                self._keep(report)

    def _keep(self, report: Reported) -> None:
        self.reports.pop(report.server, None)
        self.reports[report.server] = report
        if len(self.reports) > _MAX_SERVERS:
            del self.reports[next(iter(self.reports))]
