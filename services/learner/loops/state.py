"""State of one running job: its wiring, which does not change, and small objects that change, each written by one loop.

Everything here lives in the head's event loop; nothing is locked.

train ──► Progress, Saving     monitor ──► Control     issue, collect, monitor ──► Evaluations     all ──► Activity.moved()
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis

from services.common.checkpoints.fingerprint import Identity
from services.common.config.settings import Settings
from services.common.errors import ConfigError, MillraceError
from services.common.service.lifecycle import Drain
from services.common.spec.job import JobSpec
from services.common.streams.consumer import Consumer
from services.common.streams.types import ScoredGroup, VerdictStatus
from services.learner.groups.buffer import Intake, Judged
from services.learner.groups.evaluation import EvalRound
from services.learner.groups.tasks import TaskFactory
from services.learner.megatron.stats import StepStats
from services.learner.ranks.client import Ranks
from services.learner.storage.checkpoints import CheckpointStore
from services.learner.storage.job_store import HeadStore
from services.learner.storage.journal import Journal
from services.learner.weights.publisher import Publisher

log = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818  control flow, not an error
    """The job was asked to end, or the learner to drain."""


class NoStepPossible(MillraceError):  # noqa: N818  what the matter is
    """The job cannot go on, and says why."""


@dataclass(slots=True)
class Flow:
    """Tokens and groups that arrived since the last step."""

    since: float = field(default_factory=time.monotonic)
    generated_tokens: int = 0
    wasted_tokens: int = 0
    groups: int = 0
    accuracy_sum: float = 0.0
    reward_sum: float = 0.0
    rollouts: int = 0
    """Rollouts that were judged, those over a limit included."""
    over_limit: int = 0
    """Rollouts whose check went beyond its limit."""
    not_judged: int = 0
    """Rollouts without a verdict: their verifier broke."""

    def take(self, scored: ScoredGroup) -> None:
        """Counts a training group."""
        self.groups += 1
        self.generated_tokens += sum(len(rollout.tokens) for rollout in scored.group.rollouts)
        for verdict in scored.verdicts:
            self.not_judged += verdict.reward is None
            if verdict.reward is not None and verdict.accuracy is not None:
                self.over_limit += verdict.status is VerdictStatus.TIMEOUT
                self.rollouts += 1
                self.reward_sum += verdict.reward
                self.accuracy_sum += verdict.accuracy


MOST_IN_A_ROW = 3
"""Skipped steps in a row that end the job."""


class NotFinite(MillraceError):  # noqa: N818  what the matter is
    """The job cannot go on: its weights are those of the last good step."""


@dataclass(slots=True)
class Progress:
    """Where the job stands. The train loop writes it."""

    lineage: int
    step: int = 0
    """Optimizer steps done; also the policy version published last."""
    start_step: int = 0
    """Where it began: above 0 when it went on from another job's checkpoint."""
    recovered_step: int = 0
    """Where the journal ended when this head began."""
    skipped_in_a_row: int = 0
    """Steps without a finite loss or gradient, up to the last one."""
    published: bool = False
    """Whether servers may sample: the first version is out."""

    async def recovered(self, drain: Drain) -> None:
        """Waits until the ledger stands where the journal ends and the first version is out, or the drain."""
        while not self.published and not await drain.wait(0.1):
            pass

    def notice_skip(self, stats: StepStats) -> None:
        """Counts a step that was skipped for a loss or gradient that is not finite; any other begins anew. The same in replay."""
        not_finite = bool(stats.skipped) and stats.tokens > 0
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if not_finite else 0

    def require_finite(self) -> None:
        """Ends a job that has skipped too many steps in a row, a recovered one too.

        Raises:
            NotFinite: the last MOST_IN_A_ROW steps were skipped.
        """
        if self.skipped_in_a_row >= MOST_IN_A_ROW:
            raise NotFinite(
                f"loss or gradient norm was not finite in {self.skipped_in_a_row} steps in a row, the last {self.step}: "
                f"the weights are those of step {self.step - self.skipped_in_a_row}"
            )


@dataclass(slots=True)
class Saving:
    """Checkpoints of the job. `save`, in the train loop, writes it."""

    saved_step: int | None = None
    """Step of the newest checkpoint."""
    begun_step: int = 0
    """Step of the newest checkpoint that was begun."""
    task: asyncio.Task[None] | None = None
    """The checkpoint that is being written."""


