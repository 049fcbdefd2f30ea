from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import TrackerError
from services.gateway.trackers.history import Position, read_points
from tests.unit.gateway.trackers.histories import add_eval, add_step, follower, job_folder


def got(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "got.jsonl").read_text().splitlines()]


def test_each_line_is_accepted_once_and_in_order(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    add_step(folder, 1)
    first = follower(folder.path)
    assert first.advance("") == (1, False)
    assert first.advance("") == (0, False)
    add_eval(folder, 1)
    folder.append("checkpoint", 1, {"manifest": "ab"})
    add_step(folder, 2)
    assert first.advance("") == (2, False)
    assert [line[:3] for line in got(folder.path)] == [[1, "step", 1], [2, "eval", 1], [4, "step", 2]]
    assert got(folder.path)[0][3]["rollout/reward_mean"] == 0.1


def test_the_position_follows_only_what_was_accepted(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    add_step(folder, 1)
    first = follower(folder.path)
    first.advance("")
    add_step(folder, 2)
    (folder.path / "refuse").touch()
    for _ in range(2):
        with pytest.raises(TrackerError, match="ConnectionError"):
            first.advance("succeeded")
    (folder.path / "refuse").unlink()
    assert first.advance("succeeded") == (1, False)
    assert [line[0] for line in got(folder.path)] == [1, 2, "end"]


def test_the_end_comes_once_and_after_every_point(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    for step in range(1, 4):
        add_step(folder, step)
    first = follower(folder.path)
    assert first.advance("failed") == (3, False)
    assert first.advance("failed") == (0, False)
    assert got(folder.path)[-1] == ["end", "failed"]


def test_a_job_without_a_step_still_ends(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    assert follower(folder.path).advance("cancelled") == (0, False)
    assert got(folder.path) == [["end", "cancelled"]]


def test_a_sink_that_takes_all_at_once_gets_nothing_before_the_end(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    sink = "tests.unit.gateway.trackers.sinks:AtTheEnd"
    first = follower(folder.path, sink=sink)
    for step in range(1, 4):
        add_step(folder, step)
        assert first.advance("") == (0, False)
    assert first.advance("succeeded") == (3, False)
    assert [line[0] for line in got(folder.path)] == [1, 2, 3, "end"]


def test_of_two_gateways_one_follows(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    add_step(folder, 1)
    first, second = follower(folder.path), follower(folder.path)
    assert first.advance("") == (1, False)
    assert second.advance("") == (0, True)


def test_no_key_is_in_an_error_or_a_file(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    add_step(folder, 1)
    first = follower(folder.path, api_key="sekret-0123456789")
    (folder.path / "refuse").touch()
    with pytest.raises(TrackerError) as raised:
        first.advance("")
    (folder.path / "refuse").unlink()
    first.advance("succeeded")
    assert "sekret" not in str(raised.value)
    assert not [path for path in folder.path.rglob("*") if path.is_file() and b"sekret" in path.read_bytes()]
    assert "sekret" not in repr(first._run)


def test_the_folder_of_a_deleted_job_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        follower(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


def test_a_part_of_a_line_waits_and_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('not json\n{"kind": "step", "step": 1, "data": {"step": 1, "loss": 2.0}}\n{"kind": "st')
    points, after, last = read_points(path, Position())
    assert [(point.line, point.values) for point in points] == [(2, {"actor/loss": 2.0})]
    assert after.lines == 2
    assert read_points(path, after)[:2] == ([], after)
    assert not last  # the rest of the line comes


def test_batches_are_bounded_and_join_without_a_gap(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    for step in range(1, 51):
        add_step(folder, step)
    position, seen = Position(), []
    while True:
        points, position, last = read_points(folder.path / "history.jsonl", position, limit_bytes=300)
        assert len(points) <= 3
        seen += [point.step for point in points]
        if last:
            break
    assert seen == list(range(1, 51))


def test_a_history_that_was_replaced_is_sent_again(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    for step in range(1, 4):
        add_step(folder, step)
    first = follower(folder.path)
    first.advance("")
    (folder.path / "history.jsonl").unlink()
    add_step(folder, 1, loss=7.0)
    assert first.advance("") == (1, False)
