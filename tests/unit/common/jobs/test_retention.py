"""Which jobs go and which stay, and that a deleted job stays deleted whatever happens in between."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.config.settings import Settings
from services.common.jobs.folder import MARK_KEPT_S, DeletedJobs, JobFolder, is_deleted
from services.common.jobs.retention import EndedJob, Policy, choose, folder_bytes, sources
from services.common.spec.job import JobSpec

NOW = 1_000_000.0
JOBS = [EndedJob(f"j-{number:08x}", NOW - number * 100, 10 * (number + 1)) for number in range(5)]
"""The first is the newest; sizes 10, 20, 30, 40, 50."""


def gone(policy: Policy, pinned: Collection[str] = ()) -> list[int]:
    """Places in JOBS of those that go."""
    return [JOBS.index(job) for job in choose(JOBS, policy, pinned, NOW)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(), []),
        (Policy(keep=2), [4, 3, 2]),
        (Policy(keep=0), [4, 3, 2, 1, 0]),
        (Policy(keep=9), []),
        (Policy(older_than_s=250), [4, 3]),
        (Policy(older_than_s=0), [4, 3, 2, 1]),
        (Policy(max_bytes=150), []),
        (Policy(max_bytes=149), [4]),
        (Policy(max_bytes=60), [4, 3]),
        (Policy(max_bytes=0), [4, 3, 2, 1, 0]),
        (Policy(keep=4, older_than_s=250, max_bytes=30), [4, 3, 2]),
    ],
)
def test_the_oldest_go_first_and_no_more_of_them_than_the_limits_ask_for(policy: Policy, expected: list[int]) -> None:
    assert gone(policy) == expected


def test_a_pinned_job_stays_and_counts() -> None:
    assert gone(Policy(keep=1), {JOBS[4].id}) == [3, 2, 1]
    assert gone(Policy(older_than_s=0), {JOBS[4].id}) == [3, 2, 1]
    assert gone(Policy(max_bytes=60), {JOBS[4].id}) == [3, 2, 1]
    assert gone(Policy(max_bytes=0), {JOBS[4].id}) == [3, 2, 1, 0]


limits = st.none() | st.integers(0, 30)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12),
    st.builds(Policy, keep=limits, older_than_s=limits, max_bytes=limits),
    st.sets(st.integers(0, 11)),
)
def test_what_is_left_keeps_every_limit_unless_a_pinned_job_stands_in_the_way(
    facts: list[tuple[int, int]], policy: Policy, pinned: set[int]
) -> None:
    jobs = [EndedJob(str(number), NOW - age, size) for number, (age, size) in enumerate(facts)]
    names = {str(number) for number in pinned}
    doomed = {job.id for job in choose(jobs, policy, names, NOW)}
    assert not doomed & names
    left = [job for job in jobs if job.id not in doomed]
    free = [job for job in left if job.id not in names]
    if policy.keep is not None and free:
        assert len(free) <= policy.keep
    if policy.older_than_s is not None:
        assert all(NOW - job.ended_at <= policy.older_than_s for job in free)
    if policy.max_bytes is not None and free:
        assert sum(job.size_bytes for job in left) <= policy.max_bytes
    if policy.keeps_all:
        assert not doomed


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs"
    (folder / "demo-00000001" / "checkpoints").mkdir(parents=True)
    (folder / "demo-00000001" / "checkpoints" / "weights").write_bytes(b"x" * 100_000)
    save(folder / "demo-00000001")
    return folder


def save(folder: Path) -> None:
    JobFolder(folder).save({"id": folder.name, "incarnation": 1}, lambda: "spec")


def test_a_deleted_folder_is_out_of_the_way_at_once_and_gone_when_emptied(jobs: Path) -> None:
    deleted, folder = DeletedJobs(jobs), jobs / "demo-00000001"
    assert not is_deleted(folder)
    deleted.move_away(folder.name)
    assert is_deleted(folder)
    assert not folder.exists()
    assert deleted.unfinished(folder.name)
    deleted.remove_files(folder.name)
    deleted.remove_files(folder.name)
    assert not deleted.unfinished(folder.name)
    assert [path for path in jobs.rglob("*") if path.is_file()] == []
    assert list(jobs.glob("*/job.json")) == []


def test_a_process_that_still_writes_for_a_deleted_job_makes_no_folder(jobs: Path) -> None:
    deleted, folder = DeletedJobs(jobs), jobs / "demo-00000001"
    deleted.move_away(folder.name)
    save(folder)
    assert not folder.exists()
    with pytest.raises(FileNotFoundError):
        JobFolder(folder).append("step", 1, {})
    folder.mkdir()  # one that looked before the mark was there
    (folder / "job.json").write_text("{}")
    assert deleted.unfinished(folder.name)
    deleted.move_away(folder.name)
    deleted.remove_files(folder.name)
    assert not deleted.unfinished(folder.name)


def test_a_link_in_place_of_a_folder_is_removed_and_what_it_leads_to_stays(jobs: Path, tmp_path: Path) -> None:
    moved = (jobs / "demo-00000001").rename(tmp_path / "elsewhere")
    (jobs / "demo-00000001").symlink_to(moved)
    deleted = DeletedJobs(jobs)
    deleted.move_away("demo-00000001")
    deleted.remove_files("demo-00000001")
    assert not deleted.unfinished("demo-00000001")
    assert (moved / "job.json").exists()


def test_a_mark_stays_for_a_week(jobs: Path) -> None:
    deleted = DeletedJobs(jobs)
    deleted.move_away("demo-00000001")
    at = (jobs / ".deleted" / "demo-00000001").stat().st_mtime
    deleted.forget_old(at + 2 * MARK_KEPT_S)
    assert deleted.has_mark("demo-00000001")  # it is not empty
    deleted.remove_files("demo-00000001")
    at = (jobs / ".deleted" / "demo-00000001").stat().st_mtime
    deleted.forget_old(at + MARK_KEPT_S - 1)
    assert deleted.marked() == ["demo-00000001"]
    deleted.forget_old(at + MARK_KEPT_S + 1)
    assert deleted.marked() == []


def test_a_folders_size_is_what_it_takes_on_disk_and_counts_a_file_once(jobs: Path) -> None:
    folder = jobs / "demo-00000001"
    before = folder_bytes(folder)
    assert 100_000 <= before < 140_000
    (folder / "again").hardlink_to(folder / "checkpoints" / "weights")
    assert folder_bytes(folder) - before < 10_000
    assert folder_bytes(folder / "missing") == 0


def spec(**sections: Any) -> JobSpec:
    plain = {"model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}}
    return JobSpec.model_validate(plain | sections)


def test_what_a_job_begins_with_is_known_by_whatever_path_it_is_named(jobs: Path, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, model_roots=[jobs], data_roots=[jobs])
    name = "demo-00000001"
    (jobs / "alias").symlink_to(jobs / name)
    for load in (name, f"{name}/checkpoints", str(jobs / name / "checkpoints"), "alias/checkpoints", f"./{name}"):
        assert sources(spec(checkpoint={"load": load}), settings) == {name}
    assert sources(spec(model={"path": f"{name}/checkpoints"}), settings) == {name}
    (jobs / name / "samples.jsonl").write_text("{}")
    assert sources(spec(data={"train": {"source": f"{name}/samples.jsonl"}}), settings) == {name}
    for other in ("../x", "/etc", str(tmp_path / "models" / "m")):
        assert sources(spec(checkpoint={"load": other}), settings) == set()
    assert sources(spec(), settings) == set()


@pytest.mark.usefixtures("jobs")
def test_a_relative_home_is_the_same_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    settings = Settings(home=Path(os.path.relpath(tmp_path)))
    assert sources(spec(checkpoint={"load": "demo-00000001"}), settings) == {"demo-00000001"}