@dataclass(slots=True)
class Control:
    """Whether the job goes on. The monitor loop writes it; before the first version is out, the train loop."""

    stopping: str = ""
    """Why the job should end before its last step; empty while it should not."""
    hopeless: str = ""
    """Why no further step is possible; empty while one is. `JobContext.give_up` alone changes it."""
    paused_at: float | None = None
    """Monotonic seconds since when nothing new begins; None while the job is not paused."""
    no_space: str = ""
    """Why the job cannot write, while it cannot: it is paused then, whatever people ask. `with_room` alone changes it."""

    @property
    def paused(self) -> bool:
        """Whether nothing new begins."""
        return self.paused_at is not None

    def pause(self) -> None:
        """From now on nothing new begins: no task is issued, no batch chosen, no deadline runs out."""
        if self.paused_at is None:
            self.paused_at = time.monotonic()

    async def resumed(self, drain: Drain) -> bool:
        """Waits while the job is paused; whether it goes on, and neither ends nor drains."""
        while self.paused and not (self.stopping or await drain.wait(0.1)):
            pass
        return not self.paused

    def require_progress(self, drain: Drain) -> None:
        """To be called again and again by whoever waits for what the job's servers do.

        Raises:
            Stopped: the job was asked to end, or the learner to drain.
            NoStepPossible: it would wait for ever.
        """
        if self.stopping or drain.requested:
            raise Stopped
        if self.hopeless:
            raise NoStepPossible(self.hopeless)


@dataclass(slots=True)
class Evaluations:
    """Held-out evaluations under way. The issue loop begins them, the collect loop answers them, the monitor loop ends them."""

    rounds: list[EvalRound] = field(default_factory=list)
    answers: dict[int, Judged] = field(default_factory=dict)
    """Groups that came back, by group_id; their entries are held until the evaluation is written down."""


@dataclass(slots=True)
class Activity:
    """What is under way, and who must look again."""

    waiting_for: str = ""
    """What the next step waits for; empty while a step is under way. The train loop writes it."""
    moved_at: float = field(default_factory=time.monotonic)
    """When something last moved: a group arrived, a step was done."""
    arrived: int = 0
    """Groups that came from a server since this head began. The collect loop counts them."""
    flow: Flow = field(default_factory=Flow)
    """Since the last step. The collect loop counts; the train loop begins a new one."""
    ask_again: bool = True
    """Whether what has no fate yet must be requested again: a head has begun, or Redis has lost the work. The issue loop clears it."""
    issue_now: asyncio.Event = field(default_factory=asyncio.Event)
    step_now: asyncio.Event = field(default_factory=asyncio.Event)

    def moved(self) -> None:
        """Something moved: the issue loop and the train loop look again."""
        self.moved_at = time.monotonic()
        self.issue_now.set()
        self.step_now.set()

    def work_lost(self) -> None:
        """Redis has lost the tasks, rollouts and scored groups that were in its streams."""
        self.ask_again = True
        self.moved()


@dataclass(frozen=True, slots=True)
class JobContext:
    """One running job, as its loops see it: what they work with, and the state of each."""

    job_id: str
    spec: JobSpec
    folder: Path
    """The job's own."""
    identity: Identity
    model_dir: Path
    settings: Settings
    redis: Redis
    store: HeadStore
    ranks: Ranks
    intake: Intake
    tasks: TaskFactory
    journal: Journal
    checkpoints: CheckpointStore
    publisher: Publisher
    consumer: Consumer
    progress: Progress
    control: Control = field(default_factory=Control)
    saving: Saving = field(default_factory=Saving)
    evals: Evaluations = field(default_factory=Evaluations)
    activity: Activity = field(default_factory=Activity)

    @property
    def steps_left(self) -> int:
        """Steps that still need groups."""
        return self.spec.learner.steps - self.progress.step

    def give_up(self, why: str) -> None:
        """No further step is possible: the train loop ends the job. Only the first reason counts."""
        if not self.control.hopeless:
            log.error("%s", why)
            self.control.hopeless = why
            self.activity.moved()

    def resume(self) -> None:
        """Goes on: whatever has a deadline or a rate gets the time of the pause back."""
        paused_at, self.control.paused_at = self.control.paused_at, None
        if paused_at is None:
            return
        now = time.monotonic()
        for group in self.intake.ledger.active.values():
            group.issued_at += now - max(paused_at, group.issued_at)
        for evaluation in self.evals.rounds:
            gone = now - max(paused_at, evaluation.started)
            evaluation.started += gone
            evaluation.deadline += gone
        self.activity.flow.since += now - max(paused_at, self.activity.flow.since)
        self.intake.failures.clear()
        self.activity.moved()


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Waits until the event is set or the time is over, and clears it."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
    event.clear()


async def require_finite_weights(job: JobContext, source: str) -> None:
    """Refuses weights that have just been loaded, before anything is sampled with them.

    Args:
        job: its ranks hold them.
        source: the field or file that they come from.

    Raises:
        ConfigError: a tensor has values that are not finite; names it.
    """
    if await job.ranks.finite():
        return
    weights = await job.ranks.weights()
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    raise ConfigError(f"{source} has values that are not finite: {broken[0] if broken else 'a parameter'}")
