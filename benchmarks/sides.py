"""Each side with the other idle: training without rollouts, and the rollout side without training, in one run.

    python -m benchmarks.sides [--model demo-smollm2] [--steps 60] [--seconds 20]

vLLM alone ─► stack up ─► a job whose first step never begins ─► the job as it is ─► down ─► the same batches, trained with nothing beside

Training: the time of a step (`train_s`, the ranks' train call) while rollouts run, divided by the time of the same batch, taken from the
journal, while nothing else runs: by ranks with the same threads on the same cores. The rollout side: groups that the reward service sends
on while the learner's ranks wait, beside what vLLM alone samples of the same prompts on one core.

The model is made by `python -m examples.demo.models tiny --out .millrace/models/tiny`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.group_cost import print_parts, thread_seconds
from benchmarks.peers import ours
from benchmarks.peers.figures import STEP_LIMIT_S
from benchmarks.peers.limits import sampling_alone
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.processes import variables
from benchmarks.peers.recorded import train_again
from benchmarks.peers.shapes import SHAPES, Shape, job_of
from millrace.connection import find_token
from millrace.follower import follow_steps
from millrace.gateway import GatewayClient
from millrace.records import ENDED
from services.cli.stack.plan import available_cores, plan_cores
from services.common.jobs.step_record import StepRecord
from services.common.service.stack_state import UpState
from services.common.spec.job import JobSpec

ROOT = Path(__file__).resolve().parents[1]
ROLLOUT, TRAINING = SIDES = ("rollout", "training")
POLL_INTERVAL_S = 0.5
START_LIMIT_S = 300.0
WARM_UP_S = 5.0
SKIPPED_STEPS = 8
"""At most: the first steps of a job are slow, and a third of a short one is enough."""
SPARE = 1.5
"""More groups than vLLM alone could sample while the learner is idle, so that no step begins."""
DEFAULTS = {"demo": (60, 20.0), "demo-smollm2": (12, 60.0)}
"""Steps of the job, and seconds in which groups are counted."""
JUDGED = re.compile(r'^millrace_reward_groups_total\{result="judged"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Groups that came back while the learner was idle."""

    groups: int
    seconds: float
    before: dict[tuple[str, int], float]
    """Processor time of every thread of the stack at the begin."""
    after: dict[tuple[str, int], float]


