"""State of one running job: frozen wiring, and small mutable objects, each written by one loop.

All of it belongs to the head's event loop; there are no locks.

train ──► Progress, Saving     monitor ──► Control     issue, collect, monitor ──► Evaluations     all ──► Activity.moved()
"""

from __future__ import annotations

import asyncio
import contextlib
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
from services.learner.groups.buffer import GroupBuffer, Judged
from services.learner.groups.data import TaskFactory
from services.learner.groups.evaluation import EvalRound
from services.learner.groups.occupancy import Occupancy
from services.learner.loops.traces import GroupTraces
from services.learner.ranks.client import Ranks
from services.learner.storage.checkpoints import CheckpointStore
from services.learner.storage.job_store import HeadStore
from services.learner.storage.journal import Journal
from services.learner.training.stats import StepStats
from services.learner.weights.publisher import Publisher

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
CANCELLED = "cancelled on request"
MAX_SKIPPED_IN_A_ROW = 3
"""Skipped steps in a row that end the job."""


class Stopped(Exception):  # noqa: N818  control flow, not an error
    """The end of the job, or the drain of the learner, was requested."""


class NoStepPossibleError(MillraceError):
    """The job cannot go on; its weights are those of the last good step."""


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
    """Judged rollouts, including those over a limit."""
    over_limit: int = 0
    """Rollouts whose check exceeded its limit."""
    not_judged: int = 0
    """Rollouts without a verdict: their verifier broke."""

    def count(self, scored: ScoredGroup) -> None:
        """Counts a training group."""
        self.groups += 1
        self.generated_tokens += scored.group.sampled_tokens
        for verdict in scored.verdicts:
            self.not_judged += verdict.reward is None
            if verdict.reward is not None and verdict.accuracy is not None:
                self.over_limit += verdict.status is VerdictStatus.TIMEOUT
                self.rollouts += 1
                self.reward_sum += verdict.reward
                self.accuracy_sum += verdict.accuracy


@dataclass(slots=True)
class Progress:
    """Progress of the job. The train loop writes it."""

    lineage: int
    step: int = 0
    """Optimizer steps done; also the policy version published last."""
    start_step: int = 0
    """Step at which the job began: above 0 when it continues another job's checkpoint."""
    recovered_step: int = 0
    """Last step of the journal when this head began."""
    skipped_in_a_row: int = 0
    """Steps without a finite loss or gradient, up to the last one."""
    published: bool = False
    """The first version is published: servers may sample."""

    async def recovered(self, drain: Drain) -> None:
        """Waits until the job is recovered and the first version is published, or the drain."""
        while not self.published and not await drain.wait(POLL_INTERVAL_S):
            pass

    def count_skip(self, stats: StepStats) -> None:
        """Counts a step that was skipped because loss or gradient was not finite; any other resets the count. The same in replay."""
        not_finite = bool(stats.skipped) and stats.tokens > 0
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if not_finite else 0

    def require_finite(self) -> None:
        """Raises NoStepPossibleError after MAX_SKIPPED_IN_A_ROW skipped steps in a row, also in a recovered job."""
        if (count := self.skipped_in_a_row) >= MAX_SKIPPED_IN_A_ROW:
            raise NoStepPossibleError(
                f"loss or gradient norm was not finite in {count} steps in a row, the last {self.step}: "
                f"the weights are those of step {self.step - count}"
            )


@dataclass(slots=True)
class Saving:
    """Checkpoints of the job. `save`, called by the train loop, writes it."""

    saved_step: int | None = None
    """Step of the newest checkpoint."""
    begun_step: int = 0
    """Step of the newest checkpoint that was begun."""
    task: asyncio.Task[None] | None = None
    """Write of the checkpoint in progress."""


