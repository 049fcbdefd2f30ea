"""What starts a replay's ranks: results as they come, the ranks' own words where they fail, and nothing left behind."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.config.settings import Settings
from services.common.spec.job import JobSpec
from services.learner.replay import run
from services.learner.replay.plan import Plan, make_plan
from services.learner.replay.run import ReplayError, replay
from tests.unit.common.models.test_directory import make_model
from tests.unit.learner.journalled_job import STEPS, JournalledJob


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "RANK_MODULE", "tests.integration.learner.replay_rank")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    make_model(tmp_path / "models" / "tiny")
    JournalledJob().write(tmp_path / "jobs" / "job")
    return tmp_path


def plan_of(home: Path, mode: str, **learner: int) -> Plan:
    plan = make_plan(home / "jobs" / "job", Settings(home=home), 1, None)
    changes = {
        "learner": plan.spec.learner.model_copy(update=learner),
        "model": plan.spec.model.model_copy(update={"path": mode}),
    }
    return replace(plan, spec=plan.spec.model_copy(update=changes))


def with_lr(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"learner": spec.learner.model_copy(update={"lr": 1e-3})})


def test_results_come_one_by_one_and_the_change_is_run_from_the_version_asked_for(home: Path) -> None:
    came: list[tuple[str, dict[str, Any], float]] = []
    plan = plan_of(home, "good")
    report = replay(
        plan, Settings(home=home), with_lr(plan.spec), lambda *result: came.append((*result, time.monotonic()))
    )
    assert (report.equal, report.unproved) == (True, [])
    assert list(report.versions) == list(range(STEPS + 1))
    assert report.changed == {step: {"loss": step / 10} for step in range(2, STEPS + 1)}
    assert report.distance == {"apart": 1.0, "trained": 2.0, "weights": 4.0}
    times = [at for which, _, at in came if which == "recorded"]
    assert times[-1] - times[0] > 0.1, "the results were held back to the end"
    assert list((home / "tmp").iterdir()) == []


def test_the_first_version_that_differs_is_told(home: Path) -> None:
    report = replay(plan_of(home, "good", threads_per_rank=2), Settings(home=home))
    assert [version.step for version in report.versions.values() if not version.equal] == [3]
    assert report.equal is False


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("says-why", "rank 1: ConfigError: no such thing"),
        pytest.param("silent", "the ranks said nothing but", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_fail_are_quoted(home: Path, mode: str, said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        replay(plan_of(home, mode, data_parallel_size=2), Settings(home=home))
    assert list((home / "tmp").iterdir()) == []


def test_a_replay_that_is_broken_off_leaves_no_rank_and_no_file(home: Path) -> None:
    pids: list[int] = []

    def interrupt(which: str, result: dict[str, Any]) -> None:
        assert (which, result["kind"]) == ("recorded", "version")
        found = sorted((home / "tmp").glob("*/pid-*"))
        pids.extend(int(path.read_text()) for path in found)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(plan_of(home, "endless", data_parallel_size=2), Settings(home=home), on_result=interrupt)
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived the replay"
        time.sleep(0.05)
    assert list((home / "tmp").iterdir()) == []
