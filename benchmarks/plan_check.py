"""How well `millrace plan` predicts: runs of the whole stack (vLLM and Megatron), each against a forecast from an earlier run.

    python benchmarks/plan_check.py [--home DIR] [--steps 60]

    rest         one server: its first third of steps predicts the other two
    synchronous  that server's run predicts max_off_policy_steps 0
    servers      that server's run predicts two servers
    shared       rest, with servers and learner that share the cores; printed, and not judged

A forecast supposes that each server has a device of its own. On a machine of two cores the first three get such devices: each iteration
of the engine takes DEVICE_S more, in which it leaves its core idle.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.connection import find_token
from millrace.gateway import GatewayClient
from millrace.records import ENDED
from services.cli.overrides import load_job
from services.cli.up import detach, run_down
from services.common.capacity.plan import make_plan
from services.common.capacity.rates import Rates, measure
from services.common.errors import MillraceError
from services.common.jobs.step_record import StepRecord
from services.common.spec.base import RECORDED
from services.common.spec.job import JobSpec

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "deploy" / "config" / "jobs" / "demo.yaml"
TOLERANCE = 0.15
POLL_INTERVAL_S = 0.5
SHORT = ("eval.enabled=false", "checkpoint.interval_steps=1000")
DEVICE_S = 0.05
DEVICE_CODE = f"""# As sitecustomize.py it is run by each Python process of the stack: vLLM's CPU worker is slower from then on.
import sys, time
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "vllm.v1.worker.cpu_worker":
            return None
        spec = super().find_spec(name, path, target)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            step = module.CPUWorker.execute_model
            def execute_model(self, *arguments, **options):
                time.sleep({DEVICE_S})
                return step(self, *arguments, **options)
            module.CPUWorker.execute_model = execute_model
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder)
"""


@contextmanager
def stack(home: Path, servers: int, *, devices: bool) -> Iterator[GatewayClient]:
    """The stack of this home with so many rollout servers, on devices of their own or on the shared cores."""
    folder, before = home / "device", os.environ.get("PYTHONPATH", "")
    if devices:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(DEVICE_CODE)
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before or ROOT}"
    try:
        state = detach(home, ["--port", "0", "--rollout", str(servers)], say)
        with GatewayClient(state.url, find_token(state.token_file)) as client:
            yield client
    finally:
        os.environ["PYTHONPATH"] = before
        run_down(home, say)


def run_job(client: GatewayClient, *changes: str) -> tuple[JobSpec, list[StepRecord]]:
    """Spec and step records of the demo's job with these changes.

    Raises:
        MillraceError: the job did not succeed.
    """
    job = client.submit(load_job(DEMO, [*SHORT, *changes]))
    while (record := client.job(job["id"]))["state"] not in ENDED:
        time.sleep(POLL_INTERVAL_S)
    if record["state"] != "succeeded":
        raise MillraceError(f"job {job['id']} {record['state']}: {record['cause']}")
    steps = [StepRecord.model_validate(step) for step in client.steps(job["id"])]
    return JobSpec.model_validate(record["spec"], context=RECORDED), steps


def compare(title: str, rates: Rates, specs: tuple[JobSpec, JobSpec], servers: int, measured: Rates) -> bool:
    """Prints the forecast from `rates` of the first spec against what the second measured; whether it is within TOLERANCE.

    A forecast that is a range fits if it reaches into TOLERANCE: its width is what the first run leaves open.
    """
    slow, fast = make_plan(rates, *specs, [servers]).rows[0].both
    low, high = (item.samples_per_s / measured.samples_per_s for item in (slow, fast))
    say(
        f"{title}: {slow.samples_per_s:,.1f} to {fast.samples_per_s:,.1f} samples/s predicted, {measured.samples_per_s:,.1f} "
        f"measured; predicted ÷ measured {low:.2f} to {high:.2f} (the run before: {rates.samples_per_s:,.1f})"
    )
    figures = {
        "servers idle": (slow.servers_idle, fast.servers_idle, 1 - measured.busy_share),
        "learner idle": (slow.learner_idle, fast.learner_idle, 1 - measured.learner_s / measured.period_s),
        "policy age": (slow.policy_age_mean, fast.policy_age_mean, measured.policy_age_mean),
    }
    for name, (one, other, found) in figures.items():
        say(f"    {name}: {one:.2f} to {other:.2f} predicted, {found:.2f} measured")
    say(f"    step of the learner alone: {rates.learner_s:.3f} s before, {measured.learner_s:.3f} s then")
    return low <= 1.0 + TOLERANCE and high >= 1.0 - TOLERANCE


def say(text: str) -> None:
    """A line for people."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def make_model(home: Path) -> None:
    """The demo's model, in a process of its own."""
    folder = home / "models" / "tiny"
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "examples.demo.models", "tiny", "--out", str(folder)], check=True)


def check(home: Path, steps: int) -> bool:
    """All four; whether each forecast that is judged was within TOLERANCE."""
    third, half = steps // 3, f"learner.steps={steps // 2}"
    with stack(home, 1, devices=True) as client:
        spec, one = run_job(client, f"learner.steps={steps}")
        fits = [compare("rest", measure(one[:third]), (spec, spec), 1, measure(one[third:]))]
        synchronous, alone = run_job(client, half, "off_policy.max_off_policy_steps=0")
    fits.append(compare("synchronous", measure(one), (spec, synchronous), 1, measure(alone)))
    with stack(home, 2, devices=True) as client:
        _, two = run_job(client, half)
    fits.append(compare("servers", measure(one), (spec, spec), 2, measure(two)))
    with stack(home, 1, devices=False) as client:
        _, shared = run_job(client, f"learner.steps={steps}")
    compare("shared", measure(shared[:third]), (spec, spec), 1, measure(shared[third:]))
    return all(fits)


def main() -> None:
    """Runs the checks in a home that is kept when it is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--home", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    say(f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory(prefix="millrace-plan-") as temporary:
        home = (arguments.home or Path(temporary)).resolve()
        make_model(home)
        fits = check(home, arguments.steps)
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()
