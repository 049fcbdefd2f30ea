"""One job under a series of faults:  fault ─► does the job go on, and when? ─► next fault ─► … ─► end ─► oracle."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis as sync_redis

from services.common.jobs.fates import Fate
from services.common.redis import keys
from tests.chaos.job import job_spec
from tests.chaos.oracle import Finding, examine
from tests.chaos.result import Result
from tests.chaos.stack import START_S, ChaosError, Stack

ENDLESS = 1_000_000
"""Steps of a job that is cancelled when the last fault is over."""
WARM_STEPS = 4
PAUSE_S = 1.5
"""Longest wait between the job's going on and the next fault."""
PATIENCE_S = 120.0
"""A job that has not gone on after so long hangs."""

Strike = Callable[[], None]


class Campaign:
    """One job, and what becomes of it. Use `campaign`."""

    def __init__(self, stack: Stack, spec: dict[str, Any], fault: str, seed: int) -> None:
        """Submits the job and waits until it trains."""
        self.stack = stack
        self.random = random.Random(seed)
        self.result = Result(fault, 0, seed)
        self.further = int(spec["off_policy"]["max_off_policy_steps"]) + 2
        """Steps that show that the job goes on: one more than groups can be ready for when the fault strikes."""
        self._endless = spec["learner"]["steps"] == ENDLESS
        self.job_id = stack.submit(spec, f"chaos-{seed}")
        self.folder = stack.home / "jobs" / self.job_id
        self._versions = VersionWatch(stack, self.job_id)
        stack.wait_for_step(self.job_id, WARM_STEPS, START_S)

    def trial(
        self, strike: Strike, *, pause_s: float = PAUSE_S, patience_s: float = PATIENCE_S, lies_in_wait: bool = False
    ) -> None:
        """Strikes at a random moment, and waits until the job has gone on.

        Args:
            strike: the fault; it returns when it has struck, or when it is over.
            pause_s: longest wait before it.
            patience_s: longest wait after it.
            lies_in_wait: until somebody comes by, the job goes on. What counts begins when it has struck.

        Raises:
            ChaosError: it hangs, or failed.
        """
        time.sleep(self.random.uniform(0.0, pause_s))
        before, struck = self.stack.step(self.job_id), time.monotonic()
        strike()
        if lies_in_wait:
            before, struck = self.stack.step(self.job_id), time.monotonic()
        self.result.count += 1
        if before is None:  # a fault has the gateway still: count from what it says first
            self.stack.wait(lambda: self.stack.step(self.job_id) is not None, "the gateway to answer", patience_s)
            before = self.stack.step(self.job_id) or 0
        self.stack.wait_for_step(self.job_id, before + self.further, patience_s)
        self.result.progress_s.append(time.monotonic() - struck)

    def finish(self, patience_s: float = PATIENCE_S) -> Result:
        """Waits for the end of the job, which is cancelled if it is endless, and lets the oracle judge it."""
        if self._endless:
            self.stack.client.cancel(self.job_id)
        record = self.stack.wait_for_end(self.job_id, patience_s)
        finding = examine(self.folder, ended=True)
        self.result.violations += finding.violations + self._versions.stop()
        self.result.violations += list(disagreements(record, self._history(), finding))
        audit = finding.audit
        fates = {fate.value: count for fate, count in audit.fates.items() if count}
        self.result.groups = {"issued": audit.issued, **fates}
        self.result.extra |= {"steps": audit.steps, "lineages": audit.lineages, "tokens_checked": finding.tokens}
        return self.result

    def _history(self) -> list[int]:
        """The steps that people are told of, as they stand there."""
        told: list[int] = []
        while page := self.stack.client.steps(self.job_id, len(told) + 1):
            told += [int(item["step"]) for item in page]
        return told


@contextlib.contextmanager
def campaign(
    home: Path, fault: str, seed: int, *, spec: dict[str, Any] | None = None, **stack_options: Any
) -> Iterator[Campaign]:
    """A stack with one job; the result's `seconds` is set when it is left."""
    started = time.monotonic()
    with Stack(home, **stack_options) as stack:
        running = Campaign(stack, spec or job_spec(steps=ENDLESS), fault, seed)
        try:
            yield running
        except ChaosError as error:
            running.result.violations.append(str(error))
        finally:
            running.result.seconds = time.monotonic() - started


def disagreements(record: dict[str, Any], history: list[int], finding: Finding) -> Iterator[str]:
    """Where what people are told differs from what the journal says."""
    audit = finding.audit
    counted = {fate.value: audit.fates[fate] for fate in Fate} | {"issued": audit.issued, "active": audit.active}
    if record["groups"] != counted:
        yield f"the record counts {record['groups']}, the journal {counted}"
    if record["step"] != audit.steps:
        yield f"the record says step {record['step']}, the journal {audit.steps}"
    if history != list(range(1, audit.steps + 1)):
        odd = [step for step in range(1, audit.steps + 1) if history.count(step) != 1]
        yield f"the history has {len(history)} steps of {audit.steps}; not once: {odd[:5]}"


class VersionWatch:
    """Looks at what is published, all the time: versions must only grow."""

    def __init__(self, stack: Stack, job_id: str) -> None:
        """Looks from now on."""
        self._stack, self._job_id = stack, job_id
        self._stopped = threading.Event()
        self._wrong: list[str] = []
        self._thread = threading.Thread(target=self._look, name="versions", daemon=True)
        self._thread.start()

    def stop(self) -> list[str]:
        """Where a version went back."""
        self._stopped.set()
        self._thread.join(10.0)
        return self._wrong

    def _look(self) -> None:
        newest = (0, 0)
        client = sync_redis.Redis.from_url(self._stack.state.redis_url, socket_timeout=2.0, socket_connect_timeout=2.0)
        while not self._stopped.wait(0.05):
            with contextlib.suppress(sync_redis.RedisError):
                raw = client.hget(keys.ACTIVE, self._job_id)
                if isinstance(raw, bytes):
                    active = json.loads(raw)
                    seen = (int(active["lineage"]), int(active["policy_version"]))
                    if seen < newest:
                        self._wrong.append(f"version {seen} was published after {newest}")
                    newest = max(newest, seen)
        client.close()
