"""The store of kept samples has every k-th step, loses nothing to a crash, and never grows beyond its bound."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.common.jobs.kept_samples import SAMPLES_FILE, KeptSamples, read_kept, step_of


def sample(step: int | None, group: int = 0, text: str = "5") -> dict[str, Any]:
    rollouts = [] if step is None else [{"text": text, "max_policy_version": version} for version in (step - 1, step)]
    return {"purpose": "train", "lineage": 1, "group_id": group, "attempt": 1, "rollouts": rollouts}


def steps(folder: Path) -> list[int | None]:
    return [step_of(found) for found in read_kept(folder)]


def test_while_the_job_runs_every_kth_step_is_kept_and_at_its_end_what_is_new(tmp_path: Path) -> None:
    kept = KeptSamples(tmp_path, 10)
    assert kept.add([sample(step, step) for step in range(1, 25)], ended=False) == 2
    assert kept.add([sample(None, 99)], ended=False) == 0
    assert kept.add([sample(step, step) for step in range(15, 32)], ended=False) == 1, (
        "what is there is not added again"
    )
    assert steps(tmp_path) == [10, 20, 30]
    assert kept.add([sample(step, step) for step in (29, 30, 31)], ended=True) == 2
    assert steps(tmp_path) == [10, 20, 30, 29, 31]


def test_the_next_writer_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    KeptSamples(tmp_path, 1).add([sample(1, 1), sample(2, 2)], ended=False)
    whole = (tmp_path / SAMPLES_FILE).read_bytes()
    (tmp_path / SAMPLES_FILE).write_bytes(whole[:-7])
    assert KeptSamples(tmp_path, 1).add([sample(1, 1), sample(2, 2)], ended=False) == 1
    assert steps(tmp_path) == [1, 2]
    lines = (tmp_path / SAMPLES_FILE).read_text().splitlines()
    assert [json.loads(lines[0])["group_id"], json.loads(lines[2])["group_id"]] == [1, 2]


@pytest.mark.parametrize("same_step", [False, True])
def test_the_file_stays_within_its_bound_and_keeps_the_newest(tmp_path: Path, same_step: bool) -> None:
    bound = 20_000
    kept = KeptSamples(tmp_path, 1, max_bytes=bound)
    for number in range(1, 400):
        kept.add([sample(8 if same_step else number, number, "x" * 100)], ended=False)
        assert (tmp_path / SAMPLES_FILE).stat().st_size <= bound
    found = steps(tmp_path)
    if not same_step:
        distances = {later - earlier for earlier, later in pairwise(found) if earlier and later}
        assert len(distances) == 1, "the steps that stay are equally far apart"
        assert found[0] == distances.pop()
    assert len(found) > 15


def test_a_folder_without_samples_has_none(tmp_path: Path) -> None:
    assert read_kept(tmp_path) == []
