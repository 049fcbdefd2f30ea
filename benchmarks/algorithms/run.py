"""What each algorithm learns: every preset on the demo's task, then DAPO with older and older data, all in one stack.

    python -m benchmarks.algorithms.run [--preset ppo] [--no-ages | --no-presets] [--steps 220] [--set learner.lr=3e-4] [--write]

stack up ─► for each job: POST /jobs ─► steps ─► held-out accuracy before and after ─► down ─► tables, curves ─► docs/algorithms.md
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.algorithms.curves import draw_ages
from benchmarks.algorithms.figures import Outcome
from benchmarks.algorithms.jobs import AGES, CORRECTIONS, aged_job, preset_job
from benchmarks.algorithms.table import age_section, preset_section
from benchmarks.peers import ours
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.processes import ROOT
from benchmarks.peers.run import make_model
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.table import put_between
from millrace.connection import find_token
from millrace.follower import follow_steps
from millrace.gateway import GatewayClient
from services.common.errors import MillraceError
from services.common.service.stack_state import UpState
from services.common.spec.choices import ImportanceCorrection, Preset

DOCUMENT = ROOT / "docs" / "algorithms.md"
PICTURE = ROOT / "docs" / "images" / "off-policy.svg"
PRESETS_MARK, AGES_MARK = "algorithms", "off-policy"
"""Names of the document's markers."""
JOB_LIMIT_S = 1200.0
"""Longest time of one job, its evaluations included."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The jobs, and the stack that trains them."""

    state: UpState
    model: Path
    changes: tuple[str, ...]

    def presets(self, chosen: Sequence[Preset]) -> dict[Preset, Outcome]:
        """The outcome of each preset."""
        return {preset: self._run(preset_job(preset, self.model, self.changes)) for preset in chosen}

    def ages(self) -> dict[tuple[int, ImportanceCorrection], Outcome]:
        """The outcome of each age with each correction."""
        return {
            (age, correction): self._run(aged_job(age, correction, self.model, self.changes))
            for age in AGES
            for correction in CORRECTIONS
        }

    def _run(self, job: dict[str, Any]) -> Outcome:
        """Trains one job to its end, whatever that is. Raises MillraceError when it is refused, or does not end in time."""
        with GatewayClient(self.state.url, find_token(self.state.token_file)) as client:
            identity = str(client.submit(job)["id"])
            for _ in follow_steps(client, identity, timeout_s=JOB_LIMIT_S):
                pass
            record, history = client.job(identity), client.history(identity)
        outcome = Outcome(record["state"], record["cause"] or "", history["steps"], history["evals"])
        gain = "no gain known" if outcome.gain is None else f"gain {outcome.gain:+.3f}"
        print(f"{job['name']}: {outcome.state} after {len(outcome.steps)} steps, {gain} {outcome.cause}", flush=True)
        return outcome


def measure(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Runs what was chosen; each section's marker and lines."""
    shape, models = SHAPES["demo"], options.home.resolve() / "models"
    make_model(shape, models)
    steps = () if options.steps is None else (f"learner.steps={options.steps}",)
    changes = (*steps, *options.changes)
    with ours.stack(folder / "home", models, None) as state:
        bench, began = Bench(state, models / shape.folder, changes), time.time()
        if options.preset_table:
            yield PRESETS_MARK, preset_section(_head(began), bench.presets(options.presets or list(Preset)))
        if options.ages:
            outcomes = replace(bench, changes=(f"learner.steps={options.age_steps}", *options.changes)).ages()
            picture = PICTURE if options.write else folder / PICTURE.name
            draw_ages(picture, outcomes)
            place = str(PICTURE.relative_to(DOCUMENT.parent)) if options.write else None
            yield AGES_MARK, age_section(_head(began), outcomes, place)


def _head(began: float) -> str:
    day = time.strftime("%Y-%m-%d", time.localtime(began))
    return f"{day}, `deploy/config/jobs/demo.yaml`, one run each. {describe_machine(theirs=False)}"


def main() -> None:
    """Measures, prints, and with `--write` puts the result into the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", dest="presets", type=Preset, action="append", help="which; all by default")
    parser.add_argument("--no-ages", dest="ages", action="store_false", help="leave the study of older data out")
    parser.add_argument("--no-presets", dest="preset_table", action="store_false", help="leave the presets out")
    parser.add_argument("--steps", type=int, help="of each preset; the job's own by default")
    parser.add_argument("--age-steps", type=int, default=110, help="of each age of data")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--home", type=Path, default=Path(os.environ.get("MILLRACE_HOME", ".millrace")), help="models lie below it"
    )
    parser.add_argument("--write", action="store_true", help=f"put the result into {DOCUMENT.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.write and (options.presets or options.changes):
        parser.error("--write is for the whole table: leave --preset and --set out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for mark in (PRESETS_MARK, AGES_MARK):  # that the document has its markers is better known now than at the end
            put_between(DOCUMENT.read_text(), [], mark)
        with tempfile.TemporaryDirectory(prefix="algorithms-") as folder:
            for mark, lines in measure(options, Path(folder)):
                print("\n".join(lines), flush=True)
                if options.write:
                    DOCUMENT.write_text(put_between(DOCUMENT.read_text(), lines, mark))
    except (MillraceError, ValueError) as error:
        sys.exit(f"algorithms: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
