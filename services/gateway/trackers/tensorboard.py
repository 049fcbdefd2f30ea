"""TensorBoard: one event file in the job's folder, which a crash leaves without a point missing or twice.

The file is a function of the history alone. Its length is part of the position: what was written beyond it is cut off and written again,
the same bytes. When a job goes back, a mark in the file makes TensorBoard drop the points of the steps that follow again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from services.gateway.trackers.history import Point
from services.gateway.trackers.sink import Run

FILE_VERSION = "brain.Event:2"


class TensorBoard:
    """The event file of one job."""

    whole = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self._folder = run.tracker_folder / "tensorboard"

    def send(self, points: Sequence[Point], own: dict[str, Any], ended: str) -> dict[str, Any]:
        """Appends the points, durably; `own`: the file's length."""
        del ended
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"events.out.tfevents.0000000000.{self._run.job_id}"
        size = int(own.get("bytes", 0)) if path.exists() else 0
        with path.open("ab") as file:
            file.truncate(size)
            writer = RecordWriter(file)
            for event in [*([] if size else self._head(points)), *map(_event, points)]:
                writer.write(event.SerializeToString(deterministic=True))
            writer.flush()
            os.fsync(file.fileno())
        return {"bytes": path.stat().st_size}

    def _head(self, points: Sequence[Point]) -> Iterator[event_pb2.Event]:
        """The version of the file's format, and the job's spec as a text."""
        at = points[0].at if points else 0.0
        yield event_pb2.Event(wall_time=at, file_version=FILE_VERSION)
        text = "\n".join(f"    {line}" for line in yaml.safe_dump(self._run.config, sort_keys=False).splitlines())
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        value = summary_pb2.Summary.Value(
            tag="spec",
            metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
            tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()]),
        )
        yield event_pb2.Event(wall_time=at, step=0, summary=summary_pb2.Summary(value=[value]))


def _event(point: Point) -> event_pb2.Event:
    if point.kind == "rewind":
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        return event_pb2.Event(wall_time=point.at, step=point.step + 1, session_log=start)
    values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in sorted(point.values.items())]
    return event_pb2.Event(wall_time=point.at, step=point.step, summary=summary_pb2.Summary(value=values))
