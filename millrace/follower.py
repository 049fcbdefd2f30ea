"""Follower of a job: its states, steps and evaluations as typed events, each once, until the job has ended.

GET /jobs/{id} ─► GET /jobs/{id}/metrics from the first step not seen ─► StateChanged | StepTrained | Evaluated
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from millrace.gateway import GatewayClient, GatewayError
from millrace.records import ENDED, JobRecord, JobState, JsonObject
from services.common.errors import DeadlineExceeded

POLL_INTERVAL_S = 1.0
MAX_OUTAGE_S = 60.0
"""Longest time without an answer of the gateway before a poll raises."""


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The job has another state, or another cause of it; the first event of a job that has not ended."""

    record: JobRecord

    @property
    def state(self) -> JobState:
        """The new state."""
        return self.record["state"]

    @property
    def cause(self) -> str:
        """Why it is stalled, paused, failed or cancelled; empty otherwise."""
        return self.record["cause"]


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The job has made an optimizer step."""

    record: JsonObject
    """Its figures, as `GET /jobs/{id}/metrics` has them."""

    @property
    def step(self) -> int:
        """From 1."""
        return int(self.record["step"])

    @property
    def reward(self) -> float | None:
        """Mean over every rollout judged since the step before; None where none was."""
        return cast("float | None", self.record.get("reward"))

    @property
    def accuracy(self) -> float | None:
        """Mean over the same rollouts, 0 to 1."""
        return cast("float | None", self.record.get("accuracy"))


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A held-out evaluation is done."""

    record: JsonObject

    @property
    def step(self) -> int:
        """The step after which it began; 0: the initial weights."""
        return int(self.record["step"])

    @property
    def accuracy(self) -> float | None:
        """Mean over all samples of all tasks (avg@k), 0 to 1."""
        return cast("float | None", self.record.get("avg_at_k"))


JobEvent = StateChanged | StepTrained | Evaluated


class Follower:
    """Polls of one job; the caller sleeps `delay_s` between two of them, in the way of its own program."""

    def __init__(self, gateway: GatewayClient, job_id: str, *, start: int = 1, timeout_s: float | None = None) -> None:
        """`start`: the first step to report; `timeout_s`: see `poll`."""
        self.job_id = job_id
        self.record: JobRecord | None = None
        """As of the newest poll that was answered."""
        self.ended = False
        """Whether the job has ended and all was reported."""
        self.delay_s = 0.0
        self._gateway, self._step, self._evaluations = gateway, start, 0
        self._shown: tuple[str, str] | None = None
        self._answered = time.monotonic()
        self._timeout_s, self._deadline = timeout_s, None if timeout_s is None else self._answered + timeout_s
        self._polled = False

    def poll(self) -> list[JobEvent]:
        """What is new. An outage of the gateway is waited out for `MAX_OUTAGE_S`.

        Raises DeadlineExceeded from the second poll on when `timeout_s` have passed since the beginning, and GatewayError.
        """
        if self._polled and self._deadline is not None and time.monotonic() > self._deadline:
            state = self.record["state"] if self.record else "unknown"
            raise DeadlineExceeded(f"job {self.job_id} is {state} after {self._timeout_s:.0f} s")
        self._polled = True
        try:
            record = cast("JobRecord", self._gateway.job(self.job_id))  # before the history: no step follows the end
            events = self._news(record, self._gateway.history(self.job_id, self._step))
        except GatewayError as error:
            if not error.passing or time.monotonic() - self._answered > MAX_OUTAGE_S:
                raise
            events = []
        else:
            self._answered = time.monotonic()
        self.delay_s = 0.0 if events or self.ended else POLL_INTERVAL_S
        if self._deadline is not None:
            self.delay_s = max(0.0, min(self.delay_s, self._deadline - time.monotonic()))
        return events

    def _news(self, record: JobRecord, history: JsonObject) -> list[JobEvent]:
        """By step, an evaluation after its step; the state before them, or after them when it is the last."""
        steps = [StepTrained(step) for step in history["steps"]]
        evaluations = [Evaluated(found) for found in history["evals"][self._evaluations :]]
        news: list[StepTrained | Evaluated] = [*steps, *evaluations]
        news.sort(key=lambda event: event.step)
        events: list[JobEvent] = [*news]
        self.record = record
        self._step = max([self._step, *(event.step + 1 for event in steps)])
        self._evaluations += len(evaluations)
        over = record["state"] in ENDED
        if over and steps:
            return events  # the history is read by pages: there may be more
        self.ended = over
        shown = (record["state"], record["cause"])
        if shown != self._shown:
            events.insert(len(events) if over else 0, StateChanged(record))
            self._shown = shown
        return events


def follow(
    gateway: GatewayClient, job_id: str, *, start: int = 1, timeout_s: float | None = None
) -> Iterator[JobEvent]:
    """A job's events from step `start` on, until it has ended. Raises as `Follower.poll`."""
    follower = Follower(gateway, job_id, start=start, timeout_s=timeout_s)
    while not follower.ended:
        yield from follower.poll()
        time.sleep(follower.delay_s)


def follow_steps(gateway: GatewayClient, job_id: str, *, timeout_s: float | None = None) -> Iterator[JsonObject]:
    """The records of its steps alone."""
    for event in follow(gateway, job_id, timeout_s=timeout_s):
        if isinstance(event, StepTrained):
            yield event.record
