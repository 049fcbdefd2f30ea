"""Run of a replay plan: starts ranks for each pass and collects their results. Changes nothing of the job; does not need Redis."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from services.common.config.settings import Settings
from services.common.errors import MillraceError
from services.common.service.process_tree import kill_group
from services.common.spec.job import JobSpec
from services.learner.ranks.launch import Nodes, launch_command, rank_environment
from services.learner.replay.plan import RESULTS, Pass, Plan
from services.learner.replay.report import ReplayReport
from services.learner.storage.folder import ERROR_FILE

RANK_MODULE = "services.learner.replay.rank"
POLL_INTERVAL_S = 0.1
TERMINATE_TIMEOUT_S = 10.0
"""Time between SIGTERM and SIGKILL when the replay is broken off."""

OnResult = Callable[[str, dict[str, Any]], None]
"""Called with each result as it comes: the pass (`recorded` or `changed`), and rank 0's result."""


class ReplayError(MillraceError):
    """The ranks of a replay failed; the message has the error of the first."""


def replay(
    plan: Plan, settings: Settings, changed: JobSpec | None = None, on_result: OnResult = lambda *_: None
) -> ReplayReport:
    """Reruns the plan's steps with the recorded spec, and with a changed spec once more from the same weights.

    Raises:
        ReplayError: the ranks failed.
    """
    report = ReplayReport(plan)
    with tempfile.TemporaryDirectory(prefix="millrace-replay-") as made:
        recorded = _recorded(plan, Path(made) / "recorded", for_comparison=changed is not None)
        _run(recorded, plan.spec, settings, report.take_recorded, partial(on_result, "recorded"))
        if changed is not None:
            task = _changed(recorded, plan, changed, Path(made) / "changed")
            _run(task, changed, settings, report.take_changed, partial(on_result, "changed"))
    return report


def _recorded(plan: Plan, work: Path, *, for_comparison: bool) -> Pass:
    return Pass(
        folder=str(plan.folder),
        spec=plan.spec.model_dump(mode="json"),
        load=str(plan.load) if plan.load else None,
        start=plan.start,
        last=plan.last,
        checkpoints={str(step): str(path) for step, path in plan.checkpoints.items()},
        work=str(work),
        keep_state_at=plan.first if for_comparison and plan.first else None,
        keep_weights=for_comparison,
    )


def _changed(recorded: Pass, plan: Plan, spec: JobSpec, work: Path) -> Pass:
    return replace(
        recorded,
        spec=spec.model_dump(mode="json"),
        load=str(Path(recorded.work) / "state") if plan.first else None,
        start=plan.first,
        checkpoints={},
        work=str(work),
        keep_state_at=None,
        keep_weights=False,
        compare_with=recorded.work,
    )


def _run(task: Pass, spec: JobSpec, settings: Settings, *listeners: Callable[[dict[str, Any]], None]) -> None:
    file, work = task.write(), Path(task.work)
    environment = rank_environment(settings, Path(task.folder).name, spec, work / "metrics")
    command = launch_command(Nodes().torchrun_arguments("replay", spec.world_size), 0, RANK_MODULE, str(file))
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    seen = 0
    try:
        while True:
            ended = process.poll() is not None  # before the results are read: none comes after the end
            results = _results(work)
            for result in results[seen:]:
                for listener in listeners:
                    listener(result)
            seen = len(results)
            if ended:
                break
            time.sleep(POLL_INTERVAL_S)
    finally:
        _terminate(process)
    if process.returncode != 0:
        raise ReplayError(f"the replay failed: {_error(work)}")


def _results(work: Path) -> list[dict[str, Any]]:
    path = work / RESULTS
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []  # the last line may be half written
    return [json.loads(line) for line in lines]


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(TERMINATE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            kill_group(process.pid)
            process.wait()


def _error(work: Path) -> str:
    error = work / ERROR_FILE
    if error.is_file():
        return error.read_text()
    tail = (work / "log").read_text(errors="replace").strip().splitlines()[-5:]
    return "\n".join(["the ranks said nothing but:", *tail])
