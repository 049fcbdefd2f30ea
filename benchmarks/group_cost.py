"""Processor time of a group by process, while a real job runs, beside what vLLM alone and the learner alone need for it in the same run.

    python -m benchmarks.group_cost [--model tiny] [--steps 60] [--set off_policy.max_off_policy_steps=0]

Starts the stack as `millrace up` does, submits the demo's job without its evaluation, and reads the processor time of every thread
between two steps. What neither part alone needs is the price of the service. The model is made by
`python -m examples.demo.models tiny --out .millrace/models/tiny`.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from benchmarks.learner import SHAPES as LEARNER_SHAPES
from benchmarks.learner import SHARED, timings
from benchmarks.peers import ours
from benchmarks.peers.limits import LEARNER_STEPS, sampling_alone
from benchmarks.peers.shapes import SHAPES, job_of
from millrace.connection import find_token
from millrace.gateway import GatewayClient
from services.common.service.process_tree import family
from services.common.service.stack_state import UpState
from services.common.spec.job import JobSpec

ROOT = Path(__file__).resolve().parents[1]
POLL_INTERVAL_S = 0.2
PARTS = (
    # A word of the command line, of its own or of the parent, and the part that the process is.
    ("EngineCore", "engine"),
    ("services.learner.weights.process", "weights' process"),
    ("services.learner.rank ", "rank"),
    ("services.learner", "learner agent"),
    ("services.rollout", "rollout service"),
    ("services.reward", "reward service"),
    ("services.environment", "environment service"),
    ("services.gateway", "gateway"),
    ("valkey", "redis"),
    ("redis", "redis"),
)


@dataclass(frozen=True, slots=True)
class Alone:
    """Milliseconds of one core for a group, with nothing beside."""

    sampling: float
    training: float
    step_s: float
    """Seconds of one step of the learner, on one thread."""


def measure_alone(name: str, job: dict[str, Any], group_size: int, folder: Path) -> Alone:
    """Measures vLLM offline on the job's prompts, on one core, and the learner on batches of the job's sizes, with one thread."""
    engine = sampling_alone(name, job, folder, cores=1)["samples_per_s"]
    shape = LEARNER_SHAPES[name]
    step_s = median(timings(name, 1, LEARNER_STEPS, (SHARED,))[SHARED].seconds)
    return Alone(1000 * group_size / engine, 1000 * step_s / shape.groups, step_s)


@dataclass(frozen=True, slots=True)
class Reading:
    """Processor time at one moment."""

    at: float
    seconds: dict[tuple[str, int], float]
    """By part and thread id."""
    groups: int
    """Groups with a fate, of those that were judged."""
    step: int


def read(root: int, record: dict[str, Any]) -> Reading:
    """Reads every thread of the stack."""
    seconds = thread_seconds(root)
    fates = record["groups"]
    judged = fates["trained"] + fates["degenerate"] + fates["stale"]
    return Reading(time.monotonic(), seconds, judged, record["step"])


def thread_seconds(root: int) -> dict[tuple[str, int], float]:
    """Processor time of every thread of the stack whose supervisor is `root`, by part and thread id."""
    seconds: dict[tuple[str, int], float] = {}
    for process in family(root):
        try:
            name = part_of(process, root)
            for thread in process.threads():
                part = f"{name}: {'main thread' if thread.id == process.pid else 'other threads'}"
                split = part if name in {"engine", "rank"} else name
                seconds[split, thread.id] = thread.user_time + thread.system_time
        except psutil.Error:
            continue
    return seconds


def part_of(process: psutil.Process, root: int) -> str:
    """Which part of the stack a process is."""
    if process.pid == root:
        return "up"
    name = f"{process.name()} {' '.join(process.cmdline())} "
    if "sandbox.forkserver" in name:
        return f"{part_of(process.parents()[0], root)}: sandbox"
    if any(": sandbox" in part_of(parent, root) for parent in process.parents()[:1] if parent.pid != os.getpid()):
        return part_of(process.parents()[0], root)
    return next((part for word, part in PARTS if word in name), "others")


def run(state: UpState, job: dict[str, Any], steps: int) -> tuple[Reading, Reading, list[dict[str, Any]]]:
    """Runs the job; the readings at the ends of the window, and its steps' records."""
    with GatewayClient(state.url, find_token(state.token_file)) as client:
        identity = client.submit(job)["id"]
        readings = list(window(client, identity, state.pid, steps))
        return readings[0], readings[-1], client.history(identity)["steps"]


