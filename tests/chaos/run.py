"""`python -m tests.chaos.run --fault kill --target rollout --count 100 --seed 1`: one row of docs/reliability.md's table.

Prints the result as one JSON line and one line for people. Ends with 1 when something was violated, and then keeps the run's home; with 3
when nothing was, but the job went on later than it should.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos import (
    bombs,
    chunks,
    clock_fault,
    episodes,
    faults,
    files,
    freeze,
    full,
    garbage,
    hostile,
    models,
    network,
    pairs,
    points,
    resume,
    rubric,
    saves,
)
from tests.chaos.faults import Fault, Options
from tests.chaos.table import RECORDS

FAULTS: dict[str, Fault] = {
    "kill": faults.kill,
    "kill-in-turns": faults.kill_in_turns,
    "power-cut": faults.power_cut,
    "points": points.points,
    "ends": points.ends,
    "saves": saves.saves,
    "redis-restart": faults.redis_restart,
    "redis-flush": faults.redis_flush,
    "freeze": freeze.freeze,
    "wake": freeze.wake,
    "network": network.network,
    "garbage": garbage.garbage,
    "clock": clock_fault.clock,
    "pairs": pairs.pairs,
    "hostile": hostile.hostile,
    "full": full.full,
    "flips": files.flips,
    "cut-ends": files.cut_ends,
    "chunks": chunks.chunks,
    "bombs": bombs.bombs,
    "models": models.models,
    "rubric": rubric.rubric,
    "resume": resume.resume,
    "episode-kill": episodes.kill,
    "episode-stop": episodes.stop,
    "hostile-worlds": episodes.hostile,
}

LATE_CODE = 3


def main() -> int:
    """Runs one fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", required=True, choices=FAULTS)
    parser.add_argument(
        "--target",
        default="rollout",
        help="gateway, rollout, reward, rank, learner, redis or any; "
        "of wake: rank, rollout, reward; of network: cut, latency, half-open; of chunks: job; of full: jobs, redis; "
        "of episode-kill and episode-stop: world, environment, rollout",
    )
    parser.add_argument("--count", type=int, default=10, help="trials")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="learner ranks")
    parser.add_argument("--hold", type=float, default=30.0, help="seconds that a fault lasts; 0: for ever")
    parser.add_argument("--only", type=int, default=None, help="of hostile: the one case of this number")
    parser.add_argument("--real", action="store_true", help="of hostile: with a real engine and real ranks")
    parser.add_argument("--record", action="store_true", help="append the result to tests/chaos/records.jsonl")
    parser.add_argument("--home", type=Path, default=None, help="an empty directory (default: a temporary one)")
    arguments = parser.parse_args()
    logging.disable()  # what the services say of the faults; their own processes have logs of their own
    home = arguments.home or Path(tempfile.mkdtemp(prefix="millrace-chaos-"))
    options = Options(
        home, arguments.target, arguments.count, arguments.seed, arguments.ranks, arguments.hold or None,
        only=arguments.only, real=arguments.real,
    )  # fmt: skip
    result = FAULTS[arguments.fault](options)
    if arguments.record:
        words = " ".join(word for word in sys.argv[1:] if word != "--record")
        with RECORDS.open("a") as file:
            file.write(
                json.dumps({"command": f"python -m tests.chaos.run {words}", **json.loads(result.as_json())}) + "\n"
            )
    sys.stdout.write(f"{result.as_json()}\n{result.as_text()}\n")
    if result.good:
        shutil.rmtree(home)
        return LATE_CODE if result.missed else 0
    sys.stderr.write(f"{len(result.violations)} violations; the run is kept in {home}\n")
    for violation in result.violations[:5]:
        sys.stderr.write(f"{violation}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
