"""Trains a short job under a real Prometheus, asks everything that the dashboards ask, and writes docs/dashboards.md and the previews.

`python -m deploy.dashboards.record [--steps 120]`, from the repository's root, with `prometheus` and `promtool` on the PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deploy.dashboards.local import local_config, running_prometheus
from deploy.dashboards.preview import draw_all
from deploy.dashboards.survey import DEPLOY, RULES, ask
from deploy.dashboards.table import write_page
from millrace.connection import find_token
from millrace.gateway import GatewayClient
from services.cli.up import detach, run_down
from services.common.errors import MillraceError
from services.common.service.stack_state import UpState, require_state
from tests.judge_server import judge_thread
from tests.tiny_classifier import write_tiny_classifier

MODELS = DEPLOY.parent / ".millrace" / "models"
JOB_TIMEOUT_S = 1200.0
SCRAPE_S = 2
SETTLE_S = 3.0 * SCRAPE_S
MODEL = "tiny-moe"
REWARD_MODEL = "tiny-reward"
REWARD: dict[str, Any] = {
    "verifiers": {"*": "all"},
    "rubrics": {
        "all": {
            "verifier_function": ["reasoning_gym", "graded", "scored"], "verifier_weight": [1.0, 0.01, 0.01],
            "accuracy_of": "reasoning_gym",
        }
    },
    "judges": {"graded": {"endpoint": "stand-in", "requests_at_once": 32}},
    "reward_models": {"scored": {"path": REWARD_MODEL}},
}  # fmt: skip
"""The verifier decides; a stand-in of a judge, always content, and a tiny reward model are there to be seen."""
LEARNING: dict[str, dict[str, Any]] = {
    "algorithm": {
        "preset": "ppo", "filter_groups_enable": True, "kl_coefficient": 0.001, "importance_correction": "masked",
        "importance_weight_floor": 0.5, "importance_weight_cap": 2.0,
    },
    "learner": {"mini_batch_size": 32},
    "critic": {"value_clip": 0.5},
    "reference": {},
}  # fmt: skip
"""All that the dashboards show of learning: a critic, a reference, a correction, several optimizer steps a batch; MODEL has experts."""
ENDED = ("succeeded", "failed", "cancelled")


def record(steps: int) -> None:
    """The whole course; exits where the job fails or a query returns nothing."""
    maker = [sys.executable, "-m", "examples.demo.models", MODEL, "--out", str(MODELS / MODEL)]
    subprocess.run(maker, check=True)
    with tempfile.TemporaryDirectory(prefix="millrace-record-") as folder:
        home, rewarding = Path(folder) / "home", Path(folder) / "reward"
        write_tiny_classifier(rewarding / REWARD_MODEL)
        with (
            judge_thread() as judge,
            _stack(home, rewarding, judge.url) as state,
            running_prometheus(local_config(state, interval_s=SCRAPE_S), Path(folder)) as prometheus,
        ):
            started = time.time()
            _train(state, steps)
            time.sleep(SETTLE_S)
            ended = time.time()
            answers = ask(prometheus, started, ended)
            draw_all(prometheus, started, ended)
            empty = [f"{answer.asked_by}: {answer.expr}" for answer in answers if not answer.with_data]
            if empty:
                sys.exit("these queries returned nothing:\n" + "\n".join(empty))
    seconds = f"{ended - started:.0f}"
    run = f"A run of {steps} steps of the demo's job under Prometheus, {seconds} s; {len(answers)} queries, none without data."
    write_page(answers, run, check_with_promtool())


def check_with_promtool() -> str:
    """What promtool says of configuration and rules.

    Raises:
        subprocess.CalledProcessError: it finds fault with them.
    """
    rules = [str(path.relative_to(DEPLOY.parent)) for path in sorted(RULES.glob("*.yml"))]
    commands = [
        ["promtool", "check", "config", "--syntax-only", "deploy/prometheus/prometheus.yml"],
        ["promtool", "check", "rules", *rules],
    ]
    said = []
    for command in commands:
        done = subprocess.run(command, cwd=DEPLOY.parent, capture_output=True, text=True, check=True)
        said += [f"$ {' '.join(command)}", done.stdout.strip()]
    return "\n".join(said)


@contextmanager
def _stack(home: Path, rewarding: Path, judge_url: str) -> Iterator[UpState]:
    os.environ["MILLRACE_MODEL_ROOTS"] = os.pathsep.join(map(str, (MODELS, rewarding)))
    os.environ["MILLRACE_JUDGE_ENDPOINTS"] = json.dumps({"stand-in": {"url": judge_url, "model": "stand-in"}})
    detach(home, ["--port", "0"], print)
    try:
        yield require_state(home)
    finally:
        run_down(home, print)


def _train(state: UpState, steps: int) -> None:
    spec: dict[str, Any] = yaml.safe_load((DEPLOY / "config/jobs/demo.yaml").read_text())
    spec["model"]["path"] = str(MODELS / MODEL)
    spec["learner"]["steps"] = steps
    spec["reward"] = REWARD
    for section, changes in LEARNING.items():
        spec[section] = spec.get(section, {}) | changes
    spec["checkpoint"]["interval_steps"] = max(1, steps // 4)
    spec["eval"] |= {"tasks": 64, "interval_steps": max(1, steps // 4)}
    with GatewayClient(state.url, find_token(state.token_file)) as client:
        job_id = client.submit(spec)["id"]
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while (job := client.job(job_id))["state"] not in ENDED and time.monotonic() < deadline:
            time.sleep(1.0)
    if job["state"] != "succeeded":
        sys.exit(f"job {job_id} is {job['state']}: {job['cause']}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m deploy.dashboards.record", description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of the job")
    try:
        record(parser.parse_args().steps)
    except MillraceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
