"""Limits: what each part could do if it were alone on the machine, measured in the same run."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learner import PLAIN, SHARED, batch_of, timings
from benchmarks.learner import SHAPES as LEARNER_SHAPES
from benchmarks.learner import Shape as LearnerShape
from benchmarks.peers.processes import Child, SideError
from benchmarks.simulated.hops import bare_hops_per_s
from benchmarks.weight_sync import bare_rate

PART_LIMIT_S = 400.0
REPEATS = 3
LEARNER_STEPS = 2


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Of the machine, whatever is trained."""

    flop_per_s: dict[int, float]
    """float32 matrix multiplications, by cores."""
    grpc_bytes_per_s: float
    """270 MB over loopback in chunks of 1 MiB, neither checked nor kept."""
    hops_per_s: float
    """Atomic hops of one client: the services' script, called on a plain connection."""


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """Of one shape, samples/s."""

    engine: dict[int, float]
    """vLLM alone, by cores."""
    plain: float
    """Forward, backward and AdamW of a plain loop over transformers, on all cores."""
    learner: float
    """The same of our learner."""
    learner_flop_per_s: float
    """Useful ones: each prompt once, and logits of responses only."""


def core_counts() -> list[int]:
    """One core, and all."""
    return sorted({1, os.cpu_count() or 1})


def machine_limits(folder: Path) -> MachineLimits:
    """Measures for about half a minute. Raises SideError when a part fails."""
    rates = {cores: _alone("matmul", cores, folder)["flop_per_s"] for cores in core_counts()}
    return MachineLimits(rates, bare_rate(REPEATS), bare_hops_per_s())


def shape_limits(name: str, job: dict[str, Any], folder: Path) -> ShapeLimits:
    """Measures one shape, `name` in benchmarks/learner.py, for one to four minutes. Raises SideError when a part fails."""
    engine = {cores: sampling_alone(name, job, folder, cores)["samples_per_s"] for cores in core_counts()}
    took = timings(name, os.cpu_count() or 1, LEARNER_STEPS, (PLAIN, SHARED))
    shape = LEARNER_SHAPES[name]
    samples = shape.groups * shape.group_size
    plain, shared = (statistics.median(took[way].seconds) for way in (PLAIN, SHARED))
    return ShapeLimits(engine, samples / plain, samples / shared, useful_flop(shape) / shared)


def sampling_alone(name: str, job: dict[str, Any], folder: Path, cores: int, part: str = "engine") -> dict[str, float]:
    """Samples/s and tokens/s of vLLM on a job's prompts, or of part `episodes`. Raises SideError when it fails."""
    spec = folder / f"{name}.json"
    spec.write_text(json.dumps(job))
    return _alone(part, cores, folder, ["--job", str(spec)])


def useful_flop(shape: LearnerShape) -> float:
    """Floating-point operations that a step needs in matrix products with weights: 6 for each weight and token.

    Each prompt counts once, logits only where a response token is predicted; attention's own products are left out.
    """
    config, batch = shape.config, batch_of(shape)
    width, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    keys = width // heads * config["num_key_value_heads"]
    layer = 2 * width * width + 2 * width * keys + 3 * width * config["intermediate_size"]
    prompts = {item["group_id"]: item["prompt_len"] for item in batch}
    responses = sum(len(item["advantage"]) for item in batch)
    total = 6.0 * (layers * layer * (sum(prompts.values()) + responses) + config["vocab_size"] * width * responses)
    return float(total)


def _alone(part: str, cores: int, folder: Path, more: Sequence[str] = ()) -> dict[str, float]:
    numbers = [str(core) for core in sorted(os.sched_getaffinity(0))[:cores]]
    command = [sys.executable, "-m", "benchmarks.peers.alone", part, "--cores", *numbers, *more]
    with Child(command, folder / f"{part}.log", PART_LIMIT_S, {}) as child:
        lines = list(child.lines())
    if not lines:
        raise SideError(f"{part} printed nothing")
    found: dict[str, float] = json.loads(lines[-1])
    return found
