"""The demo: starts the stack, submits a job over HTTP, shows it learn, and stops what it started.

model ─► up ─► POST /jobs ─► one line per step ─► held-out accuracy before and after ─► curve.png, table.md ─► down
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo.curve import draw_curve
from examples.demo.report import write_table
from millrace.connection import find_token
from millrace.gateway import GatewayClient
from services.cli.up import detach, run_down
from services.cli.views.follow import show_steps
from services.cli.views.jobs import print_rollouts
from services.common.errors import MillraceError, ModelError
from services.common.jobs.record import JobState
from services.common.spec.job import parse_spec

JOBS = Path(__file__).parents[2] / "deploy" / "config" / "jobs"
EPISODES = 3
"""That are shown at the end."""


@dataclass(frozen=True, slots=True)
class Demo:
    """One of the demos."""

    spec: str
    model: str
    title: str
    needed_rise: float
    """The demo fails when held-out accuracy rose by less."""


DEMOS = {
    "tiny": Demo(
        "demo.yaml", "tiny", "A 0.4 M-parameter policy learns to add (DAPO, vLLM + Megatron-core on a CPU)", 0.25
    ),
    "smollm2": Demo(
        "demo-smollm2.yaml",
        "smollm2-135m-instruct",
        "SmolLM2-135M-Instruct learns chain_sum (DAPO, vLLM + Megatron-core on a CPU)",
        0.2,
    ),
    "guess": Demo(
        "demo-guess.yaml",
        "guess",
        "A small policy learns to guess by halves (DAPO, vLLM + Megatron-core on a CPU)",
        0.37,
    ),
    "calculator": Demo(
        "demo-calculator.yaml",
        "calculator",
        "A small policy learns to use a calculator (DAPO, vLLM + Megatron-core on a CPU)",
        0.6,
    ),
}


def run_demo(name: str, home: Path, console: Console, *, seed: int = 0) -> bool:
    """Runs a demo; whether the policy learned what was asked. `seed`: of the training tasks."""
    demo, started = DEMOS[name], time.monotonic()
    _make_model(name, home)
    spec = parse_spec((JOBS / demo.spec).read_text())
    document = spec.model_dump(mode="json")
    document["data"]["train"]["seed"] = seed
    console.print(f"starting redis, gateway, reward, environment, learner and rollout (logs: {home / 'logs'})")
    state = detach(home, ["--port", "0"], console.print)
    try:
        with GatewayClient(state.url, find_token(state.token_file)) as client, _no_job_left(client, spec.name):
            job = client.submit(document)
            console.print(f"job {job['id']} submitted to {state.url}")
            show_steps(client, job, console)
            record, history = client.job(job["id"]), client.history(job["id"])
            if spec.environment is not None:
                _show_episodes(client, job["id"], console)
    finally:
        run_down(home, console.print)
    if record["state"] != "succeeded":
        console.print(f"the job {record['state']}: {record['cause']}", markup=False)
        return False
    return _report(demo, home, record, history, time.monotonic() - started, console)


def _show_episodes(client: GatewayClient, job_id: str, console: Console) -> None:
    """Some of the newest group."""
    newest = client.rollouts(job_id, count=1)
    print_rollouts(console, [{**group, "rollouts": group["rollouts"][:EPISODES]} for group in newest])


@contextlib.contextmanager
def _no_job_left(client: GatewayClient, name: str) -> Iterator[None]:
    """Cancels what an interrupted demo left unfinished, before (it would be trained first) and after."""

    def cancel() -> None:
        for job in client.jobs():
            if job["name"] == name and not JobState(job["state"]).ended:
                client.cancel(job["id"])

    cancel()
    try:
        yield
    finally:
        with contextlib.suppress(MillraceError):
            cancel()


def _make_model(name: str, home: Path) -> None:
    """In a process of its own: what it imports is large and is needed no more."""
    folder = home / "models" / DEMOS[name].model
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "examples.demo.models", name, "--out", str(folder)]
    if subprocess.run(command, check=False).returncode != 0:
        raise ModelError(f"the demo's model could not be made: {folder}")


def _report(
    demo: Demo, home: Path, record: dict[str, Any], history: dict[str, Any], seconds: float, console: Console
) -> bool:
    folder = home / "demo" / record["id"]
    folder.mkdir(parents=True, exist_ok=True)
    steps, evals = history["steps"], history["evals"]
    draw_curve(folder / "curve.png", demo.title, steps, evals)
    write_table(folder / "table.md", record, steps, evals, seconds)
    before, after = evals[0]["avg_at_k"], evals[-1]["avg_at_k"]
    pauses = [step["pause_s"] for step in steps if step["pause_s"] is not None]
    console.print(f"held-out avg@{evals[0]['k']}: {before:.3f} -> {after:.3f} ({after - before:+.3f})")
    if pauses:
        console.print(f"generation paused per weight sync: median {sorted(pauses)[len(pauses) // 2] * 1000:.0f} ms")
    console.print(f"groups: {record['groups']}", markup=False)
    console.print(
        f"curve: {folder / 'curve.png'}\ntable: {folder / 'table.md'}\nweights: {record['export']}", markup=False
    )
    console.print(f"{seconds:.0f} s in all")
    if after - before < demo.needed_rise:
        console.print(f"the demo FAILED: held-out accuracy was to rise by {demo.needed_rise}")
        return False
    return True


def main() -> None:
    """`python -m examples.demo.run --model tiny|smollm2|guess|calculator`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(DEMOS), default="tiny")
    parser.add_argument("--seed", type=int, default=0, help="of the training tasks")
    parser.add_argument("--home", type=Path, default=Path(os.environ.get("MILLRACE_HOME", ".millrace")))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(soft_wrap=True)
    try:
        learned = run_demo(arguments.model, arguments.home.resolve(), console, seed=arguments.seed)
    except MillraceError as error:
        console.print(f"demo: {error}", markup=False)
        sys.exit(1)
    sys.exit(0 if learned else 1)


if __name__ == "__main__":
    main()
