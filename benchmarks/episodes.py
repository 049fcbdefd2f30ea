"""Episodes a second of the rollout side, with the learner idle, beside a plain loop over vLLM and the same environments, in one run.

    python -m benchmarks.episodes [--game guess] [--model smollm2-135m-instruct] [--seconds 20] [--set rollout.max_concurrent_groups=24]

plain loop, on one core and on all ─► stack up ─► a job whose first step never begins ─► down

The plain loop has vLLM and the environments in one process, and goes on in rounds: all episodes sample a turn, then all are answered.
The model is made by `python -m examples.demo.models guess --out .millrace/models/guess`.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.group_cost import print_parts
from benchmarks.peers import ours
from benchmarks.peers.limits import core_counts, sampling_alone
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.shapes import job_of
from benchmarks.sides import Sampled, describe_cores, sample_idle
from services.common.spec.job import JobSpec

ROOT = Path(__file__).resolve().parents[1]
GAMES = {"guess": "demo-guess.yaml", "calculator": "demo-calculator.yaml"}


def report(plain: dict[int, float], sampled: Sampled, group_size: int) -> None:
    """Prints the ratios, and what the processor did in the window. `plain`: episodes/s by cores."""
    rate = sampled.groups * group_size / sampled.seconds
    print(f"rollout side, learner idle, over {sampled.seconds:.0f} s: {rate:.1f} episodes/s")
    for cores, theirs in plain.items():
        print(f"  plain loop, {cores} cores: {theirs:.1f} episodes/s; ratio {rate / theirs:.2f}")
    print_parts(sampled.before, sampled.after, sampled.groups, sampled.seconds)


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", choices=GAMES, default="guess")
    parser.add_argument("--model", help="directory below --models; by default the game's own")
    parser.add_argument("--set", action="append", default=[], help="a change of the job's spec: section.key=value")
    parser.add_argument("--seconds", type=float, default=20.0, help="in which groups are counted")
    parser.add_argument("--models", type=Path, default=ROOT / ".millrace" / "models")
    options = parser.parse_args()
    models = options.models.resolve()
    job = partial(_job, GAMES[options.game], models / (options.model or options.game), *options.set)
    group_size = JobSpec.model_validate(job()).rollout.group_size
    print(
        f"{options.game}, {options.model or options.game}: {describe_machine(theirs=False)}\n{describe_cores()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="millrace-episodes-") as name:
        folder = Path(name)
        plain = {
            cores: sampling_alone(options.game, job(), folder, cores, "episodes")["samples_per_s"]
            for cores in core_counts()
        }
        with ours.stack(folder / "home", models, None) as state:
            sampled = sample_idle(state, job, options.seconds, max(plain.values()) / group_size)
    report(plain, sampled, group_size)


def _job(spec: str, model: Path, *changes: str) -> dict[str, object]:
    return job_of(spec, model, None, changes)


if __name__ == "__main__":
    main()
