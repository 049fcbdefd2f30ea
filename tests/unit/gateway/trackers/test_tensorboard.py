from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.trackers.history import Position
from tests.unit.gateway.trackers.histories import JOB, add_eval, add_step, follower, job_folder

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EVENTS = f"trackers/tensorboard/events.out.tfevents.0000000000.{JOB}"


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard itself reads them."""
    reader = EventAccumulator(str(folder / "trackers" / "tensorboard"))
    reader.Reload()
    return [(event.step, round(event.value, 6)) for event in reader.Scalars(tag)]


def test_tensorboard_reads_steps_evaluations_and_the_spec(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    add_step(folder, 1)
    first = follower(folder.path, "tensorboard", None)
    first.advance("")
    add_step(folder, 2)
    add_eval(folder, 2)
    first.advance("succeeded")
    assert scalars(folder.path, "actor/loss") == [(1, -0.5), (2, -1.0)]
    assert scalars(folder.path, "eval/avg_at_k") == [(2, 0.25)]
    reader = EventAccumulator(str(folder.path / EVENTS))
    reader.Reload()
    assert "lr: 1.0e-06" in reader.Tensors("spec")[0].tensor_proto.string_val[0].decode()
    assert reader.Scalars("actor/loss")[0].wall_time == 1001.0


def test_a_crash_between_file_and_position_leaves_no_point_twice(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    first = follower(folder.path, "tensorboard", None)
    add_step(folder, 1)
    first.advance("")
    position = folder.path / "trackers" / "tensorboard.json"
    before = position.read_bytes()
    add_step(folder, 2)
    first.advance("")
    whole = (folder.path / EVENTS).read_bytes()
    position.write_bytes(before)  # as a kill leaves it: written, and not recorded
    first.advance("")
    assert (folder.path / EVENTS).read_bytes() == whole
    assert scalars(folder.path, "actor/loss") == [(1, -0.5), (2, -1.0)]


def test_a_job_that_goes_back_shows_the_steps_that_count(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    for step in range(1, 6):
        add_step(folder, step)
    folder.append("rewind", 3, {})
    add_step(folder, 4, loss=9.0)
    follower(folder.path, "tensorboard", None).advance("")
    assert scalars(folder.path, "actor/loss") == [(1, -0.5), (2, -1.0), (3, -1.5), (4, 9.0)]


def test_a_lost_event_file_is_made_anew_with_the_position(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    add_step(folder, 1)
    first = follower(folder.path, "tensorboard", None)
    first.advance("")
    (folder.path / "trackers" / "tensorboard.json").unlink()
    (folder.path / EVENTS).unlink()
    first.advance("")
    assert (
        Position.load(folder.path / "trackers" / "tensorboard.json").own["bytes"]
        == (folder.path / EVENTS).stat().st_size
    )
    assert scalars(folder.path, "actor/loss") == [(1, -0.5)]
