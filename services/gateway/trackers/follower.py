"""Follower of one job's history for one tracker: the work of a child process, which may be killed at any moment.

<job>/history.jsonl ── from the recorded position ──► sink ── accepted ──► <job>/trackers/<name>.json: the next position
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from services.common.errors import TrackerError
from services.common.jobs.folder import HISTORY_FILE
from services.gateway.trackers.history import Point, Position, read_points
from services.gateway.trackers.sink import Run, Sink

SINKS = {
    "files": "services.gateway.trackers.files:Files",
    "tensorboard": "services.gateway.trackers.tensorboard:TensorBoard",
    "mlflow": "services.gateway.trackers.mlflow:MLflow",
    "wandb": "services.gateway.trackers.wandb:WandB",
    "swanlab": "services.gateway.trackers.swanlab:SwanLab",
}
ERROR_CHARS = 300
SECRET_OPTIONS = frozenset({"api_key", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"})


class Follower:
    """One tracker's follower. The methods' values are MessagePack's."""

    def __init__(self, tracker: str, run: dict[str, Any], sink: str | None = None) -> None:
        """`run`: the fields of a `Run`. `sink`: class of the client (`package.module:name` of this code) instead of the tracker's own."""
        self._run, self._target = Run(**run), sink or SINKS[tracker]
        folder = self._run.tracker_folder
        folder.mkdir(exist_ok=True)  # not its parent: the folder of a deleted job is not made again
        self._path = folder / f"{tracker}.json"
        self._history = Path(self._run.folder) / HISTORY_FILE
        self._lock = os.open(folder / f"{tracker}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._sink: Sink | None = None

    def advance(self, ended: str) -> tuple[int, bool]:
        """Sends the next batch, if there is one; the number of its points, and whether more remains to be sent.

        `ended`: the state of a job that has ended, else empty. Another gateway that follows the job has the lock; then nothing is done.

        Raises:
            TrackerError: the tracker did not take it.
            OSError: the history cannot be read, or the position not be recorded.
        """
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when this process ends, however it ends
            return self._advance(ended)
        return 0, True

    def _advance(self, ended: str) -> tuple[int, bool]:
        position = Position.load(self._path)
        if position.ended:
            return 0, False
        points, after, last = read_points(self._history, position)
        if not points and not (ended and last):
            if after != position:
                after.save(self._path)
            return 0, not last
        sink = self._client()
        if sink.whole:
            if not ended:
                return 0, False
            while not last:
                more, after, last = read_points(self._history, after)
                points += more
        final = ended if last else ""
        own = self._send(sink, points, position.own, final)
        replace(after, own=own, ended=final).save(self._path)
        return len(points), not last

    def _client(self) -> Sink:
        if self._sink is None:
            module, _, name = self._target.partition(":")
            try:
                made: Sink = getattr(import_module(module), name)(self._run)
            except Exception as error:  # noqa: BLE001  a client's own
                raise TrackerError(self._text_of(error)) from None
            self._sink = made
        return self._sink

    def _send(self, sink: Sink, points: Sequence[Point], own: dict[str, Any], ended: str) -> dict[str, Any]:
        try:
            return sink.send(points, own, ended)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a client's own
            self._sink = None  # the next batch begins with a new client
            raise TrackerError(self._text_of(error)) from None

    def _text_of(self, error: BaseException) -> str:
        """The error in one line, without the operator's keys."""
        text = f"{type(error).__name__}: {error}"
        for name in SECRET_OPTIONS & self._run.options.keys():
            text = text.replace(self._run.options[name], "***")
        return " ".join(text.split())[:ERROR_CHARS]
