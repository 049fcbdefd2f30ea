"""Sinks of the tests, which followers load in their own processes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.gateway.trackers.history import Point
from services.gateway.trackers.sink import Run


class Written:
    """Appends each accepted line to `got.jsonl`. The file `hang` makes it hang, `die` end its process, `refuse` raise."""

    whole = False

    def __init__(self, run: Run) -> None:
        self._run, self._folder = run, Path(run.folder)

    def send(self, points: Sequence[Point], own: dict[str, Any], ended: str) -> dict[str, Any]:
        if (self._folder / "hang").exists():
            time.sleep(3600)
        if (self._folder / "die").exists():
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        if (self._folder / "refuse").exists():
            raise ConnectionError(f"no server at {self._run.options}")
        with (self._folder / "got.jsonl").open("a") as file:
            for point in points:
                file.write(json.dumps([point.line, point.kind, point.step, point.values]) + "\n")
            if ended:
                file.write(json.dumps(["end", ended]) + "\n")
        return {"batches": int(own.get("batches", 0)) + 1}


class AtTheEnd(Written):
    """The same, of the whole history at once."""

    whole = True
