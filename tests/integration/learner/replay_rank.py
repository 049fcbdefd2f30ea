"""A scripted rank of a replay, for tests of what starts ranks and listens to them: it does what the name of the model says."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from services.learner.replay.plan import RESULTS, Pass
from services.learner.storage.folder import ERROR_FILE


def main() -> None:
    task = Pass.read(Path(sys.argv[1]))
    work, rank, mode = Path(task.work), int(os.environ["RANK"]), task.spec["model"]["path"]
    if mode == "says-why" and rank == 1:
        (work / ERROR_FILE).write_text("rank 1: ConfigError: no such thing")
        sys.exit(1)
    if mode == "silent":
        sys.exit("the last words on stderr")
    if mode == "endless":
        (work.parent / f"pid-{rank}").write_text(str(os.getpid()))
        while rank == 0 and not (work.parent / "pid-1").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        if rank == 0:
            (work / RESULTS).write_text('{"kind": "version", "step": 0, "digest": "", "stats": null}\n')
        time.sleep(600)
    if rank == 0:
        threads = int(os.environ["OMP_NUM_THREADS"])
        with (work / RESULTS).open("a") as file:
            for step in range(task.start, task.last + 1):
                digest = f"{step + (threads == 2 and step == 3):032x}"
                stats = None if step == task.start else {"loss": step / 10}
                file.write(json.dumps({"kind": "version", "step": step, "digest": digest, "stats": stats}) + "\n")
                file.flush()
                time.sleep(0.05)
            if task.compare_with is not None:
                file.write(json.dumps({"kind": "distance", "apart": 1.0, "trained": 2.0, "weights": 4.0}) + "\n")


if __name__ == "__main__":
    main()
