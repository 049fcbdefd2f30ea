"""Stop at step k, load what was saved there, go on: the weights must be those of the run that was not interrupted, bit for bit.

On real Megatron ranks: one alone, and two by tensor, pipeline and data parallelism and with the distributed optimizer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.faults import Options
from tests.chaos.result import Result

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".millrace" / "models" / "tiny"
TIMEOUT_S = 900.0


def resume(options: Options) -> Result:
    """`count` values of k in each layout."""
    started, result = time.monotonic(), Result("stop at step k and resume", 0, options.seed)
    _run(["-m", "services.demo.models", "tiny", "--out", str(MODEL)])
    layouts: dict[str, int] = {}
    for ranks in (1, 2):
        out = options.home / f"ranks{ranks}"
        out.mkdir()
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        _run([*launch, "-m", "tests.chaos.resume_ranks", str(MODEL), str(out), str(options.count), str(options.seed)])
        for layout, ends in json.loads((out / "said.json").read_text()).items():
            straight = ends.pop("straight")
            layouts[layout] = len(ends)
            result.count += len(ends)
            result.violations += [
                f"{layout}: resumed at step {step}, weights {end}, not {straight}"
                for step, end in ends.items()
                if end != straight
            ]
    result.extra = {"layouts": layouts}
    result.seconds = time.monotonic() - started
    return result


def _run(arguments: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=True, timeout=TIMEOUT_S)
