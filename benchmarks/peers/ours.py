"""Our side: the whole stack in a temporary home, and one job for each way."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Plan, Run, Step, informative_samples, is_measured, longest_s
from benchmarks.peers.processes import PeakMemory, SideError, last_line, variables
from millrace.connection import find_token
from millrace.follower import follow_steps
from millrace.gateway import GatewayClient
from millrace.records import ENDED
from services.cli.up import detach, run_down
from services.common.errors import DeadlineExceeded, MillraceError
from services.common.jobs.step_record import StepRecord
from services.common.service.stack_state import UpState
from services.common.spec.job import JobSpec
from services.common.streams.codec import decode
from services.common.streams.limits import entry_limit
from services.common.streams.types import ScoredGroup
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import Journal

START_LIMIT_S = 240.0
CANCEL_LIMIT_S = 60.0


@contextmanager
def stack(home: Path, models: Path, data: Path | None) -> Iterator[UpState]:
    """The stack in a fresh home, which may read `models` and the directory of `data`. Raises SideError when it does not start."""
    roots = {"MILLRACE_MODEL_ROOTS": json.dumps([str(models)])}
    if data is not None:
        roots["MILLRACE_DATA_ROOTS"] = json.dumps([str(data.parent)])
    try:
        with variables(roots):
            state = detach(home, ["--port", "0"], lambda _: None)
        yield state
    except MillraceError as error:
        raise SideError(f"{error}; {last_line(home / 'logs' / 'learner-0.log')}") from error
    finally:
        run_down(home, lambda _: None)


def run_job(state: UpState, home: Path, job: dict[str, Any], plan: Plan) -> Run:
    """Trains a job until it has been measured long enough, then cancels it. Raises MillraceError when it fails or does not move."""
    started = time.time()
    records: list[StepRecord] = []
    with GatewayClient(state.url, find_token(state.token_file)) as client, PeakMemory(state.pid) as memory:
        identity = str(client.submit(job)["id"])
        for line in follow_steps(client, identity, timeout_s=START_LIMIT_S + longest_s(plan)):
            records.append(StepRecord.model_validate(line))
            if is_measured(_steps(records), plan):
                break
        cancel(client, identity)
    trained = dict(journalled(home / "jobs" / identity, JobSpec.model_validate(job)))
    counted = (
        replace(step, samples=trained[n][0], informative=trained[n][1]) for n, step in enumerate(_steps(records), 1)
    )
    return Run(tuple(counted), memory.peak_bytes, started)


def cancel(client: GatewayClient, identity: str) -> None:
    """Cancels a job that is measured, and waits for its end. Raises SideError when it has ended already."""
    record = client.job(identity)
    if record["state"] in ENDED:
        raise SideError(f"the job {record['state']} before it was measured: {record['cause']}")
    client.cancel(identity)
    deadline = time.monotonic() + CANCEL_LIMIT_S
    while client.job(identity)["state"] not in ENDED:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the job was not cancelled within {CANCEL_LIMIT_S:.0f} s")
        time.sleep(0.2)


def _steps(records: list[StepRecord]) -> list[Step]:
    """The steps, without counts of samples."""
    reward, steps = 0.0, []
    for record in records:
        # None where nothing was judged since the step before: all of its batch had been waiting.
        reward = reward if record.reward is None else record.reward
        steps.append(Step(_end(record), 0, 0, reward, record.trained_tokens, record.train_s or 0.0))
    return steps


def _end(record: StepRecord) -> float:
    if record.at is None:
        raise SideError(f"step {record.step} has no time")
    return record.at


def journalled(folder: Path, spec: JobSpec) -> Iterator[tuple[int, tuple[int, int]]]:
    """Step, with the samples that it trained and how many of them were informative, from the job's journal."""
    limit = entry_limit(spec.rollout, spec.eval)
    for record in Journal(folder / JOURNAL_DIR).records():
        samples = informative = 0
        for payload in record.groups:
            accuracies = [
                verdict.accuracy
                for verdict in decode(ScoredGroup, payload, limit).verdicts
                if verdict.accuracy is not None
            ]
            samples += len(accuracies)
            informative += informative_samples(accuracies, len(accuracies))
        if record.groups:
            yield record.step, (samples, informative)