@dataclass(frozen=True, slots=True)
class Bench:
    """One job on one machine."""

    shape: Shape
    model: Path
    changes: tuple[str, ...]
    steps: int
    seconds: float

    def job(self, *more: str) -> dict[str, Any]:
        """The job's document, with further changes."""
        return job_of(self.shape.spec, self.model, None, (*self.changes, *more))

    @property
    def skipped(self) -> int:
        """Steps that are left out on both sides."""
        return min(SKIPPED_STEPS, self.steps // 3)


def sample_idle(
    state: UpState, job_with: Callable[..., dict[str, Any]], seconds: float, groups_per_s: float
) -> Sampled:
    """Counts groups, for so many seconds, of a job whose first step needs more than can be sampled meanwhile.

    `job_with`: the job's document with these changes. `groups_per_s`: at least what can be sampled, of vLLM alone say.
    All its tasks are issued before the count begins. Raises SystemExit when a step began, or tasks ran out.
    """
    spec = JobSpec.model_validate(job_with())
    groups = spec.slots + math.ceil(SPARE * groups_per_s * (WARM_UP_S + seconds))
    changes = (f"algorithm.filter_groups_train_batch_size={groups}", "off_policy.max_off_policy_steps=0")
    with GatewayClient(state.url, find_token(state.token_file)) as client:
        job = str(client.submit(job_with(*changes))["id"])
        before_job = judged(client)
        wait(client, job, lambda record: record["groups"].get("issued", 0) >= groups and judged(client) > before_job)
        time.sleep(WARM_UP_S)
        first, before, began = judged(client), thread_seconds(state.pid), time.monotonic()
        time.sleep(seconds)
        last, took, after = judged(client), time.monotonic() - began, thread_seconds(state.pid)
        record = client.job(job)
        if record["step"] or record["groups"]["issued"] - (last - before_job) < spec.rollout.max_concurrent_groups:
            raise SystemExit(f"a step began, or tasks ran out: {record['groups']}, {last - before_job} judged")
        ours.cancel(client, job)
    return Sampled(last - first, took, before, after)


def judged(client: GatewayClient) -> int:
    """Groups that the stack's reward service has sent on since it began."""
    ports = [worker["metrics_port"] for worker in client.workers() if worker["kind"] == "reward"]
    pages = [httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text for port in ports]
    return sum(int(float(found)) for page in pages for found in JUDGED.findall(page))


def wait(client: GatewayClient, job: str, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Waits until the job's record is as wanted. Raises SystemExit when the job ended before, or takes too long."""
    deadline = time.monotonic() + START_LIMIT_S
    while not reached(record := client.job(job)):
        if record["state"] in ENDED or time.monotonic() > deadline:
            raise SystemExit(f"the job is {record['state']}: {record['cause']}")
        time.sleep(POLL_INTERVAL_S)


def train_beside(state: UpState, bench: Bench) -> tuple[str, dict[int, float]]:
    """The job as it is: its identity, and step → seconds of its training. It is cancelled, so that rollouts run up to the last step."""
    seconds: dict[int, float] = {}
    with GatewayClient(state.url, find_token(state.token_file)) as client:
        job = str(client.submit(bench.job())["id"])
        for line in follow_steps(client, job, timeout_s=START_LIMIT_S + bench.steps * STEP_LIMIT_S):
            record = StepRecord.model_validate(line)
            if record.train_s is not None:
                seconds[record.step] = record.train_s
            if record.step >= bench.steps:
                break
        ours.cancel(client, job)
    return job, {step: took for step, took in seconds.items() if step <= bench.steps}


def report_training(beside: Mapping[int, float], alone: Mapping[int, float], skipped: int) -> None:
    """Prints the ratio of each step's two times. Raises SystemExit when a step was not trained again."""
    if missing := sorted(beside.keys() - alone.keys()):
        raise SystemExit(f"steps {missing} were not trained again")
    steps = [step for step in sorted(beside) if step > skipped]
    ratios = [beside[step] / alone[step] for step in steps]
    print(f"training, steps {steps[0]} to {steps[-1]}: medians of a step, ms")
    print(f"  while rollouts run     {1000 * median(beside[step] for step in steps):10.1f}")
    print(f"  the same batches alone {1000 * median(alone[step] for step in steps):10.1f}")
    whole = sum(beside[step] for step in steps) / sum(alone[step] for step in steps)
    low, middle, high = (f"{quantile(ratios, share):.2f}" for share in (0.1, 0.5, 0.9))
    print(f"  ratio of a step: median {middle} (tenths: {low} to {high}); of all steps together {whole:.2f}")


def report_sampling(sampled: Sampled, group_size: int, alone: float) -> None:
    """Prints the ratio, and what the processor did in the window."""
    rate = sampled.groups * group_size / sampled.seconds
    print(f"rollout side, learner idle, over {sampled.seconds:.0f} s: samples/s")
    print(f"  engine to reward service {rate:10.1f}")
    print(f"  vLLM alone, one core     {alone:10.1f}")
    print(f"  ratio {rate / alone:.2f}")
    print_parts(sampled.before, sampled.after, sampled.groups, sampled.seconds)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def describe_cores() -> str:
    """What runs on which cores in a stack of one rollout server."""
    cores = available_cores()
    plan = plan_cores(cores, 1)
    learner, engine = sorted(plan.learner) or cores, sorted(plan.rollout[0]) or cores
    return (
        f"cores {cores}: the engine's computing threads on {engine}, the learner on {learner} (on all where its ranks have more threads); "
        "rollout service, reward service, Redis and gateway on any"
    )


def measure(bench: Bench, models: Path, sides: Sequence[str]) -> None:
    """Measures the ratios of these sides, and prints them."""
    job = bench.job()
    group_size = JobSpec.model_validate(job).rollout.group_size
    with tempfile.TemporaryDirectory(prefix="millrace-sides-") as name:
        folder = Path(name)
        alone = sampling_alone(bench.shape.limits, job, folder, cores=1)["samples_per_s"] if ROLLOUT in sides else 0.0
        with ours.stack(folder / "home", models, None) as state:
            if ROLLOUT in sides:
                report_sampling(sample_idle(state, bench.job, bench.seconds, alone / group_size), group_size, alone)
            if TRAINING not in sides:
                return
            identity, beside = train_beside(state, bench)
        with variables({"MILLRACE_MODEL_ROOTS": json.dumps([str(models)])}):
            again = train_again(folder / "home", identity, max(beside), folder)
    report_training(beside, again, bench.skipped)


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DEFAULTS, default="demo", help="shape of the job")
    parser.add_argument("--side", choices=SIDES, action="append", help="which; both by default")
    parser.add_argument("--steps", type=int, help="of the job that trains; demo: 60, demo-smollm2: 12")
    parser.add_argument("--seconds", type=float, help="in which groups are counted; demo: 20, demo-smollm2: 60")
    parser.add_argument("--set", action="append", default=[], help="a change of the job's spec: section.key=value")
    parser.add_argument("--models", type=Path, default=ROOT / ".millrace" / "models")
    options = parser.parse_args()
    shape, models = SHAPES[options.model], options.models.resolve()
    steps, seconds = DEFAULTS[options.model]
    print(f"{options.model}: {describe_machine()}\n{describe_cores()}", flush=True)
    bench = Bench(shape, models / shape.folder, tuple(options.set), options.steps or steps, options.seconds or seconds)
    measure(bench, models, options.side or SIDES)


if __name__ == "__main__":
    main()
