"""The comparison: rounds of TRL's plain loop and of ours, alternating, and the limits of the parts.

    python -m benchmarks.peers.run [--shape demo] [--rounds 3] [--gsm8k FILE] [--write]

limits ─► for each shape: rounds of [ TRL │ stack up ─► each of our ways ─► down ] ─► table ─► docs/performance.md
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers import ours, peer
from benchmarks.peers.figures import Plan, Run, samples_per_s
from benchmarks.peers.limits import ShapeLimits, machine_limits, shape_limits
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.processes import ROOT
from benchmarks.peers.shapes import SHAPES, WAYS, Shape, job_of
from benchmarks.peers.table import Result, machine_section, put_between, shape_section
from services.common.errors import MillraceError, ModelError
from services.common.spec.job import JobSpec

DOCUMENT = ROOT / "docs" / "performance.md"


@dataclass(frozen=True, slots=True)
class Bench:
    """What is the same for all shapes."""

    python: Path
    """Of the peers' environment."""
    models: Path
    gsm8k: Path | None
    rounds: int
    changes: tuple[str, ...]
    limits: bool
    peer_dtype: str | None
    """Of TRL's products; None: the shape's."""
    folder: Path
    """For files that are not kept."""
    ways: tuple[str, ...] = ()
    """Of ours; the shape's where there is none."""

    def data(self, shape: Shape) -> Path | None:
        """The file of the shape's tasks."""
        return self.gsm8k if shape.needs_data else None

    def run(self, name: str, shape: Shape) -> tuple[list[str], ShapeLimits | None]:
        """The shape's lines, and its limits."""
        if self.peer_dtype is not None:
            shape = replace(shape, bf16=self.peer_dtype == "bfloat16")
        shape = replace(shape, ways=self.ways or shape.ways)
        make_model(shape, self.models)
        model, data = self.models / shape.folder, self.data(shape)
        job = job_of(shape.spec, model, data, self.changes)
        limits = shape_limits(shape.limits, job, self.folder) if self.limits else None
        taken: dict[str, list[Run]] = {way: [] for way in (peer.NAME, *shape.ways)}
        for number in range(self.rounds):
            for way, run in self._round(name, shape, model, number).items():
                taken[way].append(run)
        learned = min(shape.learning_rounds, self.rounds)
        results = {
            way: Result(shape.peer if way == peer.NAME else shape.ours, tuple(runs), learned)
            for way, runs in taken.items()
        }
        about = _about(JobSpec.model_validate(job), shape)
        return shape_section(name, about, results, peer.NAME, shape.learning, limits), limits

    def _round(self, name: str, shape: Shape, model: Path, number: int) -> dict[str, Run]:
        data = self.data(shape)
        folder = self.folder / f"{name}-{number}"
        folder.mkdir()
        learning = shape.learning if number < shape.learning_rounds else None
        job, plan = job_of(shape.spec, model, data, self.changes), replace(shape.peer, learning=learning)
        runs = {peer.NAME: peer.run_peer(self.python, job, shape, plan, folder / "trl")}
        _say(name, number, peer.NAME, runs[peer.NAME], plan)
        with ours.stack(folder / "home", self.models, data) as state:
            for way in shape.ways:
                job = job_of(shape.spec, model, data, (*self.changes, *WAYS[way]))
                plan = replace(shape.ours, learning=learning)
                runs[way] = ours.run_job(state, folder / "home", job, plan)
                _say(name, number, way, runs[way], plan)
        return runs


def _say(name: str, number: int, way: str, run: Run, plan: Plan) -> None:
    rate = samples_per_s(run, plan.warm_up)
    print(f"{name}, round {number + 1}, {way}: {rate:.2f} samples/s over {len(run.steps)} steps", flush=True)


def _about(spec: JobSpec, shape: Shape) -> str:
    rollout, groups = spec.rollout, spec.algorithm.groups_per_step
    kind = "bfloat16" if shape.bf16 else "float32"
    return (
        f"`deploy/config/jobs/{shape.spec}`: {groups} groups of {rollout.group_size} a step, responses of up to "
        f"{rollout.rollout_max_tokens} tokens, {shape.folder}. TRL computes in {kind}, {shape.micro_batch} samples in a pass."
    )


def make_model(shape: Shape, models: Path) -> None:
    """Makes the model where it is missing, in a process of its own. Raises ModelError when that fails."""
    models.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "examples.demo.models", shape.model, "--out", str(models / shape.folder)]
    if subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.DEVNULL).returncode != 0:
        raise ModelError(f"the model could not be made: {models / shape.folder}")


def compare(bench: Bench, names: Sequence[str]) -> list[str]:
    """Runs the shapes; lines of the document."""
    began = time.time()
    day = time.strftime("%Y-%m-%d")
    machine = machine_limits(bench.folder) if bench.limits else None
    lines: list[str] = []
    limits: dict[str, ShapeLimits] = {}
    for name in names:
        if SHAPES[name].needs_data and bench.gsm8k is None:
            lines += [f"### {name}", "", "Not measured: no data file was given (`--gsm8k`).", ""]
            print(f"{name}: skipped: it needs --gsm8k FILE", flush=True)
            continue
        section, found = bench.run(name, SHAPES[name])
        lines += section
        limits |= {} if found is None else {name: found}
        print("\n".join(section), flush=True)
    if machine is not None:
        lines += machine_section(machine, limits)
    rounds = "1 round" if bench.rounds == 1 else f"{bench.rounds} rounds"
    head = f"{day}, {describe_machine()} {rounds}, {(time.time() - began) / 60:.0f} minutes."
    return ["", head, "", *lines]


def main() -> None:
    """Measures, prints, and with `--write` puts the result into the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="which; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's train.jsonl; without it that shape is left out")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="changes of both sides' job"
    )
    parser.add_argument(
        "--home", type=Path, default=Path(os.environ.get("MILLRACE_HOME", ".millrace")), help="models lie below it"
    )
    parser.add_argument("--peer-python", type=Path, default=ROOT / ".venv-peers" / "bin" / "python")
    parser.add_argument(
        "--peer-dtype", choices=["float32", "bfloat16"], help="of TRL's products, where not the fastest is wanted"
    )
    parser.add_argument("--no-limits", dest="limits", action="store_false", help="leave the parts alone out")
    parser.add_argument(
        "--way", dest="ways", choices=WAYS, action="append", default=[], help="of ours; the shape's own by default"
    )
    parser.add_argument("--write", action="store_true", help=f"put the result into {DOCUMENT.relative_to(ROOT)}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    data = options.gsm8k.resolve() if options.gsm8k else None
    try:
        if options.write:  # that the document has its markers is better known now than at the end
            put_between(DOCUMENT.read_text(), [])
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            models = options.home.resolve() / "models"
            bench = Bench(
                options.peer_python.absolute(),
                models,
                data,
                options.rounds,
                tuple(options.changes),
                options.limits,
                options.peer_dtype,
                Path(folder),
                tuple(options.ways),
            )
            lines = compare(bench, options.shape or list(SHAPES))
    except (MillraceError, ValueError) as error:
        sys.exit(f"peers: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print("\n".join(lines))
    if options.write:
        DOCUMENT.write_text(put_between(DOCUMENT.read_text(), lines))


if __name__ == "__main__":
    main()
