"""Colocated against separate, on both demo models: what engine and learner wait for, in one run.

    python -m benchmarks.placements [--job demo]

separate    engine and learner each on its own core
colocated   they take turns on both

Shares are of the time between the first and the last measured step. The learner waits for groups; a separate engine is idle while it has
no group in work, a colocated one while the learner does not wait, as it sleeps then. `benchmarks.peers.run --way` compares with TRL.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.machine import describe_machine
from benchmarks.peers.ours import cancel, stack
from benchmarks.peers.processes import ROOT
from benchmarks.peers.shapes import SHAPES, WAYS, Shape, job_of
from examples.demo.models import MODELS
from millrace.connection import find_token
from millrace.follower import follow_steps
from millrace.gateway import GatewayClient
from services.common.jobs.step_record import StepRecord

PLACEMENTS = {"separate": "async unfiltered", "colocated": "turns unfiltered"}
"""Placement → way of the comparison with the plain loop."""
STEPS = {"demo": 60, "demo-smollm2": 12}
HEADER = ("job", "placement", "samples/s", "learner waits", "engine idle", "policy age, steps")
WARM_SHARE = 6
"""One of so many steps is not measured: the first ones."""
STEP_LIMIT_S = 900.0


def records_of(shape: Shape, way: str, models: Path, steps: int) -> list[StepRecord]:
    """The records of so many steps of a new stack."""
    records: list[StepRecord] = []
    with (
        tempfile.TemporaryDirectory(prefix="placements-") as home,
        stack(Path(home), models, None) as state,
        GatewayClient(state.url, find_token(state.token_file)) as client,
    ):
        identity = str(client.submit(job_of(shape.spec, models / shape.folder, None, WAYS[way]))["id"])
        for line in follow_steps(client, identity, timeout_s=STEP_LIMIT_S):
            records.append(StepRecord.model_validate(line))
            if len(records) == steps:
                break
        cancel(client, identity)
    return records


def row_of(records: Sequence[StepRecord], *, colocated: bool) -> list[str]:
    """Samples a second, idle shares of learner and engine, and the mean age, of the steps after the warm ones."""
    first, *measured = records[len(records) // WARM_SHARE :]
    seconds = (measured[-1].at or 0.0) - (first.at or 0.0)
    samples = sum(record.sequences or 0 for record in measured)
    waited = sum(record.wait_s or 0.0 for record in measured)
    busy = sum(record.rollout_busy_s or 0.0 for record in measured)
    age = sum(record.policy_age_mean or 0.0 for record in measured) / len(measured)
    at_work = waited if colocated else min(busy, seconds)
    return [f"{samples / seconds:,.1f}", f"{waited / seconds:.0%}", f"{1 - at_work / seconds:.0%}", f"{age:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / ".millrace" / "models", metavar="DIR")
    parser.add_argument("--job", choices=STEPS, action="append", help="again for another; default: both")
    options = parser.parse_args(arguments)
    print(describe_machine(theirs=False), "\n")
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for name in options.job or STEPS:
        shape = SHAPES[name]
        MODELS[shape.model](options.models / shape.folder)
        for placement, way in PLACEMENTS.items():
            records = records_of(shape, way, options.models, STEPS[name])
            row = [name, placement, *row_of(records, colocated=placement == "colocated")]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
