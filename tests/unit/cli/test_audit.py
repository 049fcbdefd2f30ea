"""`millrace audit`: exit codes, and what people and programs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.jobs.fates import Fate
from services.learner.groups.ledger import Settled
from services.learner.storage.journal_key import JournalKey
from tests.unit.cli.test_main import millrace
from tests.unit.learner.journalled_job import JournalledJob


@pytest.fixture
def job() -> JournalledJob:
    return JournalledJob()


def test_a_sound_job_ends_with_0_and_its_sums(job: JournalledJob, tmp_path: Path) -> None:
    job.write(tmp_path / "jobs" / "job")
    done = millrace("audit", "job", "--home", str(tmp_path), "--ended")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    for row in (
        ["issued", "21"],
        ["trained", "10"],
        ["degenerate", "5"],
        ["stale", "0"],
        ["failed", "5"],
        ["active", "0"],
    ):
        assert row in lines
    assert "no violation" in done.stdout
    assert "the gateway was not asked: nothing is up" in " ".join(done.stdout.split())


def test_a_job_may_be_named_by_the_only_beginning_of_its_id(job: JournalledJob, tmp_path: Path) -> None:
    for name in ("alpha", "alphabet", "beta"):
        job.write(tmp_path / "jobs" / name)
    found = millrace("audit", "be", "--home", str(tmp_path), "--ended", "--json")
    assert json.loads(found.stdout)["job"] == "beta"
    several = millrace("audit", "alp", "--home", str(tmp_path))
    assert several.returncode == 1
    assert "alp begins the ids of several jobs: alpha, alphabet" in several.stderr
    whole = millrace("audit", "alpha", "--home", str(tmp_path), "--ended", "--json")
    assert json.loads(whole.stdout)["job"] == "alpha"


def test_a_violation_ends_with_1_and_names_its_place(job: JournalledJob, tmp_path: Path) -> None:
    job.change(4, settled=(*job.records[3].settled, Settled(2, Fate.FAILED, "again")))
    job.write(tmp_path / "jobs" / "job")
    done = millrace("audit", "job", "--home", str(tmp_path), "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert report["violations"] == [
        {
            "breach": "two_fates",
            "where": "journal/segment-0000000001.wal, step 4",
            "message": "group 2 is failed, and was degenerate by the record of step 1",
        }
    ]


@pytest.mark.parametrize("name", ["nothing", "..", "a/b", "../jobs/job"])
def test_a_job_that_is_not_there_is_one_line(job: JournalledJob, tmp_path: Path, name: str) -> None:
    job.write(tmp_path / "jobs" / "job")
    done = millrace("audit", name, "--home", str(tmp_path))
    assert done.returncode == 1
    assert f"there is no job {name!r}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_proves_the_records_another_says_so_and_neither_is_shown(job: JournalledJob, tmp_path: Path) -> None:
    for name, secret in (("key", "correct horse battery staple"), ("other", "incorrect horse, other staple")):
        (tmp_path / name).write_text(secret)
    job.key = JournalKey.read(tmp_path / "key")
    job.write(tmp_path / "jobs" / "job")
    proved = millrace("audit", "job", "--home", str(tmp_path), "--ended", "--key-file", str(tmp_path / "key"))
    assert proved.returncode == 0, proved.stdout
    assert "6 of 6 records proved by the key" in proved.stdout
    assert "not proved here: that the batches lead to the recorded weights" in " ".join(proved.stdout.split())
    wrong = millrace("audit", "job", "--home", str(tmp_path), "--ended", "--key-file", str(tmp_path / "other"))
    assert wrong.returncode == 1
    assert "made with another key" in wrong.stdout
    missing = millrace("audit", "job", "--home", str(tmp_path), "--key-file", str(tmp_path / "nowhere"))
    assert (missing.returncode, "cannot read" in missing.stderr, "Traceback" in missing.stderr) == (1, True, False)
    assert "horse" not in proved.stdout + proved.stderr + wrong.stdout + wrong.stderr
