"""Who could not be kept alive is on the list of workers, with the cause."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from services.common.service.heartbeat import WorkerKind, WorkerStatus
from services.common.service.lost_processes import LostProcess, lost_processes
from services.gateway.routes.workers import LOST, worker_list

CAUSE = "ended with code 1: RuntimeError: no memory"


def note(home: Path, lost: object, *, pid: int | None = None, created: float | None = None) -> None:
    pid = os.getpid() if pid is None else pid
    created = psutil.Process(pid).create_time() if created is None else created
    (home / "up.json").write_text(json.dumps({"pid": pid, "created": created, "lost": lost}))


def test_a_lost_worker_is_listed_with_its_cause_and_others_are_as_they_were() -> None:
    alive = [WorkerStatus("reward-0", WorkerKind.REWARD, "idle"), WorkerStatus("learner-0", WorkerKind.LEARNER, "idle")]
    found = worker_list(alive, [LostProcess("rollout-0", CAUSE, 7.0), LostProcess("redis", "gone", 7.0)])
    assert [(status.name, status.state) for status in found] == [
        ("learner-0", "idle"), ("reward-0", "idle"), ("rollout-0", LOST),
    ]  # fmt: skip
    assert (found[2].kind, found[2].pid, found[2].at, found[2].detail) == (
        WorkerKind.ROLLOUT, 0, 7.0, {"trouble": CAUSE},
    )  # fmt: skip


def test_a_lost_worker_that_is_tried_again_says_what_it_does_and_why_it_was_lost() -> None:
    alive = [WorkerStatus("rollout-0", WorkerKind.ROLLOUT, "loading", detail={"groups_in_flight": 0})]
    (found,) = worker_list(alive, [LostProcess("rollout-0", CAUSE, 7.0)])
    assert (found.state, found.detail) == ("loading", {"groups_in_flight": 0, "trouble": CAUSE})


def test_the_supervisors_note_is_read_while_it_lives(tmp_path: Path) -> None:
    assert lost_processes(tmp_path) == []
    note(tmp_path, {"rollout-0": CAUSE})
    (found,) = lost_processes(tmp_path)
    assert (found.name, found.cause) == ("rollout-0", CAUSE)
    note(tmp_path, {"rollout-0": CAUSE}, created=1.0)
    assert lost_processes(tmp_path) == [], "another process has its id now"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "created": 1, "lost": 3}'])
def test_a_note_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "up.json").write_text(text)
    assert lost_processes(tmp_path) == []
