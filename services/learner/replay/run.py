"""Runs a plan's passes in ranks of their own, and says what came out. Nothing of the job is changed; Redis is not needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from services.common.config.settings import Settings
from services.common.errors import MillraceError
from services.common.spec.job import JobSpec
from services.learner.ranks.launch import Nodes, launch_command, rank_environment
from services.learner.replay.plan import RESULTS, Pass, Plan
from services.learner.replay.report import ReplayReport
from services.learner.storage.folder import ERROR_FILE

RANK_MODULE = "services.learner.replay.rank"
LOOK_AGAIN_S = 0.1
END_S = 10.0
"""The ranks get this long to end when the replay is broken off."""

OnResult = Callable[[str, dict[str, Any]], None]
"""Told each result as it comes: the pass (`recorded` or `changed`) and what rank 0 said."""


class ReplayError(MillraceError):
    """The ranks of a replay failed; the message has what the first of them said."""


def replay(
    plan: Plan, settings: Settings, changed: JobSpec | None = None, on_result: OnResult = lambda *_: None
) -> ReplayReport:
    """Reruns the plan's steps as they were, and with a changed spec once more from the same weights.

    Raises:
        ReplayError: the ranks failed.
    """
    report = ReplayReport(plan)
    with tempfile.TemporaryDirectory(prefix="millrace-replay-") as made:
        work = Path(made)
        recorded = _recorded(plan, work / "recorded", for_comparison=changed is not None)
        with closing(_run(recorded, plan.spec, settings)) as results:
            for result in results:
                report.take_recorded(result)
                on_result("recorded", result)
        if changed is None:
            return report
        with closing(_run(_changed(plan, changed, work), changed, settings)) as results:
            for result in results:
                report.take_changed(result)
                on_result("changed", result)
    return report


def _recorded(plan: Plan, work: Path, *, for_comparison: bool) -> Pass:
    return Pass(
        folder=str(plan.folder),
        spec=plan.spec.model_dump(mode="json"),
        model_dir=str(plan.model_dir),
        load=str(plan.load) if plan.load else None,
        start=plan.start,
        last=plan.last,
        checkpoints={str(step): str(path) for step, path in plan.checkpoints.items()},
        work=str(work),
        keep_state_at=plan.first if for_comparison and plan.first else None,
        keep_weights=for_comparison,
    )


def _changed(plan: Plan, spec: JobSpec, work: Path) -> Pass:
    return Pass(
        folder=str(plan.folder),
        spec=spec.model_dump(mode="json"),
        model_dir=str(plan.model_dir),
        load=str(work / "recorded" / "state") if plan.first else None,
        start=plan.first,
        last=plan.last,
        checkpoints={},
        work=str(work / "changed"),
        compare_with=str(work / "recorded"),
    )


def _run(task: Pass, spec: JobSpec, settings: Settings) -> Generator[dict[str, Any], None, None]:
    """Starts the pass's ranks and gives rank 0's results as they come."""
    file, work = task.write(), Path(task.work)
    environment = rank_environment(settings, Path(task.folder).name, spec, work / "metrics")
    command = launch_command(Nodes().torchrun_arguments("replay", spec.learner.world_size), 0, RANK_MODULE, str(file))
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    seen = 0
    try:
        while True:
            ended = process.poll() is not None  # asked first: no result comes after the end
            results = _results(work)
            yield from results[seen:]
            seen = len(results)
            if ended:
                break
            time.sleep(LOOK_AGAIN_S)
    finally:
        _end(process)
    if process.returncode != 0:
        raise ReplayError(f"the replay failed: {_said(work)}")


def _results(work: Path) -> list[dict[str, Any]]:
    path = work / RESULTS
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []  # the last may be half written
    return [json.loads(line) for line in lines]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _said(work: Path) -> str:
    error = work / ERROR_FILE
    if error.is_file():
        return error.read_text()
    tail = (work / "log").read_text(errors="replace").strip().splitlines()[-5:]
    return "\n".join(["the ranks said nothing but:", *tail])