@dataclass(slots=True)
class Control:
    """Control of the job. The monitor loop writes it; before the first version is published, the train loop."""

    stopping: str = ""
    """Why the job should end before its last step; empty while it should not."""
    hopeless: str = ""
    """Why no further step is possible; empty while one is. Only `JobContext.give_up` changes it."""
    paused_at: float | None = None
    """Monotonic seconds at which the pause began; None while the job is not paused."""
    no_space: str = ""
    """Why the job cannot write to its disk; it is paused meanwhile, whatever users request. Only `with_disk_space` changes it."""

    @property
    def paused(self) -> bool:
        """Whether the job is paused."""
        return self.paused_at is not None

    def pause(self) -> None:
        """Begins a pause, in which no task is issued, no batch is chosen and no deadline passes."""
        if self.paused_at is None:
            self.paused_at = time.monotonic()

    async def resumed(self, drain: Drain) -> bool:
        """Waits until the pause, the job or the learner ends; returns whether it was the pause."""
        while self.paused and not (self.stopping or await drain.wait(POLL_INTERVAL_S)):
            pass
        return not self.paused

    def require_progress(self, drain: Drain) -> None:
        """Must be called at each poll of a wait for the job's servers.

        Raises:
            Stopped: the end of the job, or the drain of the learner, was requested.
            NoStepPossibleError: the wait would never end.
        """
        if self.stopping or drain.requested:
            raise Stopped
        if self.hopeless:
            raise NoStepPossibleError(self.hopeless)


@dataclass(slots=True)
class Evaluations:
    """Held-out evaluations in progress. The train loop begins them, the collect loop adds answers, the monitor loop ends them."""

    rounds: list[EvalRound] = field(default_factory=list)
    answers: dict[int, Judged] = field(default_factory=dict)
    """Groups that came back, by group_id; their entries are held until the evaluation is in the history."""


@dataclass(slots=True)
class Activity:
    """Activity of the job, and the events that wake its loops."""

    waiting_for: str = ""
    """What the next step waits for; empty while a step is in progress. The train loop writes it."""
    moved_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds of the last progress: a group arrived, a step was done."""
    arrived: int = 0
    """Groups that came from a server since this head began. The collect loop counts them."""
    flow: Flow = field(default_factory=Flow)
    """Since the last step. The collect loop counts; the train loop begins a new one."""
    occupancy: Occupancy = field(default_factory=Occupancy)
    """Of the rollout servers. The collect loop counts; the train loop takes the figures of each step."""
    resend: bool = True
    """Tasks without a fate must be sent again: a head has begun, or Redis has lost the work. The issue loop clears it."""
    issue_now: asyncio.Event = field(default_factory=asyncio.Event)
    step_now: asyncio.Event = field(default_factory=asyncio.Event)

    def moved(self) -> None:
        """Records progress, and wakes the issue loop and the train loop."""
        self.moved_at = time.monotonic()
        self.issue_now.set()
        self.step_now.set()

    def work_lost(self) -> None:
        """Requests a resend: Redis has lost the tasks, rollouts and scored groups that were in its streams."""
        self.resend = True
        self.moved()


@dataclass(frozen=True, slots=True)
class JobContext:
    """Context of one running job: the wiring of its loops, and their state."""

    job_id: str
    spec: JobSpec
    folder: Path
    identity: Identity
    model_dir: Path
    settings: Settings
    redis: Redis
    store: HeadStore
    ranks: Ranks
    buffer: GroupBuffer
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
    traces: GroupTraces = field(default_factory=GroupTraces)

    @property
    def steps_left(self) -> int:
        """Steps that still need groups."""
        return self.spec.learner.steps - self.progress.step

    def give_up(self, why: str) -> None:
        """Makes the train loop end the job, as no further step is possible. Only the first reason counts."""
        if not self.control.hopeless:
            log.error("%s", why)
            self.control.hopeless = why
            self.activity.moved()

    def resume(self) -> None:
        """Ends a pause: its time is added to every deadline, and removed from every rate."""
        paused_at, self.control.paused_at = self.control.paused_at, None
        if paused_at is None:
            return
        now = time.monotonic()
        for group in self.buffer.ledger.active.values():
            group.issued_at += now - max(paused_at, group.issued_at)
        for evaluation in self.evals.rounds:
            paused_s = now - max(paused_at, evaluation.started)
            evaluation.started += paused_s
            evaluation.deadline += paused_s
        self.activity.flow.since += now - max(paused_at, self.activity.flow.since)
        self.buffer.failures.clear()
        self.activity.moved()


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Waits until the event is set, at most `timeout_s` seconds, and clears it."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
        event.clear()


async def require_finite_weights(job: JobContext, source: str) -> None:
    """Raises ConfigError, which names a tensor, if weights just loaded from `source` (a field or file) are not finite.

    Called before any server samples with them.
    """
    if await job.ranks.finite():
        return
    weights = await job.ranks.weights()
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    raise ConfigError(f"{source} has values that are not finite: {broken[0] if broken else 'a parameter'}")
