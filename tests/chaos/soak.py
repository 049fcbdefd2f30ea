"""`python -m tests.chaos.soak --minutes 90`: real vLLM and Megatron under an ordinary day's load, and whether anything grows.

Every 15 s it looks at what each service takes up. After the warm-up each figure must be flat (tests/chaos/slopes.py says what that is); the
table goes to docs/reliability.md. Ends with 1 when something rises, and then keeps the run's home. A short run tells nothing, and writes
nothing: it shows that all this works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from services.cli.up import detach, run_down
from services.common.service.stack_state import UpState, read_state
from tests.chaos.gauges import Figures, look
from tests.chaos.load import Load
from tests.chaos.slopes import Trend, table, trend
from tests.chaos.table import DOCUMENT, ROOT

EVERY_S = 15.0
WARM_UP_S = 600.0
WARM_UP_SHARE = 1 / 3
"""Of a run that is shorter than three warm-ups."""
BEGIN, END = "<!-- soak: written by python -m tests.chaos.soak -->", "<!-- end of the soak -->"
MODELS = ROOT / ".millrace" / "models"

Seen = list[tuple[float, Figures]]
"""Seconds since the start, and what was taken up then."""


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--home", type=Path, default=None, help="an empty directory (default: a temporary one)")
    arguments = parser.parse_args()
    home = arguments.home or Path(tempfile.mkdtemp(prefix="millrace-soak-"))
    seconds = arguments.minutes * 60
    seen, did, restarts = soak(home, seconds, arguments.seed)
    trends = list(judge(seen, seconds))
    lines = [*told(seconds, did, restarts), "", *table(trends)]
    sys.stdout.write("\n".join(lines) + "\n")
    if any(item.flat is None for item in trends):
        return 0
    write(lines)
    rising = [item for item in trends if not item.flat]
    if rising or restarts:
        sys.stderr.write(
            f"{len(rising)} figures rise, {restarts} processes were started again; the run is kept in {home}\n"
        )
        return 1
    shutil.rmtree(home)
    return 0


def soak(home: Path, seconds: float, seed: int) -> tuple[Seen, dict[str, int], int]:
    """Runs the stack under load; what was seen, what was done, and how many processes were started again."""
    seen: Seen = []
    with (
        _stack(home) as (state, temporary),
        Load(state, MODELS / "tiny", seed) as load,
        (home / "soak.jsonl").open("w") as file,
    ):
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            latest = read_state(home) or state
            seen.append((now, look(home, latest, temporary)))
            file.write(json.dumps([round(now, 1), {f"{s}: {q}": v for (s, q), v in seen[-1][1].items()}]) + "\n")
            file.flush()
            time.sleep(max(0.0, began + EVERY_S * len(seen) - time.monotonic()))
        restarts = sum(process.restarts for process in (read_state(home) or state).processes.values())
    return seen, dict(load.did), restarts


def judge(seen: Seen, seconds: float) -> Iterator[Trend]:
    """The trend of every figure after the warm-up."""
    warm = [item for item in seen if item[0] >= min(WARM_UP_S, seconds * WARM_UP_SHARE)]
    names = sorted({name for _, figures in warm for name in figures})
    for name in names:
        points = [(at, figures[name]) for at, figures in warm if name in figures]
        if len(points) > 1:
            yield trend(*name, [at for at, _ in points], [value for _, value in points])


def told(seconds: float, did: dict[str, int], restarts: int) -> list[str]:
    """What was done meanwhile."""
    done = ", ".join(f"{name} {count:,}" for name, count in sorted(did.items()))
    cores = len(os.sched_getaffinity(0))
    return [f"{seconds / 60:g} minutes on {cores} cores; done: {done}; processes started again: {restarts}."]


def write(lines: list[str]) -> None:
    """Replaces what is between the marks of docs/reliability.md."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


@contextlib.contextmanager
def _stack(home: Path) -> Iterator[tuple[UpState, Path]]:
    """The stack as people start it, with the demo's model; its temporary files lie in a directory of their own, beside the home."""
    MODELS.mkdir(parents=True, exist_ok=True)
    maker = [sys.executable, "-m", "examples.demo.models", "tiny", "--out", str(MODELS / "tiny")]
    subprocess.run(maker, check=True, timeout=600, stdout=subprocess.DEVNULL)
    temporary = home.with_name(f"{home.name}-tmp")
    temporary.mkdir()
    os.environ |= {"MILLRACE_MODEL_ROOTS": json.dumps([str(MODELS)]), "TMPDIR": str(temporary)}
    os.environ.pop("REDIS_URL", None)
    state = detach(home, ["--port", "0"], lambda _: None)
    try:
        yield state, temporary
    finally:
        run_down(home, lambda _: None)
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
