"""Job: a handle on one job of a gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self, Unpack, cast

from millrace.document import Overrides, make_document
from millrace.follower import Follower, JobEvent
from millrace.frames import rollout_frame, step_frame
from millrace.gateway import GatewayClient
from millrace.progress import ProgressBar
from millrace.records import ENDED, JobRecord, JobState, JsonObject, SampleFilters
from services.common.errors import MillraceError

if TYPE_CHECKING:
    import pandas as pd


class HasId(Protocol):
    """Whatever has the id of a job: a `Job`, an `AsyncJob`."""

    @property
    def id(self) -> str:
        """The job's id."""
        ...


JobLike = str | HasId
"""A job, its id, or a beginning of the id that no other has."""


def id_of(job: JobLike) -> str:
    """Its id, or the beginning that was given."""
    return job if isinstance(job, str) else job.id


class JobFailedError(MillraceError):
    """A job that was waited for ended as failed or cancelled; the message has its cause."""

    def __init__(self, record: JobRecord) -> None:
        cause = f": {record['cause']}" if record["cause"] else ""
        super().__init__(f"job {record['id']} {record['state']} at step {record['step']} of {record['steps']}{cause}")
        self.record = record


class Job:
    """One job. Every method raises GatewayError where the gateway refuses it or does not answer."""

    def __init__(self, gateway: GatewayClient, record: JsonObject) -> None:
        """`record`: as the gateway gives it; `Client` makes jobs."""
        self.record = cast("JobRecord", record)
        """As it was when it was read last."""
        self._gateway = gateway

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {self.state}, step {self.record['step']} of {self.record['steps']})"

    @property
    def id(self) -> str:
        """The job's id."""
        return self.record["id"]

    @property
    def state(self) -> JobState:
        """As it was when it was read last: `refresh` reads it again."""
        return self.record["state"]

    @property
    def cause(self) -> str:
        """Why it is stalled, paused, failed or cancelled; empty otherwise."""
        return self.record["cause"]

    @property
    def has_ended(self) -> bool:
        """Whether it had ended when it was read last."""
        return self.state in ENDED

    def refresh(self) -> Self:
        """Reads the record again."""
        return self._now(self._gateway.job(self.id))

    def spec(self) -> JsonObject:
        """Its settings, with every default written out."""
        if "spec" not in self.record:
            self.refresh()
        return self.record["spec"]

    def follow(self, *, start: int = 1, timeout_s: float | None = None, progress: bool = False) -> Iterator[JobEvent]:
        """Its events from step `start` on, as they happen, until it has ended; the record follows them.

        `progress` shows a bar where tqdm is installed. Raises DeadlineExceeded after `timeout_s` seconds, and GatewayError when the
        gateway does not answer for a minute.
        """
        with self.watch(start=start, timeout_s=timeout_s, progress=progress) as watch:
            while not watch.ended:
                yield from watch.poll()
                time.sleep(watch.delay_s)

    def wait(self, timeout_s: float | None = None, *, check: bool = True, progress: bool = False) -> Self:
        """Waits until it has ended. Raises JobFailedError where it failed or was cancelled, unless `check` is false, and as `follow`."""
        for _ in self.follow(timeout_s=timeout_s, progress=progress):
            pass
        return self.checked() if check else self

    def checked(self) -> Self:
        """The job; raises JobFailedError where it has failed or was cancelled."""
        if self.state in {"failed", "cancelled"}:
            raise JobFailedError(self.record)
        return self

    def watch(self, *, start: int = 1, timeout_s: float | None = None, progress: bool = False) -> Watch:
        """What `follow` polls, for a loop of another kind."""
        return Watch(self, Follower(self._gateway, self.id, start=start, timeout_s=timeout_s), shown=progress)

    def metrics(self) -> pd.DataFrame:
        """One row for each optimizer step made so far, by step, with all its figures. Raises MissingPackageError without pandas."""
        return step_frame(self._gateway.all_steps(self.id))

    def evaluations(self) -> pd.DataFrame:
        """One row for each held-out evaluation, by the step after which it began. Raises MissingPackageError without pandas."""
        return step_frame(self._gateway.evals(self.id))

    def samples(self, limit: int = 100, **filters: Unpack[SampleFilters]) -> pd.DataFrame:
        """One row for each rollout, with its prompt and its verdict, of the newest `limit` judged groups (at most 500), newest first.

        With a filter, the newest groups that have such a rollout, with such rollouts only. Raises MissingPackageError without pandas.
        """
        return rollout_frame(self._gateway.rollouts(self.id, limit, **filters))

    def cancel(self) -> Self:
        """Cancels a queued job at once; that of a learner ends after the step under way."""
        return self._now(self._gateway.cancel(self.id))

    def pause(self) -> Self:
        """Holds a queued job back; a running one finishes the step under way, and waits."""
        return self._now(self._gateway.pause(self.id))

    def resume(self) -> Self:
        """Goes on with a paused job."""
        return self._now(self._gateway.resume(self.id))

    def delete(self) -> None:
        """Deletes a job that has ended, with its folder."""
        self._gateway.delete(self.id)

    def label(self, add: Sequence[str] = (), remove: Sequence[str] = (), notes: str | None = None) -> Self:
        """Adds and removes tags, and sets the notes where they are given."""
        have = self.refresh().record["tags"]
        tags = [tag for tag in dict.fromkeys([*have, *add]) if tag not in remove]
        return self._now(self._gateway.label(self.id, {"tags": tags} | ({} if notes is None else {"notes": notes})))

    def resubmit(self, overrides: Overrides | None = None, tags: Sequence[str] = ()) -> Job:
        """A new job of this one's spec, with the overrides set and the tags added."""
        return Job(self._gateway, self._gateway.submit(make_document(self.spec(), overrides, tags)))

    def _now(self, record: JsonObject) -> Self:
        self.record = cast("JobRecord", record)
        return self


class Watch:
    """A job under a follower's eyes: every poll refreshes its record and its progress bar. Use it as a context manager."""

    def __init__(self, job: Job, follower: Follower, *, shown: bool) -> None:
        self._job, self._follower, self._bar = job, follower, ProgressBar(job.id, shown=shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def ended(self) -> bool:
        """Whether the job has ended and all was reported."""
        return self._follower.ended

    @property
    def delay_s(self) -> float:
        """Seconds to sleep before the next poll."""
        return self._follower.delay_s

    def poll(self) -> list[JobEvent]:
        """What is new; raises as `Follower.poll`."""
        events = self._follower.poll()
        self._job.record = self._follower.record or self._job.record
        for event in events:
            self._bar.update(event)
        return events
