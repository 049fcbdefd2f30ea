"""The demo's job on each back end, kind of model and placement: what it learns, its time, memory, and bytes of a version.

    python -m benchmarks.backends [--way "Megatron, Llama" ...] [--steps 220]

For each way: a stack in a fresh home, the whole job with its evaluations before and after, one after the other.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.machine import describe_machine
from benchmarks.peers.ours import stack
from benchmarks.peers.processes import ROOT, PeakMemory, SideError
from examples.demo.models import MODELS
from millrace.connection import find_token
from millrace.follower import follow_steps
from millrace.gateway import GatewayClient
from services.cli.overrides import apply_change, load_job
from services.common.jobs.step_record import StepRecord
from services.common.models.weight_files import EMBEDDING, LM_HEAD, read_headers

JOB = ROOT / "deploy" / "config" / "jobs" / "demo.yaml"
MIB = 1 << 20
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Way:
    """One row of the table."""

    model: str
    """Of `examples.demo.models`."""
    changes: tuple[str, ...] = ()


FSDP2 = "learner.backend=fsdp2"
WAYS: Mapping[str, Way] = {
    "Megatron, Llama": Way("tiny"),
    "FSDP2, Llama": Way("tiny", (FSDP2,)),
    "FSDP2, adapters of rank 8": Way("tiny", (FSDP2, "model.lora={rank: 8}", "learner.lr=5e-3")),
    "FSDP2, Gemma": Way("tiny-gemma", (FSDP2,)),
    "Megatron, Qwen3-MoE": Way("tiny-moe"),
    "Megatron, Qwen3-MoE, EP 2": Way("tiny-moe", ("learner.data_parallel_size=2", "learner.expert_parallel_size=2")),
    "Megatron, Llama, colocated": Way("tiny", ("placement.rollout=colocated", "learner.threads_per_rank=0")),
}
HEADER = (
    "",
    "held-out before → after",
    "time of the steps, s",
    "peak memory, GiB",
    "checkpoint, MiB",
    "a version, MiB",
)


def measure(name: str, way: Way, models: Path, steps: int) -> tuple[str, ...]:
    """Trains the job; its row. Raises SideError when it does not succeed."""
    model = models / way.model
    MODELS[way.model](model)
    document = load_job(JOB, (f"learner.steps={steps}", f"name={way.model}"))
    document["model"]["path"] = str(model)
    for change in way.changes:
        apply_change(document, change)
    with tempfile.TemporaryDirectory(prefix="millrace-backends-") as folder:
        home = Path(folder)
        with (
            stack(home, models, None) as state,
            GatewayClient(state.url, find_token(state.token_file)) as client,
            PeakMemory(state.pid) as memory,
        ):
            job = str(client.submit(document)["id"])
            records = [StepRecord.model_validate(line) for line in follow_steps(client, job, timeout_s=LIMIT_S)]
            record, history = client.job(job), client.history(job)
        if record["state"] != "succeeded":
            raise SideError(f"{name}: the job {record['state']}: {record['cause']}")
        checkpoint = max((home / "jobs" / job / "checkpoints").glob("step-*"))
        first, *_, last = history["evals"]
        return (
            name,
            f"{first['avg_at_k']:.2f} → {last['avg_at_k']:.2f}",
            f"{(records[-1].at or 0.0) - (records[0].at or 0.0):.0f}",
            f"{memory.peak_bytes / 2**30:.1f}",
            f"{sum(file.stat().st_size for file in checkpoint.glob('*rank-*')) / MIB:.1f}",
            f"{published_bytes(checkpoint / 'hf') / MIB:.1f}",
        )


def published_bytes(exported: Path) -> int:
    """Bytes of the weights as they are published: every tensor of an export, and the output layer that shares the embedding's."""
    sizes = {name: tensor.bytes for name, tensor in read_headers(exported).items()}
    if LM_HEAD not in sizes:
        sizes[LM_HEAD] = sizes[EMBEDDING]
    return sum(sizes.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", choices=list(WAYS), help="may be repeated (default: all)")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--models", type=Path, default=ROOT / ".millrace" / "models")
    options = parser.parse_args(arguments)
    print(describe_machine(theirs=False), "\n")
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for name in options.way or WAYS:
        print(f"| {' | '.join(measure(name, WAYS[name], options.models, options.steps))} |", flush=True)


if __name__ == "__main__":
    main()
