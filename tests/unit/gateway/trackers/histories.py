"""Jobs' folders with histories, for tests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common.jobs.folder import JobFolder
from services.gateway.trackers.follower import Follower
from services.gateway.trackers.sink import Run

JOB = "demo-3f2a9c1b"
SINK = "tests.unit.gateway.trackers.sinks:Written"


def job_folder(root: Path) -> JobFolder:
    (root / JOB).mkdir(parents=True)
    return JobFolder(root / JOB)


def run_of(folder: Path, **options: str) -> Run:
    config = {"learner": {"lr": 1e-6, "steps": 20}, "name": "demo"}
    return Run(JOB, str(folder), "millrace", JOB, ["baseline"], config, options)


def follower(folder: Path, tracker: str = "mlflow", sink: str | None = SINK, **options: str) -> Follower:
    return Follower(tracker, asdict(run_of(folder, **options)), sink)


def add_step(folder: JobFolder, step: int, **figures: Any) -> None:
    data = {"step": step, "at": 1000.0 + step, "reward": step / 10, "loss": -0.5 * step, "lineage": 1, "step_s": 2.0}
    folder.append("step", step, data | figures)


def add_eval(folder: JobFolder, step: int) -> None:
    folder.append("eval", step, {"step": step, "at": 1000.5 + step, "avg_at_k": 0.25, "pass_at_k": 0.5, "k": 4})
