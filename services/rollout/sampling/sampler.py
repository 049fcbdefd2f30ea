"""Sampler: from a task to its group, `group_size` rollouts at once, within the task's time. A failure is data, not a crash.

All rollouts of a group begin together, so that one deadline holds for each of them. At the deadline the finished rollouts are the group if
they are enough (`min_group_size`); the others are aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from services.common.environments.types import EnvironmentFailed, Worlds
from services.common.errors import PromptError
from services.common.streams.types import TOKEN_DTYPE, Rollout, RolloutGroup, Task
from services.rollout import metrics
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import SamplingError
from services.rollout.sampling.builder import RolloutBuilder
from services.rollout.sampling.completions import Completions, Rollouts
from services.rollout.sampling.episodes import Episodes
from services.rollout.sampling.openings import Openings

_MANY = 1 << 30


class Sampler:
    """Samples groups, any number at once, of which the engine has at most `places`; the others are encoded, or decoded, meanwhile."""

    def __init__(self, engine: Engine, server: str, places: int = _MANY, worlds: Worlds | None = None) -> None:
        """`server`: this rollout server's name, for the groups. `worlds`: the environments, of tasks that have one."""
        self._engine, self._server, self._places = engine, server, asyncio.Semaphore(places)
        self._openings = None if worlds is None else Openings(worlds)

    @property
    def trouble(self) -> str:
        """What a group waits for before it can be sampled; empty while none does."""
        return "" if self._openings is None else self._openings.trouble

    async def sample(self, task: Task) -> RolloutGroup:
        """The task's group; with `failure` and no rollouts when it could not be sampled in time, or at all."""
        started = time.monotonic()
        prompt: list[int] = []
        try:
            async with self._rollouts(task) as rollouts:
                prompt = await rollouts.begin()
                async with self._places:
                    started = time.monotonic()
                    builders = await _within_limit(rollouts, task)
                    seconds = time.monotonic() - started
            built = await self._decode(builders)
        except (PromptError, SamplingError, EnvironmentFailed) as error:
            seconds = time.monotonic() - started
            permanent = isinstance(error, PromptError) or (isinstance(error, EnvironmentFailed) and error.permanent)
            return self.failed(task, str(error), seconds, prompt, permanent=permanent)
        metrics.GENERATE_SECONDS.observe(seconds)
        return RolloutGroup(task, self._server, _bytes_of(prompt), tuple(built), seconds)

    def failed(
        self, task: Task, failure: str, seconds: float = 0.0, prompt: Sequence[int] = (), *, permanent: bool = False
    ) -> RolloutGroup:
        """A group without rollouts, with the reason, after so many seconds. `permanent`: a retry would fail too."""
        return RolloutGroup(task, self._server, _bytes_of(prompt), (), seconds, failure, permanent)

    def _rollouts(self, task: Task) -> Rollouts:
        if task.group_size < 1 or task.max_tokens < 1:
            raise PromptError(f"nothing to sample: group_size {task.group_size}, max_tokens {task.max_tokens}")
        if task.environment is None:
            return Completions(self._engine, task)
        if self._openings is None:
            raise PromptError(f"this server has no environments, and the task is of {task.environment.name}")
        return Episodes(self._engine, self._openings, task, task.environment)

    async def _decode(self, builders: Sequence[RolloutBuilder]) -> list[Rollout]:
        texts = await self._engine.decode([builder.token_ids for builder in builders])
        rollouts = [builder.build(text) for builder, text in zip(builders, texts, strict=True)]
        metrics.ROLLOUTS.inc(len(rollouts))
        return rollouts


async def _within_limit(rollouts: Rollouts, task: Task) -> list[RolloutBuilder]:
    """Samples; all rollouts, or at the deadline those that are whole. Raises SamplingError if they are too few for a group."""
    limit_s = task.timeout_s if task.rollout_timeout_s is None else min(task.timeout_s, task.rollout_timeout_s)
    within = ""
    try:
        async with asyncio.timeout(limit_s):
            await rollouts.sample()
    except TimeoutError:
        within = f" within {limit_s:g} s"
    whole = rollouts.whole
    needed = task.group_size if task.min_group_size is None else task.min_group_size
    if len(whole) < needed:
        why = f"; {rollouts.failure}" if rollouts.failure else ""
        raise SamplingError(
            f"{len(whole)} of {task.group_size} rollouts were sampled{within}; the group needs {needed}{why}"
        )
    return whole


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, TOKEN_DTYPE).tobytes()
