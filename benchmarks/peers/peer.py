"""TRL's side: one run of `trl_loop` in the peers' environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.peers.figures import Plan, Run, Step, is_measured, longest_s
from benchmarks.peers.processes import Child, PeakMemory, SideError
from benchmarks.peers.shapes import Shape

NAME = "TRL"
START_LIMIT_S = 120.0


def run_peer(python: Path, job: dict[str, Any], shape: Shape, plan: Plan, folder: Path) -> Run:
    """Trains in a fresh process, whose files go into a new `folder`. Raises SideError when it fails."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    command = [
        str(python), "-m", "benchmarks.peers.trl_loop", "--job", str(folder / "job.json"), "--out", str(folder / "out"),
        "--plan", TypeAdapter(Plan).dump_json(plan).decode(), "--micro-batch", str(shape.micro_batch),
        *(["--bf16"] if shape.bf16 else []),
    ]  # fmt: skip
    limit_s = START_LIMIT_S + longest_s(plan)
    threads = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    began, steps = 0.0, []
    with Child(command, folder / "trl.log", limit_s, threads) as child, PeakMemory(child.pid) as memory:
        for line in child.lines():
            if not line.startswith('{"'):  # what the trainer prints for people
                continue
            fields = json.loads(line)
            if "began" in fields:
                began = fields["began"]
            else:
                steps.append(Step(**fields))
    if not is_measured(steps, plan):
        raise SideError(f"trl ended after {len(steps)} steps")
    return Run(tuple(steps), memory.peak_bytes, began)
