"""Shapes of the comparison: the jobs, the ways to run them, and how long each is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Learning, Plan
from services.cli.overrides import apply_change, load_job
from services.common.spec.job import parse_spec

JOBS = Path(__file__).parents[2] / "deploy" / "config" / "jobs"

WAYS: Mapping[str, tuple[str, ...]] = {
    "async": (),
    "sync": ("off_policy.max_off_policy_steps=0",),
    "async unfiltered": ("algorithm.filter_groups_enable=false",),
    "sync unfiltered": ("algorithm.filter_groups_enable=false", "off_policy.max_off_policy_steps=0"),
    "turns unfiltered": (
        "algorithm.filter_groups_enable=false", "placement.rollout=colocated", "learner.threads_per_rank=0",
    ),
    "fsdp2 unfiltered": ("algorithm.filter_groups_enable=false", "learner.backend=fsdp2"),
}  # fmt: skip
"""Way → changes of the job. Unfiltered, equal samples are trained as by the plain loop, which does not filter."""

SHORT = (
    "name=peers",
    "learner.steps=10000",
    "checkpoint.interval_steps=10000",
    "checkpoint.export=false",
    "eval.enabled=false",
)
"""Changes for measuring: no evaluation, and no end; a run is ended when its time is over."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One job and its measurement."""

    spec: str
    """File in deploy/config/jobs."""
    model: str
    """Name for `examples.demo.models`."""
    folder: str
    """The model's directory below <home>/models."""
    ways: tuple[str, ...]
    ours: Plan
    peer: Plan
    micro_batch: int
    """Samples of TRL's forward and backward pass."""
    bf16: bool
    """TRL's products in bfloat16, with weights in float32: its default, and faster on large models where the CPU has bfloat16."""
    limits: str
    """Shape of benchmarks/learner.py with the same sizes."""
    learning: Learning | None = None
    """Reward whose time is compared; None where so few steps teach nothing."""
    learning_rounds: int = 0
    """First rounds in which each way goes on until it is reached."""
    needs_data: bool = False
    """Whether its file must be given."""


SHAPES = {
    "demo": Shape(
        "demo.yaml", "tiny", "tiny", ("async", "sync", "async unfiltered"), ours=Plan(8, 8, 30.0), peer=Plan(4, 8, 30.0),
        micro_batch=512, bf16=False, limits="demo", learning=Learning(0.55, 5, 90.0), learning_rounds=99,
    ),
    "demo-smollm2": Shape(
        "demo-smollm2.yaml", "smollm2", "smollm2-135m-instruct", ("async", "sync", "async unfiltered"), ours=Plan(3, 3, 30.0),
        peer=Plan(1, 4, 0.0), micro_batch=48, bf16=True, limits="smollm2", learning=Learning(0.4, 3, 300.0), learning_rounds=1,
    ),
    "gsm8k": Shape(
        "gsm8k-smollm2.yaml", "smollm2", "smollm2-135m-instruct", ("async unfiltered",), ours=Plan(3, 3, 30.0),
        peer=Plan(1, 4, 0.0), micro_batch=16, bf16=True, limits="gsm8k", needs_data=True,
    ),
}  # fmt: skip


def job_of(spec: str, model: Path, data: Path | None, changes: tuple[str, ...] = ()) -> dict[str, Any]:
    """The document for measuring of a file in deploy/config/jobs. Model and data are named by absolute paths; `changes` are applied last.

    Raises:
        ConfigError: a change does not apply, or the spec is not valid.
    """
    document = load_job(JOBS / spec, SHORT)
    document["model"]["path"] = str(model)
    if data is not None:
        document["data"]["train"]["source"] = str(data)
    for change in changes:
        apply_change(document, change)
    parse_spec(json.dumps(document))
    return document
