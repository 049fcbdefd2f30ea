"""Openings: the environments of a group begin together. Where one is unavailable the group lets go of all and begins again a little later.

The wait costs the group no attempt, and the engine no place; the server's heartbeat says what is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager

from services.common.environments.types import EnvironmentFailed, Observation, Reason, World, Worlds
from services.common.streams.types import Task
from services.rollout import metrics

log = logging.getLogger(__name__)

_PASSING = {Reason.UNAVAILABLE, Reason.NO_PLACE}
"""Others may fail again at once, or for good."""
_SHARE = 0.5
"""Of the task's time: the cause arrives before the learner stops waiting for the attempt."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
"""Each is twice as long as the one before."""
_IN_ENVIRONMENT = metrics.EPISODE_SECONDS.labels(spent="environment")

Begun = list[tuple[World, Observation]]
"""The environments of a group, with what each says first."""


class Openings:
    """The openings of all groups."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._waiting: dict[str, str] = {}
        """By group, what it waits for."""

    @property
    def trouble(self) -> str:
        """What a group waits for now; empty while none does."""
        return next(reversed(self._waiting.values()), "")

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Begun]:
        """The task's environments, as long as the context. Raises EnvironmentFailed when one does not begin."""
        async with AsyncExitStack() as opened:
            yield await self._patiently(task, opened)

    async def _patiently(self, task: Task, opened: AsyncExitStack) -> Begun:
        deadline, pause_s = time.monotonic() + _SHARE * task.timeout_s, _FIRST_PAUSE_S
        try:
            while True:
                try:
                    return await self._begin(task, opened)
                except EnvironmentFailed as failure:
                    if failure.reason not in _PASSING or time.monotonic() + pause_s > deadline:
                        raise
                    self._note(task, failure)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  spreads what groups ask for
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._waiting.pop(task.member, None)

    async def _begin(self, task: Task, opened: AsyncExitStack) -> Begun:
        async with AsyncExitStack() as opening:
            worlds = [await opening.enter_async_context(self._worlds.episode(task)) for _ in range(task.group_size)]
            said = await asyncio.gather(*(answer_of(world.reset()) for world in worlds))
            await opened.enter_async_context(opening.pop_all())
        return list(zip(worlds, said, strict=True))

    def _note(self, task: Task, failure: EnvironmentFailed) -> None:
        if task.member not in self._waiting:
            log.warning("the group begins again later: %s", failure)
        self._waiting[task.member] = str(failure)


async def answer_of(answer: Awaitable[Observation]) -> Observation:
    """An environment's answer, the wait for which is counted."""
    began = time.monotonic()
    try:
        return await answer
    finally:
        _IN_ENVIRONMENT.inc(time.monotonic() - began)
