"""Dispatch of one job's groups: by data_source to a scorer, and from it a verdict per rollout.

group ── data_source ──► name ──► scorer ──► verdicts         a rubric ──► its parts ──► weighted sums
                                    ├─ verifier: the job's pool of processes
                                    ├─ judge: its endpoint
                                    └─ reward model: its process
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Self

from services.common.config.settings import Settings
from services.common.config.verifiers import CODE_IS_OFF, ENVIRONMENT, BuiltIn, choose_verifier
from services.common.errors import ConfigError
from services.common.spec.reward import RewardSpec
from services.common.streams.types import Purpose, RolloutGroup, ScoredGroup, Verdict, VerdictStatus
from services.reward import metrics
from services.reward.pool.pool import Pool
from services.reward.scorers.base import Backend, NamedScorer, Scorer, failed
from services.reward.scorers.outcome import OutcomeScorer
from services.reward.scorers.rubric import Rubric, written_out
from services.reward.scorers.verifiers import VerifierScorer

NO_VERIFIER = "none"
"""Verifier name in a verdict where no verifier could be chosen."""


class Dispatch:
    """A job's scorers, and what stands behind them. `async with` opens and closes it; the pool is the job's own."""

    def __init__(
        self, spec: RewardSpec, pool: Pool, settings: Settings, models: Mapping[str, NamedScorer] = MappingProxyType({})
    ) -> None:
        """`pool`: not yet open, unless its owner opens and closes it and `async with` is left out. `models`: judges and reward models."""
        self._spec, self._pool, self._settings, self._models = spec, pool, settings, models
        self._backends: tuple[Backend, ...] = (pool, *self._models.values())
        self._rubrics = written_out(spec.rubrics)
        self._scorers: dict[str, Scorer] = {}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Opens the pool, then the judges and reward models. Raises SandboxError when the pool cannot start."""
        async with AsyncExitStack() as stack:
            for backend in self._backends:
                await stack.enter_async_context(backend)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends all; checks that still wait fail."""
        await self._open.aclose()

    async def judge(self, group: RolloutGroup) -> ScoredGroup:
        """The group with one verdict per rollout; a group that could not be sampled passes with none.

        Where there is no scorer for the task every verdict is FAILED, with the reason: the group still reaches the learner.
        Raises VerifierError when the pool has failed.
        """
        if group.failure is not None and not group.rollouts:
            return ScoredGroup(group, (), 0.0)
        began, task = time.monotonic(), group.task
        try:
            name = choose_verifier(task.data_source, self._spec, held_out=task.purpose is Purpose.EVAL)
            verdicts = await self._scorer(name).score(group)
        except ConfigError as error:
            verdicts = [_not_judged(error) for _ in group.rollouts]
        return ScoredGroup(group, tuple(verdicts), time.monotonic() - began)

    @property
    def queued(self) -> int:
        """Checks that wait for their turn."""
        return sum(backend.queued for backend in self._backends)

    @property
    def progress_at(self) -> float:
        """`time.monotonic()` of the newest verdict, or of the newest checks."""
        return max(backend.progress_at for backend in self._backends)

    def fault(self) -> str | None:
        """The reason why the service should be restarted, or None."""
        return next((fault for backend in self._backends if (fault := backend.fault()) is not None), None)

    def _scorer(self, name: str) -> Scorer:
        """The scorer of this name, made at its first use: what the job defines comes before an installed verifier. Raises ConfigError."""
        if name not in self._scorers:
            self._scorers[name] = self._make(name)
        return self._scorers[name]

    def _make(self, name: str) -> Scorer:
        if name in self._models:
            return self._models[name]
        if (shares := self._rubrics.get(name)) is not None:
            return Rubric(name, shares, {part: self._scorer(part) for part in shares.reward})
        if name == ENVIRONMENT:
            return OutcomeScorer(name)
        if name == BuiltIn.CODE and not self._settings.runs_code:
            raise ConfigError(CODE_IS_OFF)
        return VerifierScorer(name, self._pool, self._spec)


def _not_judged(error: ConfigError) -> Verdict:
    metrics.observe_verdict(VerdictStatus.FAILED, NO_VERIFIER)
    return failed(NO_VERIFIER, error)
