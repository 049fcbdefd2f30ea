"""What a dead tracker costs a job: its steps per minute while MLflow's server is killed, beside those while it answers.

    python -m benchmarks.tracker_outage [--rounds 3] [--seconds 60] [--server .venv-mlflow/bin/mlflow]

server and stack up ─► job ─► for each round: steps with the server, SIGKILL, steps without it ─► server again ─► every step is in MLflow

Each time without the server is compared with the mean of its neighbours with it, so that a job that becomes faster does not count. The
client has to be installed beside the gateway, the server in an environment of its own:

    pip install mlflow-skinny
    python -m venv .venv-mlflow && .venv-mlflow/bin/pip install mlflow

The model is made by `python -m examples.demo.models tiny --out .millrace/models/tiny`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.peers import ours
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.processes import variables
from benchmarks.peers.shapes import SHAPES, job_of
from deploy.dashboards.local import wait_until_ready
from millrace.connection import find_token
from millrace.follower import follow_steps
from millrace.gateway import GatewayClient
from services.cli.stack.children import free_port
from services.common.errors import MillraceError
from services.common.jobs.folder import JobFolder
from services.common.service.process_tree import kill_tree

ROOT = Path(__file__).resolve().parents[1]
CHANGES = (
    "trackers.mlflow=true", "learner.steps=100000", "eval.enabled=false", "checkpoint.interval_steps=100000",
    "algorithm.filter_groups_enable=false", "learner.lr=1e-9",
)  # fmt: skip
"""Nothing but steps, each of which takes as long as the others: what a policy learns would make informative groups rare."""
METRIC = "actor/lr"
"""A figure that every step has."""
SETTLE_S = 20.0
"""Between a start or a kill and the count of steps: one interval of the trackers, and a bit."""
START_LIMIT_S, CATCH_UP_LIMIT_S = 300.0, 600.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Steps within a time."""

    per_min: float
    answers: bool
    """Whether the tracker's server was there."""


@contextmanager
def mlflow_server(command: Path, folder: Path, port: int) -> Iterator[None]:
    """MLflow's own server with a SQLite store; killed with all below it at the end. Raises DeadlineExceeded when it does not answer."""
    words = [
        str(command), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    log = folder / "mlflow.log"
    with log.open("a") as opened:
        server = subprocess.Popen(words, stdout=opened, stderr=opened, cwd=folder, start_new_session=True)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", server, log, timeout_s=START_LIMIT_S)
        yield
    finally:
        kill_tree(server.pid)
        server.wait()


def count_steps(job: JobFolder, seconds: float, *, answers: bool) -> Rate:
    """Steps per minute by the steps' own times, from SETTLE_S from now on. Raises SystemExit when there are none."""
    time.sleep(SETTLE_S)
    began = time.time()
    time.sleep(seconds)
    times = [at for step in job.history().steps if (at := step["at"]) >= began]
    if len(times) < 2:
        raise SystemExit("the job makes no steps")
    rate = Rate(60.0 * (len(times) - 1) / (times[-1] - times[0]), answers)
    print(f"{rate.per_min:7.1f} steps/min {'with' if answers else 'without'} the server", flush=True)
    return rate


def outages(rates: Sequence[Rate]) -> list[float]:
    """Each rate without the server ÷ the mean of its neighbours, which have it."""
    return [
        rate.per_min / ((rates[place - 1].per_min + rates[place + 1].per_min) / 2)
        for place, rate in enumerate(rates)
        if not rate.answers
    ]


def missing_steps(port: int, steps: set[int]) -> set[int]:
    """Steps of which MLflow has no point, once it has all or CATCH_UP_LIMIT_S have passed."""
    deadline = time.monotonic() + CATCH_UP_LIMIT_S
    while (missing := steps - _tracked(port)) and time.monotonic() < deadline:
        time.sleep(2.0)
    return missing


def _tracked(port: int) -> set[int]:
    base = f"http://127.0.0.1:{port}/api/2.0/mlflow"
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        experiment = client.get(f"{base}/experiments/get-by-name", params={"experiment_name": "millrace"}).json()
        wanted = {"experiment_ids": [experiment["experiment"]["experiment_id"]]}
        (run,) = client.post(f"{base}/runs/search", json=wanted).json()["runs"]
        asked: dict[str, Any] = {"run_id": run["info"]["run_id"], "metric_key": METRIC, "max_results": 25000}
        answer = client.get(f"{base}/metrics/get-history", params=asked).json()
    return {int(point["step"]) for point in answer.get("metrics", [])}


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Runs all rounds and prints the rates, their ratios and what MLflow lacks."""
    shape, port, home = SHAPES["demo"], free_port(), folder / "home"
    job = job_of(shape.spec, options.models / shape.folder, None, CHANGES)
    uri = {"MILLRACE_MLFLOW_URI": f"http://127.0.0.1:{port}"}
    server = (options.server, folder, port)
    with (
        variables(uri),
        ours.stack(home, options.models, None) as state,
        GatewayClient(state.url, find_token(state.token_file)) as client,
    ):
        with mlflow_server(*server):
            identity = str(client.submit(job)["id"])
            next(follow_steps(client, identity, timeout_s=START_LIMIT_S))
            history = JobFolder(home / "jobs" / identity)
            rates = [count_steps(history, options.seconds, answers=True)]
        for _ in range(options.rounds):
            rates.append(count_steps(history, options.seconds, answers=False))
            with mlflow_server(*server):
                rates.append(count_steps(history, options.seconds, answers=True))
        with mlflow_server(*server):
            ours.cancel(client, identity)
            steps = {int(step["step"]) for step in history.history().steps}
            missing = missing_steps(port, steps)
    found = outages(rates)
    print(describe_machine(theirs=False))
    print(f"without ÷ with: median {median(found):.3f} of {', '.join(f'{ratio:.3f}' for ratio in found)}")
    print(f"steps {len(steps)}, missing in MLflow {len(missing)}", flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="kills of the server")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each count of steps")
    parser.add_argument(
        "--server", type=Path, default=ROOT / ".venv-mlflow" / "bin" / "mlflow", help="MLflow's command"
    )
    home = Path(os.environ.get("MILLRACE_HOME", ".millrace"))
    parser.add_argument("--models", type=Path, default=home.resolve() / "models", help="directory of the demo's model")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="outage-") as folder:
            measure(options, Path(folder))
    except MillraceError as error:
        sys.exit(f"tracker_outage: {error}")


if __name__ == "__main__":
    main()
