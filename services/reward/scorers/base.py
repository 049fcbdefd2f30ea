"""Scorer: the interface of everything that judges a group, and of the processes and connections behind it."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from services.common.streams.types import RolloutGroup, Verdict, VerdictStatus
from services.reward.pool.messages import clean


class Scorer(Protocol):
    """Source of verdicts under one name: a verifier, a rubric, a judge or a reward model."""

    async def score(self, group: RolloutGroup) -> list[Verdict]:
        """One verdict per rollout, in their order.

        - It ends within the job's limit for each check (section `reward`) and half a second, with whatever it holds let go.
        - A rollout whose check passes its limit by its own fault has status TIMEOUT: with accuracy 0 and the scorer's lowest reward, or
          with neither.
        - What fails for another reason is tried once more, and then FAILED, without a reward and with the reason as detail.
        - Verdicts are counted where they are given (`metrics.observe_verdict`), under a name that no job chooses.
        - A cancelled call leaves nothing behind.

        Raises VerifierError when nothing can be judged any more: the service then ends, and is started again.
        """


class Backend(Protocol):
    """What stands behind a job's scorers: processes or connections. Opened when the job is attached, closed when it is detached."""

    @property
    def queued(self) -> int:
        """Checks that wait for their turn."""

    @property
    def progress_at(self) -> float:
        """`time.monotonic()` of the newest verdict, or of the newest checks."""

    def fault(self) -> str | None:
        """The reason why the service should be restarted, or None. What a job's own model or endpoint does wrong is none."""

    async def __aenter__(self) -> object:
        """Starts without waiting for what the job names (an endpoint, a model), and raises nothing about it: its verdicts are FAILED."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        """Ends every process and connection."""


class NamedScorer(Scorer, Backend, Protocol):
    """Scorer that has processes or connections of its own: a judge, a reward model."""


Scorers = Mapping[str, Scorer]
"""By name."""


def failed(name: str, reason: object) -> Verdict:
    """The verdict of a check that could not be made."""
    return Verdict(VerdictStatus.FAILED, None, None, name, clean(reason))