def window(client: GatewayClient, job: str, root: int, steps: int) -> Iterator[Reading]:
    """Readings from after the first steps, whose caches are cold, to before the last."""
    skipped = min(8, steps // 4)
    while True:
        record = client.job(job)
        if record["step"] >= skipped:
            yield read(root, record)
        if record["state"] in {"failed", "cancelled", "succeeded"} or record["step"] >= steps - 2:
            break
        time.sleep(POLL_INTERVAL_S if record["step"] < skipped or record["step"] > steps - 6 else 2.0)
    if record["state"] in {"failed", "cancelled"}:
        raise SystemExit(f"the job {record['state']}: {record['cause']}")


def report(first: Reading, last: Reading, records: list[dict[str, Any]], group_size: int, alone: Alone | None) -> None:
    """Prints the table."""
    groups, wall = last.groups - first.groups, last.at - first.at
    inside = [record for record in records if first.step < record["step"] <= last.step]
    trained = sum(record["groups_trained"] for record in inside)
    print(f"{wall:.1f} s, steps {first.step} to {last.step}, {groups} groups judged, {trained} trained")
    print(f"{trained * group_size / wall:8.1f} trained samples/s   {groups * group_size / wall:8.1f} judged samples/s")
    for name in ("step_s", "train_s", "wait_s", "sync_s", "pause_s", "generated_tokens_per_s", "policy_age_mean"):
        values = [record[name] for record in inside if record[name] is not None]
        print(f"{name:24} median {median(values):9.3f}   mean {fmean(values):9.3f}")
    total = print_parts(first.seconds, last.seconds, groups, wall)
    if alone is not None:
        step_s = median(record["train_s"] for record in inside)
        print(f"{'vLLM alone':32} {alone.sampling:8.2f}")
        print(
            f"{'learner alone':32} {alone.training:8.2f}   its step takes {step_s / alone.step_s:.2f} times as long here"
        )
        print(f"{'the rest: neither of the two':32} {total - alone.sampling - alone.training * trained / groups:8.2f}")


def print_parts(
    before: dict[tuple[str, int], float], after: dict[tuple[str, int], float], groups: int, wall_s: float
) -> float:
    """Prints the processor time of each part between two readings of `thread_seconds`; milliseconds of all for a group."""
    spent: dict[str, float] = defaultdict(float)
    for (part, thread), seconds in after.items():
        spent[part] += seconds - before.get((part, thread), 0.0)
    print("part                            ms a group   of one core")
    for part, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{part:32} {1000 * seconds / groups:8.2f}   {100 * seconds / wall_s:8.1f} %")
    total = 1000 * sum(spent.values()) / groups
    print(f"{'in all':32} {total:8.2f}   {total * groups / wall_s / 10:8.1f} %")
    return total


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="demo", help="shape of the job")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], help="a change of the job's spec: section.key=value")
    parser.add_argument("--models", type=Path, default=ROOT / ".millrace" / "models")
    parser.add_argument("--no-limits", dest="limits", action="store_false", help="leave the parts alone out")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    shape = SHAPES[options.model]
    job = job_of(
        shape.spec, options.models.resolve() / shape.folder, None, (f"learner.steps={options.steps}", *options.set)
    )
    group_size = JobSpec.model_validate(job).rollout.group_size
    with tempfile.TemporaryDirectory(prefix="millrace-cost-") as name:
        folder = Path(name)
        alone = measure_alone(shape.limits, job, group_size, folder) if options.limits else None
        with ours.stack(folder / "home", options.models.resolve(), None) as state:
            first, last, records = run(state, job, options.steps)
    report(first, last, records, group_size, alone)


if __name__ == "__main__":
    main()
