"""How well `millrace plan` predicts: three runs of the whole stack (vLLM and Megatron), each against a forecast from an earlier run.

    python benchmarks/plan_check.py [--home DIR] [--steps 60]

    rest         the demo's job: its first third of steps predicts the other two
    synchronous  one slow server's run predicts max_off_policy_steps 0
    servers      that run predicts two such servers

On two cores servers and learner would take each other's time, which no forecast of separate devices holds for. So for the last two
checks each server's engine is made a slow device of its own: its processes are stopped for STOPPED of the time, in turns of TURN_S.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread

import psutil

from services.cli.client import ENDED, GatewayClient, JsonObject, find_token
from services.cli.overrides import load_job
from services.cli.stack.state import UpState, require_state
from services.cli.up import detach, run_down
from services.common.capacity.plan import make_plan
from services.common.capacity.rates import Rates, measure
from services.common.errors import MillraceError
from services.common.jobs.step_record import StepRecord
from services.common.service.process_tree import family
from services.common.spec.base import RECORDED
from services.common.spec.job import JobSpec

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "deploy" / "config" / "jobs" / "demo.yaml"
TOLERANCE = 0.15
POLL_INTERVAL_S = 0.5
SHORT = ("eval.enabled=false", "checkpoint.interval_steps=1000")
TURN_S = 0.04
STOPPED = 0.75


@contextmanager
def stack(home: Path, servers: int) -> Iterator[tuple[GatewayClient, UpState]]:
    """The stack of this home with so many rollout servers."""
    state = detach(home, ["--port", "0", "--rollout", str(servers)], say)
    try:
        with GatewayClient(state.url, find_token(state.token_file)) as client:
            yield client, require_state(home)
    finally:
        run_down(home, say)


def run_job(client: GatewayClient, *changes: str, slow: UpState | None = None) -> tuple[JobSpec, list[StepRecord]]:
    """Spec and step records of the demo's job with these changes; the engines of the stack `slow` are slow from the first step on.

    Raises:
        MillraceError: the job did not succeed.
    """
    job = client.submit(load_job(DEMO, [*SHORT, *changes]))
    record = _wait(client, job["id"], steps=1)
    with slow_engines(slow) if slow is not None else nullcontext():
        record = _wait(client, job["id"])
    if record["state"] != "succeeded":
        raise MillraceError(f"job {job['id']} {record['state']}: {record['cause']}")
    steps = [StepRecord.model_validate(step) for step in client.steps(job["id"])]
    return JobSpec.model_validate(record["spec"], context=RECORDED), steps


def _wait(client: GatewayClient, job_id: str, steps: float = math.inf) -> JsonObject:
    """The job's record, once it has done so many steps or has ended."""
    while (record := client.job(job_id))["state"] not in ENDED and record["step"] < steps:
        time.sleep(POLL_INTERVAL_S)
    return record


@contextmanager
def slow_engines(state: UpState) -> Iterator[None]:
    """Within it the engines of all rollout servers, which are their services' descendants, are stopped for STOPPED of the time.

    The servers take their turns at different times.
    """
    servers = [process.pid for name, process in state.processes.items() if name.startswith("rollout-")]
    ended = Event()
    threads = [Thread(target=_stop_in_turns, args=(pid, i / len(servers), ended)) for i, pid in enumerate(servers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _stop_in_turns(server: int, phase: float, ended: Event) -> None:
    looked_at, engine = 0.0, list[psutil.Process]()
    while not ended.is_set():
        if time.monotonic() - looked_at > 1.0:
            looked_at, engine = time.monotonic(), [member for member in family(server) if member.pid != server]
        now = time.monotonic() / TURN_S + phase
        _send(engine, signal.SIGCONT)
        time.sleep(max(0.0, (1.0 - STOPPED - now % 1.0)) * TURN_S)
        _send(engine, signal.SIGSTOP)
        time.sleep((1.0 - (time.monotonic() / TURN_S + phase) % 1.0) * TURN_S)
    _send(engine, signal.SIGCONT)


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


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
    """All three; whether each forecast was within TOLERANCE."""
    third = steps // 3
    half, synchronous = f"learner.steps={steps // 2}", "off_policy.max_off_policy_steps=0"
    with stack(home, 1) as (client, state):
        demo, records = run_job(client, f"learner.steps={steps}")
        fits = [compare("rest", measure(records[:third]), (demo, demo), 1, measure(records[third:]))]
        slow, one = run_job(client, half, slow=state)
        lone, alone = run_job(client, half, synchronous, slow=state)
        fits.append(compare("synchronous", measure(one), (slow, lone), 1, measure(alone)))
    with stack(home, 2) as (client, state):
        _, two = run_job(client, half, slow=state)
    fits.append(compare("servers", measure(one), (slow, slow), 2, measure(two)))
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
