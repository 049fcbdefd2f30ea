"""Process of a reward model, the parent's side: started and loaded, asked, replaced when it was lost, ended.

open ──► loading ──► ready ── ask ──► answer
           ▲ │ fails     └── limit passed, killed, error ──► ended ──► loading
           └─┘ after a pause
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import Any

import psutil

from services.common.config.settings import Platform, Settings
from services.common.errors import ConfigError, MillraceError, SandboxError
from services.common.sandbox.limits import MIB, Limits
from services.common.sandbox.pool import Child, Sandbox
from services.common.service.process_tree import process_of
from services.common.spec.scorers import RewardModelSpec
from services.reward import metrics

log = logging.getLogger(__name__)

PREPARE = "services.reward.reward_model.classifier:prepare"
TARGET = "services.reward.reward_model.classifier:Classifier"
ATTEMPTS = 2
"""Most processes that are asked the same."""
RELOAD_PAUSE_S = 10.0
"""For so long after a load that failed, requests fail at once with its reason."""
MAX_REPLY_BYTES = 256 * MIB
"""The rows of a group: its prompt is in each."""
NO_LIMIT_MIB = 1 << 30
"""Drivers of accelerators reserve far more addresses than they have memory."""


class ModelProcess:
    """One model's process. Requests wait until it is loaded, and for each other."""

    def __init__(
        self, spec: RewardModelSpec, settings: Settings, sandbox: Sandbox, *, of: int = 1, target: str = TARGET
    ) -> None:
        """`of`: the job's reward models, which share the memory that it may take; `target`: what is made, as `package.module:class`."""
        self._spec, self._sandbox, self._target = spec, sandbox, target
        self._platform = settings.reward_model_platform or settings.platform
        self._threads = settings.reward_model_threads or max(1, (os.cpu_count() or 1) // 2)
        self._arguments = spec.model_dump_json(), settings.public(), self._platform.value, self._threads
        self._limits = Limits(
            wall_s=spec.load_timeout_s,
            memory_mib=_memory_mib(settings, self._platform) // of,
            reply_bytes=MAX_REPLY_BYTES,
            threads=self._threads,
        )
        self._turn = asyncio.Lock()
        self._child: Child | None = None
        self._opening: asyncio.Task[None] | None = None
        self._failure, self._failed_at = "", 0.0
        self.loading = False
        """Whether the model is being loaded."""

    def open(self) -> None:
        """Begins to load the model. A failure is raised by the first requests."""
        self._opening = asyncio.create_task(self._open(), name="reward model")

    async def close(self) -> None:
        """Ends the process."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._child is not None:
            await self._child.close()

    @property
    def resident_bytes(self) -> int:
        """Memory that the process takes now."""
        if self._child is None or not self._child.alive:
            return 0
        try:
            return sum(int(process.memory_info().rss) for process in process_of(self._child.pid))
        except psutil.Error:
            return 0

    async def ask(self, method: str, *arguments: object, limit_s: float) -> Any:  # noqa: ANN401  MessagePack values
        """The value of a method, within `limit_s` of a process; where the first is lost or fails, of a second one.

        Raises:
            SandboxError: both failed, or the model cannot be loaded; the message has the reason.
        """
        for attempt in range(1, ATTEMPTS + 1):
            async with self._turn:  # a request that waits does not lose the process that another one ends
                child = await self._loaded()
                try:
                    return await child.request(method, *arguments, wall_s=limit_s)
                except MillraceError as error:
                    await child.close()  # whatever state it is in: also a device may be left unusable
                    if attempt == ATTEMPTS:
                        raise SandboxError(f"the reward model's process {error}") from error
                    log.warning("the reward model's process %s; another one is started", error)
        raise AssertionError

    async def _open(self) -> None:
        with contextlib.suppress(SandboxError):
            async with self._turn:
                await self._loaded()

    async def _loaded(self) -> Child:
        """The process, once the model is loaded; the caller has the turn. Raises as `ask`."""
        if self._child is not None and self._child.alive:
            return self._child
        if self._failure and time.monotonic() < self._failed_at + RELOAD_PAUSE_S:
            raise SandboxError(self._failure)
        self.loading = True
        try:
            self._child = await self._load()
        finally:
            self.loading = False
        return self._child

    async def _load(self) -> Child:
        began = time.monotonic()
        try:
            child = await self._sandbox.spawn(self._target, *self._arguments, limits=self._limits)
        except (SandboxError, ConfigError) as error:
            self._failure, self._failed_at = (
                f"the reward model {self._spec.path} was not loaded: {error}",
                time.monotonic(),
            )
            log.warning("%s", self._failure)
            metrics.MODEL_STARTS.labels("failed").inc()
            raise SandboxError(self._failure) from error
        self._failure = ""
        metrics.MODEL_STARTS.labels("loaded").inc()
        log.info("reward model %s is loaded, after %.1f s", self._spec.path, time.monotonic() - began)
        return child


def _memory_mib(settings: Settings, platform: Platform) -> int:
    """Address space of a job's reward models: what the operator allows, else half of this machine's memory."""
    if platform is not Platform.CPU:
        return NO_LIMIT_MIB
    if settings.reward_model_memory_gib is not None:
        return int(settings.reward_model_memory_gib * 1024)
    return psutil.virtual_memory().total // 2 // MIB
